"""Fields of `transformers.TrainingArguments` and their conversion to Forgather's arguments.

`field_map` has a row for every field, and `engine_arguments` makes the arguments of an engine from the rows.
"""
