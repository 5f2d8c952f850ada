"""Ranks of a trainer: collectives, per-rank batches, and replicas of one model.

Trainers use `team`: `RankTeam` for several processes, `SoloTeam` for one. Invariant of this package: each collective is
reached by all ranks or by none.
"""
