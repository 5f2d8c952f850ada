"""Arguments of the engine: the strategy of a run, and our arguments object, converted from `transformers.TrainingArguments`.

A refused field raises ValueError here, at the construction of the trainer. `Trainer` of this package calls it.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from forgather.hf.arguments import ForgatherFields, asked_fields
from forgather.hf.fields.field_map import FIELDS
from forgather.hf.fields.kinds import Mapped, NoEffect, Refused, Same
from forgather.hf.fields.other_settings import asks_for_fsdp, check_other_settings, from_environment
from forgather.ml.distributed import get_world_size
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

_PREFIX = "fg_"
_OWN_TARGETS = {
    "fg_n_microbatches": "n_microbatches",
    "fg_stages_per_rank": "stages_per_rank",
    "fg_pp_size": "pp_size",
    "fg_watch": "watch",
}
"""Fields that are passed on only if they are set, because the engine has other defaults."""
_HANDLED_HERE = ("fg_strategy", "fg_options", "fg_shard_optimizer", "fg_pipe_schedule", *_OWN_TARGETS)


def strategy_of(args: Any) -> str:
    """Return the strategy of a run: the requested one, or a choice by `fsdp` and the number of processes."""
    asked: str = getattr(args, "fg_strategy", "auto")
    if asked != "auto":
        return asked
    if asks_for_fsdp(args):
        return "fsdp2"
    return "ddp" if get_world_size() > 1 else "single"


def to_engine_arguments(args: Any, engine_class: type[TrainingArguments], *, warns: bool = True) -> TrainingArguments:
    """Return the engine's arguments for arguments of transformers; raise ValueError for a refused field.

    `warns` logs the fields without effect.
    """
    _refuse(args, warns)
    if warns:
        check_other_settings(args, strategy_of(args))
    values = _with_sharded_optimizer({**_mapped_values(args), **_own_values(args)}, args)
    options = getattr(args, "fg_options", None) or {}
    # Options named by the user are never dropped: an unknown name raises.
    return engine_class(**{**_known(values, engine_class), **options})


def _refuse(args: Any, warns: bool) -> None:
    asked = asked_fields(args)
    for name in sorted(asked & FIELDS.keys()):
        row, value = FIELDS[name], getattr(args, name)
        if isinstance(row, Refused) and not (row.accepts is not None and row.accepts(args)):
            raise ValueError(f"{name}={value!r} cannot be used: {row.reason} {row.remedy}")
        if isinstance(row, NoEffect) and warns:
            logger.warning("%s=%r has no effect: %s", name, value, row.reason)


def _mapped_values(args: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"resume_from_checkpoint": False, "checkpoint_layout": "output_dir"}
    for name, row in FIELDS.items():
        if isinstance(row, Same) and row.engine:
            values[name] = getattr(args, name)
        elif isinstance(row, Mapped) and hasattr(args, name):
            values.update(row.convert(args))
    # As in transformers, zero, a negative number and None mean no limit.
    norm = values["max_grad_norm"]
    values["max_grad_norm"] = norm if norm is not None and norm > 0 else None
    # As in `args.device` of transformers.
    values["use_cpu"] = args.use_cpu or from_environment("ACCELERATE_USE_CPU")
    return values


def _own_values(args: Any) -> dict[str, Any]:
    if not isinstance(args, ForgatherFields):
        return {}
    names = [one.name for one in dataclasses.fields(ForgatherFields)]
    values = {name.removeprefix(_PREFIX): getattr(args, name) for name in names if name not in _HANDLED_HERE}
    values |= {ours: getattr(args, name) for name, ours in _OWN_TARGETS.items() if getattr(args, name) is not None}
    return values


def _with_sharded_optimizer(values: dict[str, Any], args: Any) -> dict[str, Any]:
    """Return values with ddp.shard_optimizer, if it is requested."""
    if not getattr(args, "fg_shard_optimizer", False):
        return values
    return {**values, "ddp": {**values["ddp"], "shard_optimizer": True}}


def _known(values: Mapping[str, Any], engine_class: type[TrainingArguments]) -> dict[str, Any]:
    """Return the values that the engine's arguments have; drop options of other strategies."""
    known = {one.name for one in dataclasses.fields(engine_class)}
    of_strategies = {"ddp", "fsdp2", "dispatch_batches", *_OWN_TARGETS.values()}
    unknown = values.keys() - known - of_strategies
    assert not unknown, f"the engine has no arguments {sorted(unknown)}"
    return {name: value for name, value in values.items() if name in known}
