"""Pipeline schedules of torch.distributed.pipelining: names, traits and layout checks.

`ScheduleChoice` turns a name, class or partial into torch's schedule object. Layouts that torch would reject or run
incorrectly raise ValueError here. Used by `PipelineTrainer`, `StageSetup` and `StageRunner`.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, _PipelineSchedule

from forgather._suggestions import nearest_name, suggest

PipelineSchedulerT = _PipelineSchedule
"""A schedule object of torch.distributed.pipelining."""


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule that a trainer needs before it builds stages."""

    name: str
    is_multistage: bool
    stage_type: Literal["loop", "v"]
    """Stages of a rank: "loop" gives rank r the stages r, r + p, ...; "v" gives it r and n - 1 - r."""
    splits_backward: bool
    """Whether gradients of inputs and weights are computed separately; compiled stages cannot do this."""
    default_stages_per_rank: int


SCHEDULES: dict[type, ScheduleTraits] = {
    ScheduleGPipe: ScheduleTraits("gpipe", False, "loop", False, 1),
    Schedule1F1B: ScheduleTraits("1f1b", False, "loop", False, 1),
    ScheduleInterleaved1F1B: ScheduleTraits("interleaved1f1b", True, "loop", False, 2),
    ScheduleLoopedBFS: ScheduleTraits("loopedbfs", True, "loop", False, 2),
    ScheduleInterleavedZeroBubble: ScheduleTraits("interleavedzerobubble", True, "loop", True, 2),
    ScheduleZBVZeroBubble: ScheduleTraits("zbv", True, "v", True, 2),
    ScheduleDualPipeV: ScheduleTraits("dualpipev", True, "v", True, 2),
}


@dataclass(frozen=True)
class ScheduleChoice:
    """Schedule as passed by the user: a name, a class, or a class with options bound by functools.partial."""

    factory: Callable[..., Any]
    schedule_class: type
    traits: ScheduleTraits

    @classmethod
    def of(cls, given: Any) -> "ScheduleChoice":
        is_bound = isinstance(given, functools.partial)
        schedule_class = find_schedule(given.func if is_bound else given)
        return cls(given if is_bound else schedule_class, schedule_class, traits_of(schedule_class))

    def prepare(self, pp_size: int, stages_per_rank: int, n_microbatches: int, debug: bool) -> None:
        """Apply torch settings for this schedule; raise ValueError for a layout that it cannot run."""
        if debug:
            logging.getLogger("torch.distributed.pipelining").setLevel(logging.DEBUG)
        if self.traits.splits_backward:
            # A compiled part of a stage may reuse the memory of saved buffers in its backward pass. A split backward
            # pass reads these buffers twice.
            torch._functorch.config.donated_buffer = False
        check_layout(self.schedule_class, pp_size, self.stages_per_rank(stages_per_rank), n_microbatches)

    def stages_per_rank(self, asked: int) -> int:
        """Return the number of stages per rank: `asked`, or the schedule's default if that is larger."""
        return max(asked, self.traits.default_stages_per_rank)

    def make(self, stages: Sequence[Any], n_microbatches: int, loss_fn: Callable[..., Any]) -> Any:
        """Create torch's schedule object for the stages of one rank."""
        # No scaling: the loss of each micro-batch is already its share of the step's loss.
        return self.factory(
            list(stages) if self.traits.is_multistage else stages[0],
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            scale_grads=False,
        )


def find_schedule(schedule: str | type) -> type:
    """Return the schedule class of a name; return a schedule class unchanged, and raise ValueError for anything else."""
    if isinstance(schedule, str):
        return _find_by_name(schedule)
    if not (isinstance(schedule, type) and issubclass(schedule, PipelineScheduleSingle | PipelineScheduleMulti)):
        raise ValueError(
            f"schedule={schedule!r} is not a pipeline schedule. Pass a subclass of PipelineScheduleSingle or "
            f"PipelineScheduleMulti of torch.distributed.pipelining, or one of the names {_names()}."
        )
    if inspect.isabstract(schedule):
        raise ValueError(
            f"schedule={schedule.__name__} is an abstract base class of schedules. Pass a subclass of it, "
            f"or one of the names {_names()}."
        )
    return schedule


def traits_of(schedule_class: type) -> ScheduleTraits:
    """Return the traits of a schedule; subclasses of torch's schedules have the traits of their base."""
    for known, traits in SCHEDULES.items():
        if issubclass(schedule_class, known):
            return traits
    # A custom multi-stage schedule does not report whether it splits backward passes. Assuming a split only rules out
    # torch_compile and fused optimizer steps. Assuming the opposite could lose gradients.
    is_multistage = issubclass(schedule_class, PipelineScheduleMulti)
    return ScheduleTraits(schedule_class.__name__, is_multistage, "loop", is_multistage, 2 if is_multistage else 1)


def check_layout(schedule_class: type, pp_size: int, stages_per_rank: int, n_microbatches: int) -> None:
    """Raise ValueError if the schedule would reject these settings or run them incorrectly."""
    # Only the first problem is reported, since later problems often follow from it.
    for problem in _problems(schedule_class, pp_size, stages_per_rank, n_microbatches):
        raise ValueError(
            f"schedule={traits_of(schedule_class).name!r} cannot run with n_microbatches={n_microbatches} and "
            f"stages_per_rank={stages_per_rank} on {pp_size} pipeline rank{'s' * (pp_size != 1)}: {problem}"
        )


def _problems(schedule_class: type, pp_size: int, stages_per_rank: int, n_microbatches: int) -> Iterator[str]:
    if pp_size < 1:
        yield "a pipeline has at least one rank. Start the program on more ranks, or set a larger pp_size."
    if n_microbatches < 1:
        yield "a step has at least one micro-batch. Set n_microbatches to 1 or more."
    yield from _stage_problems(traits_of(schedule_class), stages_per_rank)
    yield from _microbatch_problems(schedule_class, pp_size, pp_size * stages_per_rank, n_microbatches)


def _stage_problems(traits: ScheduleTraits, stages_per_rank: int) -> Iterator[str]:
    if not traits.is_multistage and stages_per_rank != 1:
        yield (
            "it runs exactly one stage on each rank. Set stages_per_rank=1, or choose a schedule for several "
            f"stages ({_names(is_multistage=True)})."
        )
    if traits.stage_type == "v" and stages_per_rank != 2:
        yield (
            "its ranks hold two stages each, one on the way down the model and one on the way up. Set "
            f"stages_per_rank=2, or choose another schedule ({_names(stage_type='loop')})."
        )
    if traits.is_multistage and stages_per_rank < 2:
        yield (
            "it interleaves several stages on each rank. Set stages_per_rank=2 or more, or choose a schedule for one "
            f"stage ({_names(is_multistage=False)})."
        )


def _microbatch_problems(schedule_class: type, pp_size: int, num_stages: int, n_microbatches: int) -> Iterator[str]:
    if issubclass(schedule_class, Schedule1F1B | ScheduleDualPipeV) and n_microbatches < num_stages:
        yield (
            f"it fills the pipeline before its first backward pass, which needs a micro-batch for each of the {num_stages} "
            f"stages. Set n_microbatches={num_stages} or more, or choose a schedule that runs with fewer ('gpipe', 'zbv')."
        )
    rounds = max(1, n_microbatches // pp_size)
    if issubclass(schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble) and n_microbatches % rounds:
        fewer = n_microbatches - n_microbatches % rounds
        more = min(fewer + rounds, (rounds + 1) * pp_size)
        yield (
            f"it sends micro-batches through the {pp_size} ranks in {rounds} rounds (n_microbatches // ranks), which must "
            f"be of equal size. Set n_microbatches={fewer} or {more}; multiples of the number of ranks always work."
        )


def _names(*, is_multistage: bool | None = None, stage_type: str | None = None) -> str:
    """Return the short names of torch's schedules, optionally filtered by traits."""
    return ", ".join(
        repr(traits.name)
        for traits in SCHEDULES.values()
        if is_multistage in (None, traits.is_multistage) and stage_type in (None, traits.stage_type)
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("schedule")


def _find_by_name(name: str) -> type:
    classes = {_plain(one.__name__): one for one in SCHEDULES} | {SCHEDULES[one].name: one for one in SCHEDULES}
    if (plain := _plain(name)) in classes:
        return classes[plain]
    # No cutoff: with so few names, even a distant suggestion helps.
    nearest = nearest_name(plain, classes, cutoff=0.0)
    suggestion = SCHEDULES[classes[nearest]].name if nearest else "gpipe"
    raise ValueError(
        f"schedule={name!r} is not a known pipeline schedule.{suggest(suggestion)} The names are {_names()}. "
        "Subclasses of the schedules of torch.distributed.pipelining are accepted as well."
    )
