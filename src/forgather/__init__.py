"""Forgather: one training loop and one checkpoint system for every kind of parallelism."""

__version__ = "0.1.0"
