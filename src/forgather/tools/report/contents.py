"""Contents of a report as dataclasses: what `read_run` returns, what the page draws and what `--json` prints."""

from dataclasses import dataclass, field
from typing import NamedTuple

RUNNING, FINISHED, PREEMPTED, STOPPED, FAILED, KILLED = (
    "running",
    "finished",
    "preempted",
    "stopped",
    "failed",
    "killed",
)


class Point(NamedTuple):
    """Value at a step. `counts` is False for steps that were lost and done again after a resume."""

    step: int
    time: float | None
    value: float
    counts: bool


@dataclass(frozen=True)
class Attempt:
    """One start of the job, until its end, kill or failure."""

    number: int
    identity: str | None
    first_step: int
    """Completed steps at the start."""
    last_step: int
    counts_until: int
    """Last step that was not lost: later attempts resumed from there."""
    process_started: float | None
    began: float | None
    """Begin of training, after imports, model building and loading."""
    ended: float | None
    outcome: str
    detail: str
    resumed_from: str | None
    host: str | None
    world_size: int | None
    trainer: str | None


@dataclass(frozen=True)
class Event:
    """Mark on the axes: a start, resume, end, preemption, kill or failure."""

    kind: str
    time: float | None
    step: int
    text: str


@dataclass(frozen=True)
class Goodput:
    """Division of the wall time, in seconds."""

    share: float
    """Time in steps that count, as a share of the wall time."""
    wall: float
    counting: float
    repeated: float
    other: float
    """Evaluation, saving, and everything else between the begin and the end of training."""
    setup: float
    down: float
    """Between two attempts."""


@dataclass(frozen=True)
class CheckpointRow:
    """Checkpoint on disk."""

    name: str
    step: int | None
    time: float | None
    size: int
    metrics: dict[str, float]
    is_newest: bool
    is_best: bool
    trainer: str | None
    world_size: int | None


@dataclass(frozen=True)
class Sample:
    """Generated text."""

    step: int
    prompt: str
    text: str


class Slot(NamedTuple):
    """Computation of a pipeline rank; begin and end in units of the timeline."""

    stage: int
    work: str
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Slots of each rank of a pipeline."""

    ranks: list[int]
    slots: list[list[Slot]]
    span: float
    """From the begin of the first slot to the end of the last."""
    bubble_share: float
    """Idle time of all ranks as a share of ranks x span."""


@dataclass(frozen=True)
class PipelineStep:
    """Schedule of a pipeline, as planned (in units of a forward pass) and as measured (in seconds)."""

    schedule: str
    step: int
    n_microbatches: int
    planned: Timeline | None
    planned_problem: str | None
    measured: list[Timeline]
    num_pipelines: int
    busy_by_stage: dict[int, float]
    """Seconds of each stage in its slots, in the first pipeline."""
    slowest_stage: int | None


@dataclass(frozen=True)
class RunReport:
    """Everything that is known about a run."""

    output_dir: str
    made: float
    source: str
    """File with the values: run_record.jsonl, trainer_logs.jsonl or trainer_state.json."""
    state: str
    step: int
    max_steps: int | None
    series: dict[str, list[Point]]
    memory: list[list[Point]]
    """Bytes in use of each rank."""
    memory_meaning: str
    attempts: list[Attempt]
    events: list[Event]
    goodput: Goodput | None
    checkpoints: list[CheckpointRow]
    samples: list[Sample]
    pipelines: list[PipelineStep]
    configuration: str
    summary: dict[str, str]
    versions: dict[str, str]
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and data that is missing."""

    @property
    def is_over(self) -> bool:
        return self.state != RUNNING
