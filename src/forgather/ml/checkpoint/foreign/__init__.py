"""Import of checkpoints of other programs: transformers, accelerate, DeepSpeed, torch DCP, Hugging Face weights.

Forgather never replaces, deletes or changes such a directory, and runs no code from its files.
"""

# - `ownership` recognises the program by the files in a directory. The store asks it before it replaces anything.
# - `importing` has `import_checkpoint`. The coordinator calls it instead of `CheckpointReader`.
# - `weights` and `dcp_weights` load weights by FQN, from weight files or from torch.distributed.checkpoint.
# - `training_state`, `moments` and `schedules` load optimizer, schedule and step if their files hold plain data.

from forgather.ml.checkpoint.foreign.ownership import Owner, recognise

__all__ = ["Owner", "recognise"]
