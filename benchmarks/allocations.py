"""Memory use of training steps, from the CPU allocations that torch's profiler records."""

from typing import Any

from torch.profiler import ProfilerActivity, profile


class StepMemory:
    """Memory held between steps, and peak memory of a step.

    Call `begin` before the model is built, then `note_step` before every step, all in one thread. The profiler records
    per thread, and knows only the sizes of allocations made after the first record began.
    """

    NUM_STEPS = 4
    """Steps before `held` is measured. The first ones allocate lasting state such as the optimizer's moments."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._num_steps = 0
        self._record: Any = None

    @staticmethod
    def prepare() -> None:
        """Start the profiler once in the main thread: it complains if its first use is in another thread."""
        with _record_of_allocations():
            pass

    def begin(self) -> None:
        self._record = _record_of_allocations()
        self._record.__enter__()

    def note_step(self) -> None:
        self._num_steps += 1
        if self._num_steps == self.NUM_STEPS:
            self.held, _ = self._end()
            self.begin()
        elif self._num_steps == self.NUM_STEPS + 1:
            self.peak = self.held + self._end()[1]

    def _end(self) -> tuple[int, int]:
        """Return the bytes allocated at the end of the record, and at its peak."""
        self._record.__exit__(None, None, None)
        events = [one for one in self._record.profiler.kineto_results.events() if one.name() == "[memory]"]
        self._record = None
        held = peak = 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return held, peak


def _record_of_allocations() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)
