"""Retention policies for checkpoints, combined with `|`, and the ranking of the best checkpoints.

The newest checkpoint is never deleted, and a checkpoint with NaN weights never displaces a sound one. Nothing here
touches the disk except `drop_missing`; `rotation.py` deletes, and trainers use the metric helpers.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

logger = logging.getLogger(__name__)

_EVAL_PREFIX = "eval_"


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of one complete checkpoint for policies."""

    path: str
    step: int | None
    timestamp: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_sound: bool = True
    """Whether the weights are finite."""


class RetentionPolicy(Protocol):
    """Interface of policies: any object with a method `keep`."""

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """Return the paths to keep. `checkpoints` is sorted from oldest to newest."""
        ...


class _Composable:
    """Mixin for the `|` operator: a checkpoint is kept if either policy keeps it."""

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        raise NotImplementedError

    def __or__(self, other: RetentionPolicy) -> "AnyOf":
        return AnyOf((self, other))

    def __ror__(self, other: RetentionPolicy) -> "AnyOf":
        return AnyOf((other, self))


@dataclass(frozen=True)
class LatestN(_Composable):
    """Policy that keeps the newest `n` checkpoints. None, zero or less keeps all."""

    n: int | None

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        newest = checkpoints if self.n is None or self.n <= 0 else checkpoints[-self.n :]
        return {info.path for info in newest}


@dataclass(frozen=True)
class BestN(_Composable):
    """Policy that keeps the `n` best checkpoints by a metric stored in them.

    Checkpoints without metrics are ignored. `greater_is_better=None` derives the direction from the metric's name.
    """

    n: int
    metric: str
    greater_is_better: bool | None = None

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        measured = [info for info in checkpoints if info.metrics]
        candidates = [info for info in measured if _find_key(info.metrics, self.metric) is not None]
        if measured and not candidates:
            # A misspelled metric must not lead to the deletion of all checkpoints.
            raise _unknown_metric(self.metric, {key for info in measured for key in info.metrics})
        values = [(info.path, metric_value(info.metrics, self.metric)) for info in candidates]
        return {path for path, _ in _ranked(values, self.metric, self.greater_is_better)[: max(self.n, 0)]}


@dataclass(frozen=True)
class EveryNSteps(_Composable):
    """Policy that keeps the checkpoints with a step that is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"EveryNSteps(n={self.n}) keeps no step at all: n must be 1 or more")

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return {info.path for info in checkpoints if info.step is not None and info.step % self.n == 0}


@dataclass(frozen=True)
class AnyOf(_Composable):
    """Policy that keeps the checkpoints that at least one of its policies keeps."""

    policies: Iterable[RetentionPolicy]

    def __post_init__(self) -> None:
        # The policy is asked repeatedly, and an iterator could be consumed only once.
        object.__setattr__(self, "policies", tuple(self.policies))

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        return {path for policy in self.policies for path in policy.keep(checkpoints)}


def checkpoints_to_delete(checkpoints: Sequence[CheckpointInfo], policy: RetentionPolicy) -> list[CheckpointInfo]:
    """Return the checkpoints to delete, oldest first.

    `checkpoints` are the complete checkpoints, oldest to newest. The newest is never returned, because a resume needs
    it.
    """
    if not checkpoints:
        return []
    sound = [info for info in checkpoints if info.is_sound]
    kept = policy.keep(checkpoints) | {checkpoints[-1].path}
    # Ask again with the sound checkpoints only. Otherwise LatestN(1) would delete the last sound checkpoint as soon as
    # a checkpoint with NaN weights follows.
    if 0 < len(sound) < len(checkpoints):
        kept |= policy.keep(sound)
    return [info for info in checkpoints if info.path not in kept]


def default_greater_is_better(metric_key: str) -> bool:
    """Return the direction that a metric's name implies: losses and perplexities should fall, all others rise."""
    return not metric_key.endswith(("loss", "perplexity"))


def metric_value(metrics: Mapping[str, float], metric_key: str) -> float:
    """Look up a metric by its key, with or without the "eval_" prefix; the exact key wins."""
    key = _find_key(metrics, metric_key)
    if key is None:
        raise _unknown_metric(metric_key, metrics)
    return float(metrics[key])


class HasBestMetric(Protocol):
    """State with the best value of a metric, such as the trainer state."""

    best_metric: float | None


def note_best_metric(
    state: HasBestMetric, metrics: Mapping[str, float], metric_key: str, greater_is_better: bool | None
) -> bool:
    """Record the best metric in the state. Return whether this evaluation is the best so far."""
    value = metric_value(metrics, metric_key)
    is_best = is_better(value, state.best_metric, metric_key, greater_is_better)
    if is_best:
        state.best_metric = value
    return is_best


def is_better(value: float, best: float | None, metric_key: str, greater_is_better: bool | None) -> bool:
    """Return whether a metric value is better than the previous best. NaN never is."""
    if greater_is_better is None:
        greater_is_better = default_greater_is_better(metric_key)
    # NaN is not equal to itself.
    return value == value and (best is None or (value > best if greater_is_better else value < best))


class BestCheckpoints(_Composable):
    """Ranking of the best checkpoints so far. Used as a policy, it keeps the listed checkpoints.

    `entries` is sorted best first. Pass it to the constructor with its `metric_key` to continue an earlier ranking.
    """

    def __init__(self, entries: Iterable[tuple[str, float]] = (), metric_key: str | None = None) -> None:
        self.entries: list[tuple[str, float]] = [(path, float(value)) for path, value in entries]
        self.metric_key = metric_key

    def update(
        self,
        path: str,
        metrics: Mapping[str, float],
        metric_key: str,
        greater_is_better: bool | None,
        preserve_n_best: int,
    ) -> bool:
        """Rank a checkpoint and return whether it is among the best `preserve_n_best`.

        A listed path gets the new value; NaN removes it. On ties the earlier checkpoint ranks first.
        `greater_is_better=None` derives the direction from the metric's name.
        """
        value = metric_value(metrics, metric_key)
        self._start_over_for_another_metric(metric_key)
        candidates = _replaced(self.entries, path, value)
        self.entries = _ranked(candidates, metric_key, greater_is_better)[: max(preserve_n_best, 0)]
        return any(_same_path(path, listed) for listed, _ in self.entries)

    def drop_missing(self, exists: Callable[[str], bool] = os.path.isdir) -> list[str]:
        """Remove checkpoints that no longer exist from the ranking, and return their paths."""
        missing = [path for path, _ in self.entries if not exists(path)]
        gone = set(missing)
        self.entries = [entry for entry in self.entries if entry[0] not in gone]
        return missing

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        # Users may rank relative paths, while `checkpoints` has the paths of the folder.
        listed = {os.path.abspath(path) for path, _ in self.entries}
        return {info.path for info in checkpoints if os.path.abspath(info.path) in listed}

    def summary(self, metric_key: str = "loss") -> str:
        """Return the ranking as text, best first."""
        if not self.entries:
            return f"No best checkpoints by {metric_key} yet."
        ranks = enumerate(self.entries, start=1)
        lines = [f"  {rank}. {os.path.basename(path.rstrip('/'))}: {value:.6g}" for rank, (path, value) in ranks]
        return "\n".join([f"Best checkpoints by {metric_key}:", *lines])

    def _start_over_for_another_metric(self, metric_key: str) -> None:
        before, self.metric_key = self.metric_key, metric_key
        # "eval_loss" and "loss" name the same metric; `metric_value` accepts both.
        if before is None or before.removeprefix(_EVAL_PREFIX) == metric_key.removeprefix(_EVAL_PREFIX):
            return
        # Values of different metrics do not compare: an accuracy among losses might never be displaced.
        logger.warning(
            "The best checkpoints are now chosen by %r instead of %r. Their values are not comparable, so %d entries are "
            "dropped and the ranking starts over.",
            metric_key,
            before,
            len(self.entries),
        )
        self.entries = []


def _find_key(metrics: Mapping[str, float], metric_key: str) -> str | None:
    # Settings may name "loss" while evaluations report "eval_loss", or the reverse.
    names = (metric_key, _EVAL_PREFIX + metric_key, metric_key.removeprefix(_EVAL_PREFIX))
    return next((name for name in names if name in metrics), None)


def _unknown_metric(metric_key: str, available: Iterable[str]) -> ValueError:
    there_are = ", ".join(sorted(available)) or "none"
    return ValueError(
        f"No metric {metric_key!r} (or {_EVAL_PREFIX + metric_key!r}) to choose the best checkpoint by. "
        f"Available metrics: {there_are}. Choose one of them, or make the evaluation return {metric_key!r}."
    )


def _ranked(
    entries: Iterable[tuple[str, float]], metric_key: str, greater_is_better: bool | None
) -> list[tuple[str, float]]:
    """Return the entries sorted best first, without NaN values. The sort is stable: on ties the earlier entry wins."""
    if greater_is_better is None:
        greater_is_better = default_greater_is_better(metric_key)
    sign = -1.0 if greater_is_better else 1.0
    numbers = [entry for entry in entries if not math.isnan(entry[1])]
    return sorted(numbers, key=lambda entry: sign * entry[1])


def _replaced(entries: Sequence[tuple[str, float]], path: str, value: float) -> list[tuple[str, float]]:
    # Replace in place, so that a checkpoint which is evaluated again keeps its position among ties.
    if any(_same_path(path, listed) for listed, _ in entries):
        return [(listed, value if _same_path(path, listed) else old) for listed, old in entries]
    return [*entries, (path, value)]


def _same_path(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
