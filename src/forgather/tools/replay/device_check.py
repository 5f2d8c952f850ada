"""Comparison of the same replayed step on several devices: a device that differs alone computes wrong numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forgather.tools.replay.report import ReplayReport, StepReport


@dataclass(frozen=True)
class DeviceCheck:
    """Result of a replay on every rank: which ranks computed other gradients than the majority."""

    step: int
    hosts: list[str]
    """Host name of each rank."""
    losses: list[float | None]
    grad_norms: list[float | None]
    different: list[int] = field(default_factory=list)
    """Ranks with a wrong result: the minority, or those that contradict the log; all ranks if neither decides."""
    parameters: list[str] = field(default_factory=list)
    """Parameters with different gradients, in the order of the model."""

    @property
    def agrees(self) -> bool:
        return not self.different

    @property
    def is_decided(self) -> bool:
        """Whether some ranks are known to be right, by a majority or by the log of the run."""
        return len(self.different) < len(self.hosts)

    @property
    def verdict(self) -> str:
        """Explanation of the result in one sentence."""
        if self.agrees:
            return (
                f"All {len(self.hosts)} ranks computed the same gradients: the devices agree. If replicas parted in the run, "
                "the program is at fault, or an error that does not repeat."
            )
        first = f", first in {self.parameters[0]}" if self.parameters else ""
        if not self.is_decided:
            return (
                f"The ranks computed different gradients{first}. Neither a majority nor the log of the run tells which are "
                "wrong. Repeat with more ranks; operations of the model may be not deterministic."
            )
        names = " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in self.different)
        return (
            f"Only {names} computed other gradients{first}: a bad device, since the program and the data were the same on all "
            "ranks."
        )


def compare_ranks(reports: Sequence[ReplayReport], hosts: Sequence[str]) -> DeviceCheck:
    """Compare the last steps of the replays of all ranks, which need gradient digests."""
    steps = [report.steps[-1] for report in reports]
    # NaN is unequal to itself, so results are compared as text.
    texts = [repr((step.loss, step.grad_norm, tuple(step.gradient_digests.items()))) for step in steps]
    different = _different(steps, texts)
    usual = steps[next((rank for rank in range(len(steps)) if rank not in different), 0)].gradient_digests
    parameters = [name for name in usual if any(step.gradient_digests.get(name) != usual[name] for step in steps)]
    return DeviceCheck(
        step=steps[0].step,
        hosts=list(hosts),
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        different=different,
        parameters=parameters,
    )


def _different(steps: Sequence[StepReport], texts: Sequence[str]) -> list[int]:
    """Return the ranks with a wrong result: the minority, or without a majority those that contradict the run's log."""
    text, number = Counter(texts).most_common(1)[0]
    if number == len(texts):
        return []
    if number * 2 > len(texts):
        return [rank for rank, one in enumerate(texts) if one != text]
    wrong = [rank for rank, step in enumerate(steps) if step.logged is not None and not step.logged.is_close]
    return wrong if 0 < len(wrong) < len(steps) else list(range(len(steps)))
