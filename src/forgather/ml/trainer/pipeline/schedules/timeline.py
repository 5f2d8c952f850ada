"""What each rank computes in a step of a pipeline schedule, when, and how many activations it holds meanwhile."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from forgather.ml.trainer.pipeline.schedules import check_layout, traits_of


class Work(StrEnum):
    """The kinds of computation of a schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


DURATIONS = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.INPUT_GRADIENT: 1, Work.WEIGHT_GRADIENT: 1}
"""Of one stage, in units of its forward pass."""

# torch's names of actions; all others, such as receiving and reducing, are no computation.
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
    """A computation with its time, in units of a forward pass of one micro-batch through all layers of a rank."""

    slot: Slot
    start: float
    end: float


def action_table(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[list[Slot]]:
    """The computations of each rank in the order in which torch's schedule starts them, from the schedule's own table."""
    return [one.slots for one in _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)[0]]


def timeline(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[list[TimedSlot]]:
    """When each rank computes what, if all stages are equal and communication takes no time.

    A stage takes 1 / stages_per_rank of the time of a rank's layers, so that schedules can be compared for one model.
    A result leaves its rank when the schedule sends it: DualPipeV computes its pairs of a forward and a backward pass one
    after the other and sends both results after the second.
    """
    notes, scale = _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)
    ends = _simulate(notes, pp_size * scale)
    return [
        [TimedSlot(slot, (ends[slot] - DURATIONS[slot.work]) / scale, ends[slot] / scale) for slot in one.slots]
        for one in notes
    ]


def bubble_share(schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None) -> float:
    """The idle time of all ranks as a share of the time that a step takes them."""
    times = timeline(schedule_class, pp_size, n_microbatches, stages_per_rank)
    total = max(timed.end for timed_slots in times for timed in timed_slots)
    busy = sum(timed.end - timed.start for timed_slots in times for timed in timed_slots)
    return 1 - busy / (pp_size * total)


def peak_activations(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None = None
) -> list[float]:
    """For each rank the most activations alive at once, in units of a micro-batch through all layers of a rank.

    A forward pass makes the activations of its stage; the full backward pass or that for weights frees them.
    """
    notes, scale = _notes_of_ranks(schedule_class, pp_size, n_microbatches, stages_per_rank)
    return [max(_alive(one.slots)) / scale for one in notes]


def _alive(slots: list[Slot]) -> Iterator[int]:
    alive = 0
    for slot in slots:
        if slot.work is Work.FORWARD:
            alive += 1
        elif slot.work is not Work.INPUT_GRADIENT:
            alive -= 1
        yield alive


class _Notes:
    """The computations of a rank in their order, and the results that it sends only after later computations."""

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
        """Renumber micro-batches: torch's table of 1F1B counts the forward passes of the last rank from one."""
        firsts: dict[int, int] = {}
        for slot in self.slots:
            if slot.work is Work.FORWARD:
                firsts[slot.stage] = min(firsts.get(slot.stage, slot.microbatch), slot.microbatch)
        for place, slot in enumerate(self.slots):
            if slot.work is Work.FORWARD:
                self.slots[place] = replace(slot, microbatch=slot.microbatch - firsts[slot.stage])


@dataclass
class _LayoutOnly:
    """The attributes of a stage that the constructors of schedules read: its place, and no module."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def _notes_of_ranks(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None
) -> tuple[list[_Notes], int]:
    """The notes of each rank's step, and the number of stages per rank."""
    traits = traits_of(schedule_class)
    if stages_per_rank is None:
        stages_per_rank = traits.default_stages_per_rank
    check_layout(schedule_class, pp_size, stages_per_rank, n_microbatches)
    stages = [_LayoutOnly(pp_size * stages_per_rank, pp_size) for _ in range(stages_per_rank)]
    schedule = schedule_class(stages if traits.is_multistage else stages[0], n_microbatches)
    # The second table has sends and receives as well. Schedules for one stage per rank send each result at once.
    table = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not table:
        raise ValueError(
            f"{schedule_class.__name__} has no table of its actions (pipeline_order), so that its timeline is unknown. "
            "Give the class a method _get_pipeline_order, as ScheduleGPipe of torch has."
        )
    return [_Notes(table[rank]) for rank in range(pp_size)], stages_per_rank


def _single_actions(actions: Iterable[Any]) -> Iterator[Any]:
    """Actions without idle places, pairs such as DualPipeV's one after the other."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def _simulate(notes: list[_Notes], num_stages: int) -> dict[Slot, int]:
    """The end of each slot in units of a forward pass of a stage: ranks go on whenever what they wait for is there."""
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
        if len(ends) == num_done:
            stuck = {rank: slots[-1] for rank, slots in enumerate(waiting) if slots}
            raise ValueError(f"The schedule never ends: each of these ranks waits for another one: {stuck}.")
    return ends


def _ends_of_inputs(
    slot: Slot, ends: dict[Slot, int], sent_after: dict[Slot, Slot], num_stages: int
) -> list[int] | None:
    """When the results that a slot needs are there, or None as long as one is missing."""
    found: list[int] = []
    for choices in _inputs(slot, num_stages):
        # Results of the own stage are there at once; others come when they are sent, if they are not of the same rank.
        sources = [one if one.stage == slot.stage else sent_after.get(one, one) for one in choices if one in ends]
        if not sources or sources[0] not in ends:
            return None
        found.append(ends[sources[0]])
    return found


def _inputs(slot: Slot, num_stages: int) -> Iterator[list[Slot]]:
    """What a slot needs; of each list one is enough."""
    stage, microbatch = slot.stage, slot.microbatch
    if slot.work is Work.WEIGHT_GRADIENT:
        yield [Slot(stage, Work.INPUT_GRADIENT, microbatch)]
    elif slot.work is not Work.FORWARD:
        yield [Slot(stage, Work.FORWARD, microbatch)]
        if stage < num_stages - 1:
            yield [Slot(stage + 1, work, microbatch) for work in (Work.BACKWARD, Work.INPUT_GRADIENT)]
    elif stage > 0:
        yield [Slot(stage - 1, Work.FORWARD, microbatch)]
