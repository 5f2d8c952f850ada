"""Splitters: functions that divide a model into pipeline stages.

`causal_lm` splits a model by its structure, `automatic` splits any model that torch.export can trace.
"""
