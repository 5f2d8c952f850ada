"""SlotRecorder: begin and end of each computation (slot) of one pipeline step, as measured on this rank.

Off, it costs one attribute check per batch. In the recorded step the methods of torch's stages are wrapped. On
accelerators it records events on the stream, and reads them at the next log, when the device has finished anyway.
`ScheduleRunner` calls it; `PipelineTrainer` gathers the slots of all ranks for the run record.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forgather.ml.trainer.pipeline.schedules.timeline import Work

MeasuredSlot = tuple[int, str, int, float, float]
"""Stage, work, micro-batch, begin and end in seconds since 1970."""
_MAX_SLOTS = 20_000
"""Slots of all ranks in a run record; further pipelines are left out."""


class SlotRecorder:
    """Recorder of one training step: number `at_step` after the start, from 1; 0 records none."""

    def __init__(self, at_step: int, device: torch.device, completed: Callable[[], int]) -> None:
        """`completed` returns the number of completed steps of the run, which is equal on all ranks."""
        self._at_step = at_step
        self._device = device
        self._completed = completed
        self._first: int | None = None
        self._slots: list[tuple[int, Work, int, Any, Any]] = []
        self.is_waiting = at_step > 0
        """Whether the step is still to come."""
        self.has_slots = False
        """Whether a recorded step waits to be read; equal on all ranks, since it depends on the step only."""
        self.step = 0
        """Number of the recorded step in the run."""

    def watching(self, schedule: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context for a batch, which records it if it is the first of the step."""
        completed = self._completed()
        if self._first is None:
            self._first = completed
        if completed - self._first + 1 < self._at_step:
            return contextlib.nullcontext()
        self.is_waiting, self.step = False, completed + 1
        return self._recording(schedule)

    @contextlib.contextmanager
    def _recording(self, schedule: Any) -> Iterator[None]:
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        self._slots = []
        for stage in stages:
            self._wrap_stage(stage)
        schedule._maybe_compute_loss = self._with_loss(schedule._maybe_compute_loss)
        try:
            yield
        finally:
            # Instance attributes hide the methods of the classes.
            del schedule._maybe_compute_loss
            for stage in stages:
                del stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
        self.has_slots = True

    def _wrap_stage(self, stage: Any) -> None:
        forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
        index = stage.stage_index

        def timed_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return self._timed(index, Work.FORWARD, fwd_chunk_id, lambda: forward(fwd_chunk_id, *args, **kwargs))

        def timed_backward(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> Any:
            work = Work.BACKWARD if full_backward else Work.INPUT_GRADIENT
            call = lambda: backward(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)  # noqa: E731
            return self._timed(index, work, bwd_chunk_id, call)

        def timed_weights(bwd_chunk_id: int, **kwargs: Any) -> Any:
            return self._timed(index, Work.WEIGHT_GRADIENT, bwd_chunk_id, lambda: weights(bwd_chunk_id, **kwargs))

        stage.forward_one_chunk = timed_forward
        stage.backward_one_chunk = timed_backward
        stage.backward_weight_one_chunk = timed_weights

    def _timed(self, stage: int, work: Work, microbatch: int, call: Callable[[], Any]) -> Any:
        begin = self._now()
        result = call()
        self._slots.append((stage, work, microbatch, begin, self._now()))
        return result

    def _with_loss(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the schedule's computation of a loss, which belongs to the forward slot before it."""

        def computed(stage: Any, *args: Any, **kwargs: Any) -> Any:
            result = compute(stage, *args, **kwargs)
            if stage.is_last and self._slots:
                *slot, _ = self._slots[-1]
                self._slots[-1] = (*slot, self._now())
            return result

        return computed

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def read(self) -> list[MeasuredSlot]:
        """Return the slots in wall time, and forget them; waits for the device."""
        slots, self._slots, self.has_slots = self._slots, [], False
        seconds_ago = self._reader()
        now = time.time()
        return [
            (stage, str(work), microbatch, now - seconds_ago(begin), now - seconds_ago(end))
            for stage, work, microbatch, begin, end in slots
        ]

    def _reader(self) -> Callable[[Any], float]:
        now = self._now()
        if isinstance(now, float):
            return lambda mark: now - mark
        # Hosts and devices have different clocks. An event that has just happened connects them.
        now.synchronize()
        return lambda mark: float(mark.elapsed_time(now)) / 1000


def measured_step(step: int, pipelines: Sequence[Sequence[int]], told: Sequence[list[MeasuredSlot]]) -> dict[str, Any]:
    """Return the slots of all ranks for the run record, in seconds since the first slot of each pipeline."""
    drawn: list[dict[str, Any]] = []
    num_slots = 0
    for ranks in pipelines:
        num_slots += sum(len(told[rank]) for rank in ranks)
        if drawn and num_slots > _MAX_SLOTS:
            break
        first = min((slot[3] for rank in ranks for slot in told[rank]), default=0.0)
        drawn.append({"ranks": [{"rank": rank, "slots": _shifted(told[rank], first)} for rank in ranks]})
    return {"of_step": step, "pipelines": drawn, "num_pipelines": len(pipelines)}


def _shifted(slots: Sequence[MeasuredSlot], first: float) -> list[list[Any]]:
    return [[*what, round(begin - first, 7), round(end - first, 7)] for *what, begin, end in slots]
