"""How long training and evaluation will take, as far as that is known."""

from typing import Any

from forgather.ml.trainer.trainer_types import TrainerState

# Trainers put numbers beyond any real run where there is no limit.
_NO_LIMIT = 2**60


def planned_steps(state: TrainerState) -> int | None:
    """The step at which training ends; None without a limit."""
    return state.max_steps if 0 < state.max_steps < _NO_LIMIT else None


def planned_eval_batches(state: TrainerState, eval_dataloader: Any) -> int | None:
    """The number of batches of an evaluation; None for a loader without length or limit."""
    limit = state.max_eval_steps if 0 < state.max_eval_steps < _NO_LIMIT else None
    try:
        length = len(eval_dataloader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)
