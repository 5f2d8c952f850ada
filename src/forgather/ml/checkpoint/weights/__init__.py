"""Model weights in Hugging Face files: safetensors shards, their index, tied parameters, and export.

Checkpoints, exports and `forgather.ml.sharded_checkpoint` write and read weights through these modules.
"""
