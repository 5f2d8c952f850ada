"""Training metrics: loss, gradient norm, token counts and throughput.

Steps are recorded without a device synchronisation, and read when they are logged or saved. Sums are bit-identical
however often they are read, so a resumed run logs the same values. `Reporter` owns these objects.
"""

import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.state_schema import Schema, amount, count, number, real_vector
from forgather.ml.trainer.loop.evaluation_sums import as_integers

Number = int | Tensor

_STEPS_UNTIL_SETTLED = 1000
"""Limit of steps kept as tensors. Without a limit, a run that rarely logs would accumulate them indefinitely."""


Reduce = Callable[[Tensor], Tensor]
"""Function that sums losses (first row), tokens and samples of steps over all data-parallel ranks."""


_TOTALS = Schema({"loss_sum": number, "targets": amount, "tokens": count, "samples": count})
_SUMS = Schema({**_TOTALS.fields, "num_steps": count, "norms": real_vector})


class IntervalMetrics:
    """Loss, gradient norm and token counts since the last log; part of the checkpoint.

    `add` records the values of this rank. `settle` reduces them over all ranks before a log or a save. Each step is
    reduced separately and summed afterwards, so the sums do not depend on how often `settle` ran. With
    `leaves_out_steps`, steps with non-finite gradients were skipped, and their losses are not part of the mean.
    """

    def __init__(self, leaves_out_steps: bool = False) -> None:
        self._leaves_out_steps = leaves_out_steps
        self._losses: list[Tensor] = []
        self._targets: list[Number] = []
        self._norms: list[Tensor] = []
        self._tokens: list[Number] = []
        self._samples: list[int] = []
        self._settled = SettledSums()

    def add(self, loss: Tensor, targets: Number, grad_norm: Tensor | None, tokens: Number, samples: int) -> None:
        """Record a step: the loss, tokens and samples of this rank, and the targets of all ranks."""
        self._losses.append(loss)
        self._targets.append(targets)
        self._tokens.append(tokens)
        self._samples.append(samples)
        if grad_norm is not None:
            self._norms.append(grad_norm)

    @property
    def logs(self) -> tuple[list[Tensor], list[Tensor], list[Number]]:
        """Losses, norms and tokens of this rank's steps since the last `settle`."""
        return self._losses, self._norms, self._tokens

    @property
    def num_steps(self) -> int:
        return self._settled.num_steps + len(self._losses)

    @property
    def num_settled_norms(self) -> int:
        return len(self._settled.norms)

    @property
    def wants_settling(self) -> bool:
        """Whether enough steps are pending that `settle` should free their tensors."""
        return len(self._losses) >= _STEPS_UNTIL_SETTLED

    def settle(self, reduce: Reduce, reduce_norms: Callable[[list[float]], list[float]] = list) -> "SettledSums":
        """Return the sums of all steps so far over all ranks; collective, and waits for the device."""
        if self._losses:
            targets = as_integers(self._targets)
            # A rank's loss is its share of the step's mean. Times the targets of the step, it can be summed over steps.
            products = [loss * count for loss, count in zip(_as_floats(self._losses), targets, strict=True)]
            own = torch.tensor([products, as_integers(self._tokens), self._samples], dtype=torch.float64, device="cpu")
            losses, tokens, samples = reduce(own).tolist()
            norms = reduce_norms(_as_floats(self._norms))
            # An override of `_train_step` may return no norm for some steps; then norms cannot be matched to losses.
            if self._leaves_out_steps and len(norms) == len(losses):
                are_finite = [math.isfinite(norm) for norm in norms]
                losses, targets = _chosen(losses, are_finite), _chosen(targets, are_finite)
            self._settled.add(losses, targets, norms, tokens, samples)
            self._losses, self._targets, self._norms, self._tokens, self._samples = [], [], [], [], []
        return self._settled

    def reset(self) -> None:
        self.__init__(self._leaves_out_steps)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        if self._losses:
            raise RuntimeError("Call settle() before state_dict(): the last steps are not reduced over ranks yet.")
        return self._settled.state_dict()

    def check_state_dict(self, state: object) -> None:
        """Raise `CheckpointLoadError` for a state that `state_dict` cannot have returned."""
        self._settled.check_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        self.reset()
        self._settled.load_state_dict(state)


class SettledSums:
    """Sums over the steps of a logging interval and over all ranks."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.targets = 0.0
        self.tokens = 0
        self.samples = 0
        self.num_steps = 0
        self.norms = array("d")

    def add(
        self, losses: list[float], targets: list[int], norms: list[float], tokens: list[float], samples: list[float]
    ) -> None:
        # Add one by one: float addition is not associative, and the result must not depend on the grouping of steps.
        for loss in losses:
            self.loss_sum += loss
        self.targets += sum(targets)
        self.tokens += int(sum(tokens))
        self.samples += int(sum(samples))
        self.num_steps += len(tokens)
        self.norms.extend(norms)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "norms": torch.tensor(self.norms.tolist(), dtype=torch.float64)}

    def check_state_dict(self, state: object) -> None:
        _SUMS.check(state, "trainer.interval")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        vars(self).update({**_SUMS.known(state), "norms": array("d", state["norms"].tolist())})


class RunTotals:
    """Sums over the full run, exact at every checkpoint."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.targets = 0.0
        self.tokens = 0
        self.samples = 0

    def add(self, loss_sum: float, targets: float, tokens: int, samples: int) -> None:
        self.loss_sum += loss_sum
        self.targets += targets
        self.tokens += tokens
        self.samples += samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.targets if self.targets else 0.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def check_state_dict(self, state: object) -> None:
        _TOTALS.check(state, "trainer.totals")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        vars(self).update(_TOTALS.known(state))


class SpeedMeter:
    """Clock for the throughput of this process, without warm-up steps, evaluations and saves."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.perf_counter()
        self._steps_seen = 0
        self._paused = 0.0
        self.total_paused = 0.0
        """Seconds in evaluations and saves, including the warm-up."""
        self._timed_since: float | None = None
        self.num_steps = 0
        self.tokens = 0
        self.samples = 0

    def step(self, tokens: Number, samples: int) -> None:
        """Record a finished step; the clock starts after the warm-up steps."""
        self._steps_seen += 1
        if self._timed_since is None:
            if self._steps_seen >= self._first_step:
                # Pauses in the warm-up are dropped too: they precede the clock.
                self._timed_since, self._paused = time.perf_counter(), 0.0
            return
        self.num_steps += 1
        # Reading a count on the device would synchronise at every step.
        self.tokens += tokens if isinstance(tokens, int) else 0
        self.samples += samples

    def pause(self, seconds: float) -> None:
        self._paused += seconds
        self.total_paused += seconds

    @property
    def seconds(self) -> float:
        return 0.0 if self._timed_since is None else time.perf_counter() - self._timed_since - self._paused

    @property
    def runtime(self) -> float:
        return time.perf_counter() - self._started

    def rate(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0


def _as_floats(numbers: list[Tensor]) -> list[float]:
    """Convert scalar tensors to floats with a single device synchronisation."""
    # Scalars recorded before a resume may still be on the CPU.
    device = numbers[-1].device if numbers else None
    if device is None or device.type == "cpu":
        return [float(number) for number in numbers]
    return torch.stack([number.detach().to(device) for number in numbers]).cpu().double().tolist()


def _chosen(values: list[Any], are_chosen: list[bool]) -> list[Any]:
    return [value for value, is_chosen in zip(values, are_chosen, strict=True) if is_chosen]


def root_mean_square(values: Sequence[float]) -> float | None:
    """Return the root mean square, or None without values; infinities and NaN propagate."""
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else None
