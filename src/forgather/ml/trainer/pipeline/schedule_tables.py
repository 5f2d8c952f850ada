"""What each rank computes in a step of a pipeline schedule, when, and how many activations it holds meanwhile."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices
from forgather.ml.trainer.pipeline.schedules import check_layout, traits_of


class Work(StrEnum):
    """The kinds of computation of a schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


DURATIONS = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.INPUT_GRADIENT: 1, Work.WEIGHT_GRADIENT: 1}
"""Of one stage, in units of its forward pass."""


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
    """The computations of each rank in the order in which torch's schedule starts them.

    Each rank's schedule really runs a step, on stages that only take notes. Tables that some schedules keep
    of themselves are not asked: that of 1F1B numbers the forward passes of its last rank from one.
    """
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
    """What a rank was asked to do: its computations in their order, and which results it sent only after later ones."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.sent_after: dict[Slot, Slot] = {}

    def compute(self, stage: int, work: Work, microbatch: int) -> None:
        self.slots.append(Slot(stage, work, microbatch))

    def send(self, stage: int, works: tuple[Work, ...], microbatch: int) -> None:
        computed = [slot for work in works if (slot := Slot(stage, work, microbatch)) in self.slots]
        self.sent_after.update(dict.fromkeys(computed, self.slots[-1]))


def _notes_of_ranks(
    schedule_class: type, pp_size: int, n_microbatches: int, stages_per_rank: int | None
) -> tuple[list[_Notes], int]:
    """The notes of each rank's step, and the number of stages per rank."""
    traits = traits_of(schedule_class)
    if stages_per_rank is None:
        stages_per_rank = traits.default_stages_per_rank
    check_layout(schedule_class, pp_size, stages_per_rank, n_microbatches)
    num_stages = pp_size * stages_per_rank
    notes = [_Notes() for _ in range(pp_size)]
    for rank, indices in enumerate(pipeline_stage_indices(pp_size, num_stages, traits.stage_type)):
        stages = [_NotingStage(index, num_stages, rank, pp_size, notes[rank]) for index in indices]
        schedule = schedule_class(stages if traits.is_multistage else stages[0], n_microbatches)
        schedule._step_microbatches()
    return notes, stages_per_rank


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


class _NotingStage:
    """Stands where a schedule expects a stage: computes and sends nothing, and notes what it was asked to compute."""

    submod = None
    device = "cpu"

    def __init__(self, index: int, num_stages: int, rank: int, pp_size: int, notes: _Notes) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = rank, pp_size
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self._notes = notes

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self._notes.compute(self.stage_index, Work.FORWARD, microbatch)

    def backward_one_chunk(self, microbatch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        work = Work.BACKWARD if full_backward else Work.INPUT_GRADIENT
        self._notes.compute(self.stage_index, work, microbatch)

    def backward_weight_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self._notes.compute(self.stage_index, Work.WEIGHT_GRADIENT, microbatch)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        self._notes.send(self.stage_index, (Work.FORWARD,), microbatch)
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        self._notes.send(self.stage_index, (Work.BACKWARD, Work.INPUT_GRADIENT), microbatch)
        return []

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return []

    get_bwd_recv_ops = get_fwd_recv_ops

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def perform_reduce_grad(self, scale: int) -> None:
        """Nothing to reduce."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def set_local_fwd_input(self, *args: Any) -> None:
        """Nothing to hand over between two stages of a rank."""

    set_local_bwd_input = get_local_bwd_output = set_local_fwd_input
