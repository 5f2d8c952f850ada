"""Splitters: divide a model into pipeline stages, by its structure (causal LM) or by tracing it (automatic)."""
