"""Comparison of two runs: settings, logged numbers bit by bit, and checkpoints tensor by tensor.

`forgather.tools.comparison.runs.compare_runs` is the function behind `forgather compare`.
"""
