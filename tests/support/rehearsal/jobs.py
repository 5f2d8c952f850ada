"""Training jobs on the rehearsal device: train, save and resume, with the host waits of each step."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather.ml.trainer.trainer import Trainer
from tests.support.rehearsal.record import Record, watching
from tests.support.rehearsal.tracing import tracing
from tests.support.tiny_models import saved_steps

LOG_STEPS = 3
SAVE_STEP = 6
NUM_STEPS = 12

Waits = Counter[tuple[str, str]]
"""Number of host waits by name and source line."""


class StepWatch:
    """Callback that notes the position in a record at the end of each step, and the steps with other work."""

    changes_control = False

    def __init__(self, record: Record) -> None:
        self._record = record
        self._ends: dict[int, int] = {}
        self._busy: set[int] = set()

    @property
    def first_step(self) -> int:
        return min(self._ends)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ends[state.global_step] = len(self._record.events)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._busy.add(state.global_step)

    def waits(self) -> dict[int, Waits]:
        """Count host waits by step, from the end of the step before, without steps that follow a log.

        The first two steps of a process are left out: they choose the loss, and DDP arranges its buckets.
        """
        waits = {}
        for step, end in self._ends.items():
            if step < self.first_step + 2 or step - 1 in self._busy:
                continue
            events = self._record.events[self._ends[step - 1] : end]
            waits[step] = Counter((event.name, event.where) for event in events if event.kind == "sync")
        return waits


@dataclass
class Report:
    """Outcome of a job on one rank."""

    waits: dict[int, Waits] = field(default_factory=dict)
    """Host waits of each step without a log."""
    hazards: list[tuple[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    """The first step of each of the two runs."""
    devices: set[str] = field(default_factory=set)
    result: Any = None
    trace: list[dict[str, Any]] = field(default_factory=list)


def train_save_and_resume(
    build: Callable[..., Trainer[Any]], output_dir: Path, finish: Callable[[Any], Any] = lambda trainer: None
) -> Report:
    """Train to `SAVE_STEP` and save, then resume to `NUM_STEPS` in a second trainer. Call `finish` with both."""
    report = Report()
    with tracing() as report.trace:
        for num_steps in (SAVE_STEP, NUM_STEPS):
            with watching() as record:
                watch = StepWatch(record)
                trainer = build(
                    output_dir,
                    watch,
                    use_cpu=False,
                    max_steps=num_steps,
                    logging_strategy="steps",
                    logging_steps=LOG_STEPS,
                    save_strategy="steps",
                    save_steps=SAVE_STEP,
                    resume_from_checkpoint=num_steps > SAVE_STEP,
                )
                trainer.train()
                report.result = finish(trainer)
            report.waits.update(watch.waits())
            report.hazards += [(event.name, event.where) for event in record.events if event.kind == "hazard"]
            report.first_steps.append(watch.first_step)
        report.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        report.devices = {str(tensor.device) for tensor in trainer.unwrapped_model().parameters()}
    report.saved = saved_steps(output_dir)
    return report
