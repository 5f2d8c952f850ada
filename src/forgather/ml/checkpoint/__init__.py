"""How state reaches the disk and comes back: encoding, digests, weight files, and the transaction that holds them.

Nothing in this package knows what a trainer is; `forgather.ml.trainer.checkpoint_coordinator` is its caller.
"""
