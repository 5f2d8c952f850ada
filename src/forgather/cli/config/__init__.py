"""Configurations: schema, YAML and options, help page, and the objects that a configuration names.

`parser` checks keys and types and knows where each value came from; the builders make models, data, losses and callbacks
of it, and raise `UsageError` with the key of a value that cannot be used. `schema`, `help` and `trainer_kinds` import no
torch, so that the commands can show their help quickly.
"""
