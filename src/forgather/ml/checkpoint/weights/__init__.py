"""Weights as Hugging Face files: safetensors shards, their index, tied parameters, and export."""
