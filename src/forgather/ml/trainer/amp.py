"""Mixed precision: autocast, and the loss scale that float16 needs."""

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.tensor_checks import Where, check_mapping, one_number, whole_number
from forgather.ml.trainer.loop.nonfinite import LateFlag
from forgather.ml.trainer.trainer_types import OptimizerT

logger = logging.getLogger(__name__)

_AS_IT_IS = nullcontext()
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

_SCALE = Where("the saved loss scale", "trainer")
_MOST_STEPS = 2**31 - 1
"""What the scaler's counter, an int32 on the device, can hold."""


class AMPContext:
    """Runs forward passes in the chosen precision, and steps optimizers through a loss scale where it takes one.

    `mixed_precision` is None or "no" (all methods do the plain thing), "bf16" or "fp16".
    """

    def __init__(self, mixed_precision: str | None, device_type: str = "cuda", initial_scale: float = 2.0**16) -> None:
        if mixed_precision not in (None, "no", *_DTYPES):
            choices = ", ".join(map(repr, (None, "no", *_DTYPES)))
            raise ValueError(f"mixed_precision={mixed_precision!r} cannot be used: choose one of {choices}.")
        self._mixed_precision = mixed_precision
        self._device_type = device_type
        self._dtype = _DTYPES.get(mixed_precision or "no")
        self._scaler = _grad_scaler(device_type, initial_scale) if mixed_precision == "fp16" else None
        self._known_scale = float(initial_scale)
        self._one: Tensor | None = None
        self.left_out: LateFlag | None = None
        """Whether the last step was left out, once that is known on the host; None where no step ever is."""

    @property
    def enabled(self) -> bool:
        """Whether forward passes run in mixed precision."""
        return self._dtype is not None

    @property
    def has_loss_scale(self) -> bool:
        return self._scaler is not None

    def autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return _AS_IT_IS
        return torch.autocast(self._device_type, dtype=self._dtype)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale_(self, optimizer: OptimizerT) -> None:
        """Give the gradients their true size, as clipping needs; at most once per step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: OptimizerT) -> None:
        """Step, unless float16 gradients overflowed: then the step is left out and the loss scale drops."""
        if self._scaler is None:
            optimizer.step()
            return
        before = self._scale_on_device(self._scaler)
        self._scaler.step(optimizer)
        self._scaler.update()
        # The scale drops when, and only when, a step was left out. To compare it here would mean to wait.
        self.left_out = LateFlag(self._scale_on_device(self._scaler) < before)
        if self._device_type == "cpu":
            self.log_scale_drop()

    def _scale_on_device(self, scaler: torch.amp.GradScaler) -> Tensor:
        if self._one is None:
            self._one = torch.ones((), device=self._device_type)
        scaled: Tensor = scaler.scale(self._one)
        return scaled

    def log_scale_drop(self) -> None:
        """Log whether the loss scale is lower than when last looked at.

        On accelerators this waits for the device, so `optimizer_step` leaves it to the caller's log step.
        """
        if self._scaler is None:
            return
        scale = self._scaler.get_scale()
        if scale < self._known_scale:
            logger.info("loss scale dropped from %g to %g", self._known_scale, scale)
        self._known_scale = scale

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loss scale; a state of another precision is left alone, with a warning."""
        self.check_state_dict(state_dict)
        if self._scaler is None:
            if state_dict:
                logger.warning(
                    "The checkpoint has the loss scale of an fp16 run, which mixed_precision=%r does not use: ignored.",
                    self._mixed_precision,
                )
            return
        if not state_dict:
            logger.warning(
                "The checkpoint has no loss scale, since it was not trained in fp16: it starts at %g.",
                self._scaler.get_scale(),
            )
            return
        state = _scaler_state(state_dict)
        self._scaler.load_state_dict(state)
        self._known_scale = state["scale"]

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless the state is empty or a loss scale that can be used; nothing is changed."""
        if check_mapping(state_dict, _SCALE):
            _scaler_state(state_dict)


def _scaler_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state of torch's scaler as plain numbers, each in the range that the scaler works with."""
    factors = {
        "scale": (0.0, torch.finfo(torch.float32).max),
        "growth_factor": (1.0, math.inf),
        "backoff_factor": (0.0, 1.0),
    }
    state: dict[str, Any] = {
        name: _number_between(state_dict.get(name), _SCALE.at(name), *limits) for name, limits in factors.items()
    }
    state["growth_interval"] = whole_number(
        state_dict.get("growth_interval"), _SCALE.at("growth_interval"), least=1, most=_MOST_STEPS
    )
    tracker = state_dict.get("_growth_tracker")
    state["_growth_tracker"] = whole_number(tracker, _SCALE.at("_growth_tracker"), least=0, most=_MOST_STEPS)
    return state


def _number_between(value: object, where: Where, above: float, below: float) -> float:
    number = one_number(value, where)
    if not above < number < below:
        raise where.refusal(f"is {number}", f"a number above {above:g} and below {below:g}")
    return number


def _grad_scaler(device_type: str, initial_scale: float) -> torch.amp.GradScaler | None:
    scaler = torch.amp.GradScaler(device_type, init_scale=initial_scale)
    # Without its device torch warns and turns the scaler off; its scale of 1 would then look like a drop.
    return scaler if scaler.is_enabled() else None
