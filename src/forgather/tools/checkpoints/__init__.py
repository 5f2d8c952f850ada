"""Checkpoint tools: list, inspect, verify, compare, modify and import checkpoints, without a training job.

A checkpoint is untrusted data here: nothing is unpickled, and no code that it names is imported.
"""

# - `listing` finds the checkpoints of a run, with their state and marks.
# - `inspection` describes one checkpoint; `stored_state` reads its tensors and values by name.
# - `verification` compares files with their checksums.
# - `differences` compares two checkpoints; `tensor_comparison` has the arithmetic.
# - `modification` writes a changed copy; `edits` has the changes themselves.
# - `conversion` imports checkpoints of other programs.

from forgather.tools.checkpoints.conversion import ImportedCheckpoint, import_as_checkpoint
from forgather.tools.checkpoints.differences import Differences, compare_checkpoints
from forgather.tools.checkpoints.inspection import CheckpointDetails, inspect_checkpoint
from forgather.tools.checkpoints.listing import ListedCheckpoint, Listing, list_checkpoints
from forgather.tools.checkpoints.modification import Modification, modify_checkpoint
from forgather.tools.checkpoints.verification import Verification, verify_checkpoints

__all__ = [
    "CheckpointDetails",
    "Differences",
    "ImportedCheckpoint",
    "ListedCheckpoint",
    "Listing",
    "Modification",
    "Verification",
    "compare_checkpoints",
    "import_as_checkpoint",
    "inspect_checkpoint",
    "list_checkpoints",
    "modify_checkpoint",
    "verify_checkpoints",
]
