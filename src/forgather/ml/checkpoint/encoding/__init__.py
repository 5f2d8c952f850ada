"""Encoding of state: a codec to plain containers and tensors, digests, and readers that never run code."""
