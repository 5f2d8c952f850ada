"""Samples before collation: used columns and the order by length.

`columns` removes columns that the model does not accept, and `length_groups` is a sampler of similar lengths.
"""
