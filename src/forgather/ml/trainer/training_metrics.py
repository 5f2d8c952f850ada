"""The numbers of a run: collected without waiting for the device, read when they are logged."""

import math
import time
from typing import Any

import torch
from torch import Tensor

Number = int | Tensor


class IntervalMetrics:
    """Loss, norm and token counts since the last log; part of the checkpoint, so that a resumed run logs the same."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._targets: list[Number] = []
        self._norms: list[Tensor] = []
        self._tokens: list[Number] = []
        self._samples = 0

    def add(self, loss: Tensor, targets: Number, grad_norm: Tensor | None, tokens: Number, samples: int) -> None:
        """Note a step; nothing is computed here, since that would be work in every step."""
        self._losses.append(loss)
        self._targets.append(targets)
        self._tokens.append(tokens)
        self._samples += samples
        if grad_norm is not None:
            self._norms.append(grad_norm)

    @property
    def num_steps(self) -> int:
        return len(self._losses)

    def totals(self) -> dict[str, Any]:
        """Sums over the interval as tensors of this rank: loss x targets, targets, tokens; and the norms."""
        # Those of before a resume are on the CPU still.
        device = self._losses[-1].device if self._losses else torch.device("cpu")
        losses = torch.stack([loss.to(device) for loss in self._losses]) if self._losses else torch.zeros(0)
        targets = torch.tensor([float(number) for number in self._targets], dtype=torch.float64)
        return {
            "loss_sum": (losses.cpu().double() * targets).sum().item(),
            "targets": targets.sum().item(),
            "tokens": sum(int(number) for number in self._tokens),
            "samples": self._samples,
            "norms": [float(norm) for norm in self._norms],
        }

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": [loss.detach().cpu() for loss in self._losses],
            "targets": [int(number) for number in self._targets],
            "norms": [norm.detach().cpu() for norm in self._norms],
            "tokens": [int(number) for number in self._tokens],
            "samples": self._samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._targets = list(state["losses"]), list(state["targets"])
        self._norms, self._tokens = list(state["norms"]), list(state["tokens"])
        self._samples = state["samples"]


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


def root_mean_square(values: list[float]) -> float | None:
    """None without values; infinities and NaN stay visible."""
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else None
