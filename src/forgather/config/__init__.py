"""Configurations: schema, YAML and options, help page, and builders for the objects that a configuration names.

`parser` checks keys and types, and records the origin of each value. The builders create models, data, losses and
callbacks, and raise `UsageError` with the key of a bad value. `schema`, `help` and `trainer_kinds` import no torch, so
that help pages appear quickly.
"""
