"""Timeline of a pipeline schedule: computations of each rank, idle time (bubble) and peak activations.

The order comes from torch's schedule tables. Times are simulated for equal stages and free communication. Used by the
documentation, the benchmarks and the run record, not by training steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from forgather.ml.trainer.pipeline.schedules import check_layout, traits_of


class Work(StrEnum):
    """Kinds of computation in a schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


DURATIONS = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.INPUT_GRADIENT: 1, Work.WEIGHT_GRADIENT: 1}
"""Durations for one stage, in units of its forward pass."""

# torch's names of actions. Other actions, such as receives and reductions, are not computations.
_WORKS = {"F": Work.FORWARD, "B": Work.BACKWARD, "I": Work.INPUT_GRADIENT, "W": Work.WEIGHT_GRADIENT}
_SENT = {"SEND_F": (Work.FORWARD,), "SEND_B": (Work.BACKWARD, Work.INPUT_GRADIENT)}


@dataclass(frozen=True)
class Slot:
    """One computation of a rank."""

    stage: int
    work: Work
    microbatch: int


@dataclass(frozen=True)
class TimedSlot:
    """Computation with start and end, in units of a forward pass of one micro-batch through all layers of a rank."""

    slot: Slot
    start: float
    end: float


def action_table(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[list[Slot]]:
    """Return the computations of each rank, in the order of torch's schedule table."""
    return [one.slots for one in _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)[0]]


def timeline(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[list[TimedSlot]]:
    """Return start and end of each rank's computations, for equal stages and free communication.

    A stage takes 1 / stages_per_rank of the time of a rank's layers, so that schedules can be compared for one model.
    A result leaves its rank when the schedule sends it. DualPipeV runs a forward and a backward pass as a pair, one
    after the other, and sends both results after the second.
    """
    notes, scale = _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)
    ends = _simulate(notes, pp_size * scale)
    return [
        [TimedSlot(slot, (ends[slot] - DURATIONS[slot.work]) / scale, ends[slot] / scale) for slot in one.slots]
        for one in notes
    ]


def bubble_share(schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None) -> float:
    """Return the idle time of all ranks as a fraction of the step time."""
    times = timeline(schedule_class, pp_size, n_microbatches, stages_per_rank)
    total = max(timed.end for timed_slots in times for timed in timed_slots)
    busy = sum(timed.end - timed.start for timed_slots in times for timed in timed_slots)
    return 1 - busy / (pp_size * total)


def planned_step(schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int) -> dict[str, Any]:
    """Return the timeline as plain values for the run record, or the reason why the schedule has none."""
    try:
        ranks = timeline(schedule_class, pp_size, n_microbatches, stages_per_rank)
    except ValueError as error:
        return {"planned": None, "planned_problem": str(error)}
    rows = [
        [[one.slot.stage, str(one.slot.work), one.slot.microbatch, one.start, one.end] for one in slots]
        for slots in ranks
    ]
    return {"planned": [{"rank": rank, "slots": slots} for rank, slots in enumerate(rows)]}


def peak_activations(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[float]:
    """Return the peak activations of each rank, in units of one micro-batch through all layers of a rank.

    A forward pass allocates the activations of its stage. The full backward pass or the weight-gradient pass frees them.
    """
    notes, scale = _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)
    return [max(_alive(one.slots)) / scale for one in notes]


def _alive(slots: list[Slot]) -> Iterator[int]:
    alive = 0
    for slot in slots:
        if slot.work is Work.FORWARD:
            alive += 1
        # The pass for input gradients keeps the activations, because the pass for weight gradients still needs them.
        elif slot.work is not Work.INPUT_GRADIENT:
            alive -= 1
        yield alive


class _Notes:
    """Computations of a rank in order, and the results that it sends only after later computations."""

    def __init__(self, actions: Iterable[Any]) -> None:
        self.slots: list[Slot] = []
        self.sent_after: dict[Slot, Slot] = {}
        for action in _single_actions(actions):
            if (work := _WORKS.get(action.computation_type)) is not None:
                self.slots.append(Slot(action.stage_index, work, action.microbatch_index))
            elif (sent := _SENT.get(action.computation_type)) is not None:
                self._send(action.stage_index, sent, action.microbatch_index)
        self._count_from_zero()

    def _send(self, stage: int, works: tuple[Work, ...], microbatch: int) -> None:
        computed = [slot for work in works if (slot := Slot(stage, work, microbatch)) in self.slots]
        self.sent_after.update(dict.fromkeys(computed, self.slots[-1]))

    def _count_from_zero(self) -> None:
        """Renumber micro-batches from zero: torch's 1F1B table counts the forward passes of the last rank from one."""
        firsts: dict[int, int] = {}
        for slot in self.slots:
            if slot.work is Work.FORWARD:
                firsts[slot.stage] = min(firsts.get(slot.stage, slot.microbatch), slot.microbatch)
        for place, slot in enumerate(self.slots):
            if slot.work is Work.FORWARD:
                self.slots[place] = replace(slot, microbatch=slot.microbatch - firsts[slot.stage])


@dataclass
class _LayoutOnly:
    """Stand-in for a stage: only the attributes that the constructors of schedules read."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def _notes_of_ranks(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None
) -> tuple[list[_Notes], int]:
    """Return the computations of each rank's step, and the number of stages per rank."""
    traits = traits_of(schedule_class)
    if stages_per_rank is None:
        stages_per_rank = traits.default_stages_per_rank
    check_layout(schedule_class, pp_size, stages_per_rank, n_microbatches)
    # Schedules build their tables in the constructor, so neither modules nor process groups are needed.
    stages = [_LayoutOnly(pp_size * stages_per_rank, pp_size) for _ in range(stages_per_rank)]
    schedule = schedule_class(stages if traits.is_multistage else stages[0], n_microbatches)
    # The table "with comms" also has sends and receives. Schedules for one stage per rank do not have it: they send
    # each result at once.
    table = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not table:
        raise ValueError(
            f"{schedule_class.__name__} has no table of its actions (pipeline_order), so its timeline is unknown. "
            "Add a method _get_pipeline_order to the class, as in torch's ScheduleGPipe."
        )
    return [_Notes(table[rank]) for rank in range(pp_size)], stages_per_rank


def _single_actions(actions: Iterable[Any]) -> Iterator[Any]:
    """Yield actions without idle slots; a pair, as in DualPipeV, yields two actions."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def _simulate(notes: list[_Notes], num_stages: int) -> dict[Slot, int]:
    """Return the end of each slot, in units of a stage's forward pass; a rank continues once its inputs have arrived."""
    sent_after = {slot: last for one in notes for slot, last in one.sent_after.items()}
    ends: dict[Slot, int] = {}
    clocks = [0] * len(notes)
    waiting = [one.slots[::-1] for one in notes]
    while any(waiting):
        num_done = len(ends)
        for rank, slots in enumerate(waiting):
            while slots and (inputs := _ends_of_inputs(slots[-1], ends, sent_after, num_stages)) is not None:
                slot = slots.pop()
                clocks[rank] = ends[slot] = max([clocks[rank], *inputs]) + DURATIONS[slot.work]
        # A round without progress: the ranks wait for each other in a cycle.
        if len(ends) == num_done:
            stuck = {rank: slots[-1] for rank, slots in enumerate(waiting) if slots}
            raise ValueError(f"The schedule deadlocks: each of these ranks waits for another: {stuck}.")
    return ends


def _ends_of_inputs(
    slot: Slot, ends: dict[Slot, int], sent_after: dict[Slot, Slot], num_stages: int
) -> list[int] | None:
    """Return the arrival times of a slot's inputs, or None while an input is missing."""
    found: list[int] = []
    for choices in _inputs(slot, num_stages):
        # Results of the same stage are available at once. Results from another rank arrive when they are sent.
        sources = [one if one.stage == slot.stage else sent_after.get(one, one) for one in choices if one in ends]
        if not sources or sources[0] not in ends:
            return None
        found.append(ends[sources[0]])
    return found


def _inputs(slot: Slot, num_stages: int) -> Iterator[list[Slot]]:
    """Yield the inputs of a slot as lists of alternatives; one entry of each list is enough."""
    stage, microbatch = slot.stage, slot.microbatch
    if slot.work is Work.WEIGHT_GRADIENT:
        yield [Slot(stage, Work.INPUT_GRADIENT, microbatch)]
    elif slot.work is not Work.FORWARD:
        yield [Slot(stage, Work.FORWARD, microbatch)]
        if stage < num_stages - 1:
            yield [Slot(stage + 1, work, microbatch) for work in (Work.BACKWARD, Work.INPUT_GRADIENT)]
    elif stage > 0:
        yield [Slot(stage - 1, Work.FORWARD, microbatch)]
