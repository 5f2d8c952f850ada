"""Ranks of a trainer: collectives, per-rank batches, and replicas of one model.

`team` is what trainers talk to: `RankTeam` for several processes, `SoloTeam` for one. The invariant of this package:
every rank reaches each collective, or none does.
"""
