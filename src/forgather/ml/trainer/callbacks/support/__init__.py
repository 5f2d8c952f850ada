"""Helpers of callbacks: handler signatures, checks of callback state, detection of repeated records.

For the modules of `forgather.ml.trainer.callbacks` only.
"""
