"""NaN and infinite gradients: detection without a device synchronisation, and the resulting stop, skip or error.

A flag per step (`LateFlag`) is copied to the host while training continues. A flag that reports a non-finite norm only
triggers `Reporter.settle`. The decision uses the reduced norms, which are equal on all ranks, so all ranks stop at the
same step. `StepRunner` records norms, `Reporter` judges them, and `Saver` checks weights before a save.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.optim.gradient_trace import GradientTrace

ACTIONS = ("stop", "skip", "ignore")
_MOST_SKIPPED = 10
"""Consecutive skipped steps after which nonfinite_grad="skip" stops the run."""
_MOST_LEFT_OUT = 50
"""Consecutive steps that GradScaler may skip: 50 halvings bring a loss scale of 2**16 down to 2**-34."""
_MOST_NAMED = 5


class NonFiniteError(RuntimeError):
    """Error for NaN or infinite gradients or weights, unless `nonfinite_grad` allows the run to continue."""

    def __init__(
        self, message: str, step: int, rank: int = 0, parameters: Sequence[str] = (), checkpoint: str | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.parameters = list(parameters)
        """The first affected parameters on that rank."""
        self.checkpoint = checkpoint
        """The newest checkpoint with finite weights."""


class LateValues:
    """Tensor on a device, copied to host memory without blocking (pinned for CUDA)."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = values.detach()
        # The event marks the end of the copy on the current stream. Querying it does not block.
        if values.device.type != "cpu":
            self._host = torch.empty_like(self._host, device="cpu", pin_memory=values.device.type == "cuda")
            self._host.copy_(values.detach(), non_blocking=True)
            self._event = torch.Event(values.device)
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Return the values in host memory; waits for the device if they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._host


class LateFlag(LateValues):
    """Boolean on a device, copied to host memory without blocking."""

    @property
    def value(self) -> bool:
        """The value; valid only if `has_arrived`."""
        return bool(self._host)

    def wait(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return self.value


@dataclass(frozen=True)
class GradientFinding:
    """Diagnostics of one rank about a step with non-finite gradients."""

    rank: int
    loss: float | None = None
    """The part of the step's loss that this rank computed."""
    parameters: list[str] = field(default_factory=list)
    checkpoint: str | None = None


@dataclass(frozen=True)
class _Noted:
    step: int
    is_finite: LateFlag
    loss: Tensor
    trace: GradientTrace | None


class GradientWatch:
    """Watchdog over gradient norms that decides when the run must stop."""

    def __init__(self, action: str, has_loss_scale: bool) -> None:
        limits = {"stop": 1, "skip": _MOST_SKIPPED, "ignore": 0}
        # GradScaler skips steps while it searches for a loss scale, so a single skipped step is normal.
        self.limit = _MOST_LEFT_OUT if has_loss_scale and action != "ignore" else limits[action]
        self.in_a_row = 0
        """Consecutive steps with non-finite gradients, up to the last settled step; part of the checkpoint."""
        self._seen_in_a_row = 0
        self._under_way: deque[_Noted] = deque()
        self._found: list[_Noted] = []

    @property
    def is_on(self) -> bool:
        return self.limit > 0

    def resume(self, in_a_row: int) -> None:
        self.in_a_row = self._seen_in_a_row = in_a_row

    def note(self, step: int, norm: Tensor | None, loss: Tensor, trace: GradientTrace | None) -> None:
        if self.is_on and norm is not None:
            # The comparison is False for NaN and for infinity.
            self._under_way.append(_Noted(step, LateFlag(norm.detach() < math.inf), loss, trace))

    @property
    def has_news(self) -> bool:
        """Whether the flags that have arrived are a reason to stop. May differ between ranks."""
        while self._under_way and self._under_way[0].is_finite.has_arrived:
            noted = self._under_way.popleft()
            if noted.is_finite.value:
                self._seen_in_a_row = 0
                self._found.clear()
            else:
                self._seen_in_a_row += 1
                # Keep the first findings only. Later steps fail as a consequence, and may run before all ranks stop.
                self._found += [noted] if len(self._found) < self.limit else []
        return self.is_on and self._seen_in_a_row >= self.limit

    def judge(self, norms: Sequence[float], last_step: int) -> int | None:
        """Count the reduced norms of the steps up to `last_step`, and return the step where the run must stop, or None."""
        for step, norm in enumerate(norms, start=last_step - len(norms) + 1):
            self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
            if self.is_on and self.in_a_row >= self.limit:
                return step
        return None

    def finding(self, step: int, names: dict[Tensor, str], own: GradientFinding) -> GradientFinding:
        """Return the diagnostics of this rank about a step; waits for the device."""
        noted = next((one for one in (*self._found, *self._under_way) if one.step == step), None)
        if noted is None or noted.trace is None:
            # Without a trace, name the parameters with non-finite weights, which is less precise.
            parameters = nonfinite_weights(list(names))
        else:
            parameters = noted.trace.nonfinite()
        loss = None if noted is None else float(noted.loss)
        return replace(own, loss=loss, parameters=[names[one] for one in parameters if one in names])


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Step the optimizer if the gradient norm is finite."""
    # Fused torch optimizers read `found_inf` on the device, as GradScaler uses it, so the host does not wait.
    # For other optimizers the host has to read the norm.
    parts = list(elementary_optimizers(optimizer))
    if not all(getattr(one, "_step_supports_amp_scaling", False) for one in parts):
        if math.isfinite(float(norm)):
            optimizer.step()
        return
    flag = (~torch.isfinite(norm)).float()
    for one in parts:
        one.found_inf = flag
    try:
        optimizer.step()
    finally:
        # A leftover flag would suppress later steps.
        for one in parts:
            del one.found_inf


def elementary_optimizers(optimizer: object) -> Iterator[Any]:
    """Yield the optimizers inside a composite optimizer or a wrapper such as Accelerate's."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is not None:
        values = parts.values() if isinstance(parts, Mapping) else parts
        for part in values:
            yield from elementary_optimizers(part)
    elif isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        yield from elementary_optimizers(inner)
    else:
        yield optimizer


def gradient_error(step: int, limit: int, is_scaled: bool, findings: Sequence[GradientFinding]) -> NonFiniteError:
    """Return the error for non-finite gradients from the findings of all ranks."""
    # Averaged gradients are non-finite on every rank. A rank with a non-finite loss is the likely origin.
    first = next((one for one in findings if one.loss is not None and not math.isfinite(one.loss)), None)
    first = first or next((one for one in findings if one.parameters), findings[0])
    if limit == 1:
        what = f"The gradients of step {step} are not finite"
        so = "The weights are invalid since that step and were not saved."
        remedy = "Lower learning_rate, set max_grad_norm, or check the data of that step; nonfinite_grad='skip' "
        remedy += "skips such updates, 'ignore' continues training"
    else:
        what = f"The gradients of the last {limit} steps, up to step {step}, were not finite"
        by = "GradScaler skipped their updates" if is_scaled else "nonfinite_grad='skip' skipped their updates"
        so = f"{by}, so the run no longer learns."
        remedy = "Lower learning_rate, or check the data; nonfinite_grad='ignore' continues training"
        remedy += ", mixed_precision='bf16' needs no loss scale" if is_scaled else ""
    loss = "" if first.loss is None else f" (its loss: {first.loss:g})"
    where = f", first on rank {first.rank}{loss}" if len(findings) > 1 else loss
    parameters = f": {_listed(first.parameters)}" if first.parameters else ""
    checkpoint = _checkpoint_of(findings)
    message = f"{what}{where}{parameters}. {so} {_resume_from(checkpoint)} {remedy}."
    return NonFiniteError(message, step, first.rank, first.parameters[:_MOST_NAMED], checkpoint)


def weights_error(step: int, action: str, findings: Sequence[GradientFinding]) -> NonFiniteError:
    """Return the error for a save of non-finite weights."""
    first = next((one for one in findings if one.parameters), findings[0])
    where = f" on rank {first.rank}" if len(findings) > 1 else ""
    checkpoint = _checkpoint_of(findings)
    message = (
        f"The weights are not finite after step {step}{where}: {_listed(first.parameters)}. They were not saved. "
        f"{_resume_from(checkpoint)} nonfinite_grad='ignore' (now {action!r}) saves them in a checkpoint that never "
        "replaces a sound one."
    )
    return NonFiniteError(message, step, first.rank, first.parameters[:_MOST_NAMED], checkpoint)


def nonfinite_weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters with NaN or infinite values; waits for the device."""
    floating = [local_part(one.detach()) for one in parameters if one.is_floating_point() or one.is_complex()]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, one in enumerate(floating):
        groups.setdefault((one.device, one.dtype), []).append(number)
    found = []
    for numbers in groups.values():
        # A sum takes a sixteenth of the time of the infinity norm on the CPU. One synchronisation per device and dtype.
        sums = torch.stack([floating[number].sum() for number in numbers])
        if not bool(torch.isfinite(sums).all()):
            found += [number for number in numbers if not _is_finite(floating[number])]
    wanted = [one for one in parameters if one.is_floating_point() or one.is_complex()]
    return [wanted[number] for number in sorted(found)]


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. The sum of finite values may overflow, the infinity norm cannot."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)))


def _checkpoint_of(findings: Sequence[GradientFinding]) -> str | None:
    return next((one.checkpoint for one in findings if one.checkpoint is not None), None)


def _resume_from(checkpoint: str | None) -> str:
    if checkpoint is None:
        return "There is no sound checkpoint to resume from."
    return f"The newest sound checkpoint to resume from is {checkpoint}."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
