"""State encoding: a codec to plain containers and tensors, digests, and readers that never run code.

`snapshot` encodes and hashes state here. `files` and `foreign` read files through these readers.
"""
