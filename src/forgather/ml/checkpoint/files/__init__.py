"""Checkpoint files: planned by a snapshot, hashed and fsynced while written, verified by checksum when read.

`store` owns the directory and its atomic rename; these modules own the files inside it.
"""
