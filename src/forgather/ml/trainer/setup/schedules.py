"""Learning-rate schedules by name: common schedules from torch alone, others and their options from transformers.

Importing `transformers.optimization` takes longer than importing torch, because it imports installed packages such as
peft, torchao and accelerate. Rates and checkpoint states are bit-identical to transformers, so a run can resume from a
checkpoint of either implementation. `optimizer_construction` and `phases` call `make_schedule`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

Factor = Callable[..., float]


def make_schedule(
    name: str, optimizer: OptimizerT, num_warmup_steps: int, num_steps: int, options: Mapping[str, Any] | None
) -> LRSchedulerT:
    """Return the schedule with this name; `options` are keywords of its function in transformers."""
    if name == "constant" and not options:
        return LambdaLR(optimizer, _constant)
    if name in _FACTORS and not options:
        # A partial, as in transformers: torch stores its attributes in checkpoints, and it has none.
        factor = functools.partial(_FACTORS[name], num_warmup_steps=num_warmup_steps, num_steps=num_steps)
        return LambdaLR(optimizer, factor)
    from transformers.optimization import get_scheduler

    schedule: LRSchedulerT = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=None if options is None else dict(options),
    )
    return schedule


def _constant(step: int) -> float:
    # An int, as in transformers: a learning rate that is an integer stays an integer, in checkpoints too.
    return 1


def _constant_with_warmup(step: int, *, num_warmup_steps: int, num_steps: int) -> float:
    return _warm_up(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def _linear(step: int, *, num_warmup_steps: int, num_steps: int) -> float:
    if step < num_warmup_steps:
        return _warm_up(step, num_warmup_steps)
    return max(0.0, float(num_steps - step) / _num_decay_steps(num_warmup_steps, num_steps))


def _cosine(step: int, *, num_warmup_steps: int, num_steps: int) -> float:
    if step < num_warmup_steps:
        return _warm_up(step, num_warmup_steps)
    progress = float(step - num_warmup_steps) / _num_decay_steps(num_warmup_steps, num_steps)
    return max(0.0, (1.0 + math.cos(math.pi * progress)) / 2)


def _warm_up(step: int, num_warmup_steps: int) -> float:
    return step / num_warmup_steps


def _num_decay_steps(num_warmup_steps: int, num_steps: int) -> float:
    # A run without a step limit has more steps than a float represents exactly. Round before the division, as
    # transformers does, to get the same bits.
    return float(max(1, num_steps - num_warmup_steps))


_FACTORS: dict[str, Factor] = {
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
}
