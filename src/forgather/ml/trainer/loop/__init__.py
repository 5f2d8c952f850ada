"""Collaborators of the training loop: steps, logs, evaluation, saves, and the state they share (`loop_state`).

`Trainer` owns one of each per run. None of them decides when ranks meet: collectives run where `Trainer` calls them.
"""
