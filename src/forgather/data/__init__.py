"""Text data: documents of files and datasets, tokenizers, token arrays on disk, packed sequences.

Called by the command line; usable by itself. Nothing here knows of trainers or ranks: the tokens of the same documents
are the same on every rank, and files of tokens appear whole or not at all.
"""
