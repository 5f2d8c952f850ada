"""Collaborators of the training loop: steps, logging, evaluation, checkpoint saves, and their shared `LoopState`.

`Trainer` owns one of each per run. Collectives run only where `Trainer` calls these objects on every rank.
"""
