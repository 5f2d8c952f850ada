"""Text data: documents of files and datasets, tokenizers, token arrays on disk, packed sequences.

Called by the command line and usable alone. Nothing here depends on trainers or ranks: every rank gets the same tokens
for the same documents, and token files are created atomically.
"""
