"""Settings that may change during a run: the schedule of logs, evaluations and saves.

They decide neither the batches nor the updates, so training stays the same. A changed setting is not stored: a resumed
run has the settings of its own arguments.
"""

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forgather._control.messages import BadRequest
from forgather._suggestions import did_you_mean
from forgather.ml.trainer.arguments.field_values import converted, fields_with_types
from forgather.ml.trainer.setup.hook_checks import is_overridden

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

CHANGEABLE = (
    "logging_steps",
    "logging_strategy",
    "eval_steps",
    "eval_strategy",
    "eval_delay",
    "max_eval_steps",
    "save_steps",
    "save_strategy",
    "save_total_limit",
)
_REASONS = {
    "max_steps": "the learning-rate schedule is planned for it",
    "num_train_epochs": "the learning-rate schedule is planned for it",
    "learning_rate": "the optimizer and its schedule hold it as checkpointed state",
    "output_dir": "it is locked by this job",
}
_DEFAULT_REASON = "it is read when training starts"
_IN_STATE = ("logging_steps", "eval_steps", "save_steps", "max_eval_steps")
_OF_OWN_SCHEDULE = ("max_eval_steps", "save_total_limit")
"""Settings that do not go through the periodic functions of the trainer."""


def checked_settings(trainer: "Trainer[Any]", values: Mapping[str, object]) -> dict[str, Any]:
    """Return the new values in their types; raise `BadRequest` with the reason if one cannot be set."""
    known = fields_with_types(type(trainer.args))
    changes: dict[str, Any] = {}
    for given, value in values.items():
        name = given.removeprefix("args.")
        _require_changeable(trainer, name, known)
        try:
            changes[name] = converted(name, _unquoted(value), known[name])
        except ValueError as error:
            raise BadRequest(str(error)) from None
    if not changes:
        raise BadRequest(f"Name a setting, such as logging_steps=10. These can be set: {', '.join(CHANGEABLE)}.")
    _require_valid(trainer, changes)
    return changes


def _require_changeable(trainer: "Trainer[Any]", name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise BadRequest(
            f"There is no setting {name!r}.{did_you_mean(name, CHANGEABLE)} These can be set: {', '.join(CHANGEABLE)}."
        )
    if name not in CHANGEABLE:
        raise BadRequest(
            f"{name} cannot be changed during a run: {_REASONS.get(name, _DEFAULT_REASON)}. Stop the job, and start it again "
            f"with the new value. These can be set: {', '.join(CHANGEABLE)}."
        )
    if name not in _OF_OWN_SCHEDULE and is_overridden(trainer, "_setup_periodic_functions"):
        raise BadRequest(f"{name} has no effect: {type(trainer).__name__} makes its own schedule of logs and saves.")


def _require_valid(trainer: "Trainer[Any]", changes: Mapping[str, Any]) -> None:
    """Raise `BadRequest` if the arguments reject the values."""
    try:
        new = dataclasses.replace(copy.deepcopy(trainer.args), **changes)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if new.eval_strategy != "no" and trainer.eval_dataset is None and "eval_strategy" in changes:
        raise BadRequest(f"eval_strategy={new.eval_strategy!r} cannot be used: the run has no eval_dataset.")


def _unquoted(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def apply_settings(trainer: "Trainer[Any]", changes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Change the arguments of this rank, and return the old and new values; all ranks call it at the same step."""
    changed = {name: [getattr(trainer.args, name), value] for name, value in changes.items()}
    for name, value in changes.items():
        setattr(trainer.args, name, value)
        if name in _IN_STATE and hasattr(trainer.state, name):
            # Callbacks of transformers read these.
            setattr(trainer.state, name, value)
    if "save_total_limit" in changes:
        trainer.checkpoint_manager.set_save_total_limit(changes["save_total_limit"])
    cadence = trainer.loop.cadence
    if not is_overridden(trainer, "_setup_periodic_functions"):
        cadence.follow_arguments()
    if trainer.team.rank == 0:
        text = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        logger.warning("forgather control, after step %d: %s", trainer.state.global_step, text)
    return changed
