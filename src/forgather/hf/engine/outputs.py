"""Trainer state and training output in the classes of transformers.

`EngineState` has the fields of both libraries, so callbacks of transformers get the class that they expect.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.trainer_utils import TrainOutput

from forgather.ml.trainer.trainer import TrainerState as OwnState
from forgather.ml.trainer.trainer_types import TrainerState as BaseState
from forgather.ml.trainer.trainer_types import TrainOutput as OwnOutput


@dataclass(kw_only=True)
class EngineState(OwnState, transformers.TrainerState):  # type: ignore[misc]
    """Progress of training with the fields of Forgather and of transformers."""


def as_state(state: BaseState) -> EngineState:
    """Return a state as an instance of `transformers.TrainerState` too."""
    values: dict[str, Any] = {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}
    # A whole number, as in transformers: callbacks count with it.
    values["num_train_epochs"] = math.ceil(state.num_train_epochs)
    return EngineState(**values)


def first_state(args: Any, is_local_zero: bool, is_world_zero: bool) -> EngineState:
    """Return the state of a trainer that has not been prepared."""
    return EngineState(
        logging_steps=int(args.logging_steps),
        eval_steps=int(args.eval_steps or 0),
        save_steps=int(args.save_steps),
        train_batch_size=args.train_batch_size,
        max_steps=max(args.max_steps, 0),
        num_train_epochs=math.ceil(args.num_train_epochs),
        max_eval_steps=-1,
        is_local_process_zero=is_local_zero,
        is_world_process_zero=is_world_zero,
    )


def as_train_output(output: OwnOutput) -> TrainOutput:
    """Return the result of a run as transformers' named tuple."""
    return TrainOutput(output.global_step, output.metrics.get("train_loss", 0.0), dict(with_total_flos(output.metrics)))


def with_total_flos(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a run with `total_flos`, the name of transformers for `total_flops`."""
    return {**metrics, "total_flos": metrics["total_flops"]} if "total_flops" in metrics else metrics
