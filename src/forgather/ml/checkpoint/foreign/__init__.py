"""Checkpoints of other programs: whose directory it is (`recognise`), and what can be taken over from it.

- `ownership`: recognition by the files in a directory. Only a directory with a valid manifest of ours is ever replaced.
- `importing`: `import_checkpoint`, which the coordinator calls in place of its reader of our own checkpoints.
- `weights`, `dcp_weights`: weights by FQN, from weight files or from a directory of torch.distributed.checkpoint.
- `training_state`, `moments`, `schedules`: optimizer, schedule and step, as far as their files hold plain data.
"""

from forgather.ml.checkpoint.foreign.ownership import Owner, recognise

__all__ = ["Owner", "recognise"]
