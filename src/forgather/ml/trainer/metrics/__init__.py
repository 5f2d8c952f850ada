"""Metrics of evaluations over all ranks: collected predictions, `compute_metrics`, `predict`.

Each sample of the dataset counts once, in the order of the dataset, for any number of ranks. Nothing is collected unless
metrics or predictions are asked for. `loop.evaluator` calls this package on every rank.
"""
