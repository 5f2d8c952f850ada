"""The numbers of a run: collected without waiting for the device, read when they are logged."""

import math
import time
from array import array
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.evaluation import as_integers

Number = int | Tensor

_STEPS_UNTIL_FOLD = 1000
"""So many steps are kept one by one; more would be tensors without end in a run that logs rarely or never."""


class IntervalMetrics:
    """Loss, norm and token counts since the last log; part of the checkpoint, so that a resumed run logs the same."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._targets: list[Number] = []
        self._norms: list[Tensor] = []
        self._tokens: list[Number] = []
        self._samples = 0
        self._folded_steps = 0
        self._folded: dict[str, Any] = {"loss_sum": 0.0, "targets": 0.0, "tokens": 0}
        self._folded_norms = array("d")

    def add(self, loss: Tensor, targets: Number, grad_norm: Tensor | None, tokens: Number, samples: int) -> None:
        """Note a step; nothing is computed here but once in many steps, since that would be work in every step."""
        self._losses.append(loss)
        self._targets.append(targets)
        self._tokens.append(tokens)
        self._samples += samples
        if grad_norm is not None:
            self._norms.append(grad_norm)
        if len(self._losses) >= _STEPS_UNTIL_FOLD:
            self._fold()

    @property
    def num_steps(self) -> int:
        return self._folded_steps + len(self._losses)

    def totals(self) -> dict[str, Any]:
        """Sums over the interval, of this rank: loss x targets, targets, tokens; and the norms."""
        sums = {
            name: folded + number for (name, folded), number in zip(self._folded.items(), self._sums(), strict=True)
        }
        norms = [*self._folded_norms, *_as_floats(self._norms)]
        return {**sums, "samples": self._samples, "norms": norms}

    def _sums(self) -> tuple[float, float, int]:
        """Loss x targets, targets and tokens of the steps that are kept one by one."""
        targets = as_integers(self._targets)
        weighted = zip(_as_floats(self._losses), targets, strict=True)
        return sum(loss * number for loss, number in weighted), float(sum(targets)), sum(as_integers(self._tokens))

    def _fold(self) -> None:
        """Replace the steps by their sums; the number of steps alone decides when, so that a resumed run does the same."""
        for name, number in zip(self._folded, self._sums(), strict=True):
            self._folded[name] += number
        self._folded_norms.extend(_as_floats(self._norms))
        self._folded_steps += len(self._losses)
        self._losses, self._targets, self._norms, self._tokens = [], [], [], []

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": [loss.detach().cpu() for loss in self._losses],
            "targets": as_integers(self._targets),
            "norms": [norm.detach().cpu() for norm in self._norms],
            "tokens": as_integers(self._tokens),
            "samples": self._samples,
            "folded": dict(self._folded),
            "folded_steps": self._folded_steps,
            "folded_norms": torch.tensor(self._folded_norms.tolist(), dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._targets = list(state["losses"]), list(state["targets"])
        self._norms, self._tokens = list(state["norms"]), list(state["tokens"])
        self._samples = state["samples"]
        self._folded, self._folded_steps = dict(state["folded"]), state["folded_steps"]
        self._folded_norms = array("d", state["folded_norms"].tolist())


class RunTotals:
    """Sums over the whole run, exact at every checkpoint."""

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class SpeedMeter:
    """The time of this process's timed steps; steps that compile and warm up, evaluations and saves do not count."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.perf_counter()
        self._steps_seen = 0
        self._paused = 0.0
        self._timed_since: float | None = None
        self.num_steps = 0
        self.tokens = 0
        self.samples = 0

    def step(self, tokens: Number, samples: int) -> None:
        """Note a finished step; the clock starts once the warm-up steps are done."""
        self._steps_seen += 1
        if self._timed_since is None:
            if self._steps_seen >= self._first_step:
                self._timed_since, self._paused = time.perf_counter(), 0.0
            return
        self.num_steps += 1
        self.tokens += tokens if isinstance(tokens, int) else 0
        self.samples += samples

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    @property
    def seconds(self) -> float:
        return 0.0 if self._timed_since is None else time.perf_counter() - self._timed_since - self._paused

    @property
    def runtime(self) -> float:
        return time.perf_counter() - self._started

    def rate(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0


def _as_floats(numbers: list[Tensor]) -> list[float]:
    """Scalars as numbers of double precision, for which the device is waited for once."""
    # Those of before a resume are on the CPU still.
    device = numbers[-1].device if numbers else None
    if device is None or device.type == "cpu":
        return [float(number) for number in numbers]
    return torch.stack([number.detach().to(device) for number in numbers]).cpu().double().tolist()


def root_mean_square(values: list[float]) -> float | None:
    """None without values; infinities and NaN stay visible."""
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else None
