"""Watch over ranks: names a rank that is stopped, loops, has died or cannot be reached, and ends the job with code 75.

Each rank notes its step and phase in shared memory, and once a second in the store of torch.distributed. `watching`
surrounds a run. `note`, `note_step` and `note_batch` are called at the boundaries of the loop and cost a fraction of a
microsecond. The watcher process of a rank is in `forgather._watch`.
"""

from forgather._watch.limits import (
    AFTER_STEP,
    CALLBACK,
    EVALUATION,
    EVALUATION_START,
    FORWARD_BACKWARD,
    LOADING,
    OPTIMIZER,
    OUTSIDE,
    REDUCE,
    SAVING,
    SETUP,
    Limits,
)
from forgather._watch.watcher import EXIT_CODE
from forgather.ml.distributed.watch.marks import enter, in_phase, note, note_batch, note_progress, note_step
from forgather.ml.distributed.watch.place import Place, place_of
from forgather.ml.distributed.watch.sentry import RankHang, register_early, watching

__all__ = [
    "AFTER_STEP",
    "CALLBACK",
    "EVALUATION",
    "EVALUATION_START",
    "EXIT_CODE",
    "FORWARD_BACKWARD",
    "LOADING",
    "OPTIMIZER",
    "OUTSIDE",
    "REDUCE",
    "SAVING",
    "SETUP",
    "Limits",
    "Place",
    "RankHang",
    "enter",
    "in_phase",
    "note",
    "note_batch",
    "note_progress",
    "note_step",
    "place_of",
    "register_early",
    "watching",
]
