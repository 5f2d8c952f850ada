"""Scripts in the style of transformers' examples: the same calls in the same order, with data and models of a few KB.

Each has one statement `from transformers import ...`. The tests change this statement to `from forgather.hf import ...`.
"""
