"""How state reaches the disk and comes back: encoding, digests, weight files, and the transaction that holds them.

`register_state_class` allows checkpoints to hold instances of a class of yours. Nothing in this package knows what a
trainer is; `forgather.ml.checkpoint.coordinator` is its caller.
"""

from forgather.ml.checkpoint.state.state_classes import register_state_class

__all__ = ["register_state_class"]
