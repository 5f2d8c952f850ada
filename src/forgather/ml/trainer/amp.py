"""Mixed precision (AMP): autocast, and the GradScaler loss scale for float16.

`Trainer` uses one `AMPContext` for the forward pass, gradient clipping and the optimizer step. The loss scale is
checkpointed with the component "trainer", so that a resumed run continues with it.
"""

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
"""Maximum of the scaler's growth counter, an int32 on the device."""


class AMPContext:
    """Autocast context for forward passes, with a GradScaler around optimizer steps for float16.

    `mixed_precision` is None or "no" (no autocast, no scaling), "bf16" or "fp16".
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
        """Whether GradScaler skipped the last step, as a flag on the device. None without a loss scale."""

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
        """Divide the gradients by the loss scale, for clipping. Call it at most once per step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: OptimizerT) -> None:
        """Step the optimizer. If float16 gradients overflowed, skip the step and lower the loss scale."""
        if self._scaler is None:
            optimizer.step()
            return
        before = self._scale_on_device(self._scaler)
        self._scaler.step(optimizer)
        self._scaler.update()
        # GradScaler does not report a skipped step, but lowers the scale exactly then. Both scales stay on the device:
        # reading them here would make the host wait for the step.
        self.left_out = LateFlag(self._scale_on_device(self._scaler) < before)
        if self._device_type == "cpu":
            # On the CPU the scale is known without waiting.
            self.log_scale_drop()

    def _scale_on_device(self, scaler: torch.amp.GradScaler) -> Tensor:
        # `get_scale` returns a Python float, which waits for the device. Scaling the number 1 gives a tensor.
        if self._one is None:
            self._one = torch.ones((), device=self._device_type)
        scaled: Tensor = scaler.scale(self._one)
        return scaled

    def log_scale_drop(self) -> None:
        """Log a drop of the loss scale since the last call.

        On accelerators this waits for the device, so `optimizer_step` does not call it. `Reporter` does when it logs.
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
        """Restore the loss scale. Ignore the state of another precision, with a warning."""
        self.check_state_dict(state_dict)
        if self._scaler is None:
            if state_dict:
                logger.warning(
                    "The checkpoint has the loss scale of an fp16 run. mixed_precision=%r ignores it.",
                    self._mixed_precision,
                )
            return
        if not state_dict:
            logger.warning(
                "The checkpoint has no loss scale, because it was not trained in fp16. The loss scale starts at %g.",
                self._scaler.get_scale(),
            )
            return
        state = _scaler_state(state_dict)
        self._scaler.load_state_dict(state)
        self._known_scale = state["scale"]

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless the state is empty or a valid loss scale. Change nothing."""
        if check_mapping(state_dict, _SCALE):
            _scaler_state(state_dict)


def _scaler_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a GradScaler state as plain numbers, each checked against its valid range."""
    # GradScaler loads any value unchecked. A scale of 0 or NaN would spoil every later gradient.
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
    # If the device is missing, torch warns and disables the scaler. Its scale of 1 would then look like a drop.
    return scaler if scaler.is_enabled() else None
