"""How much memory training takes, from torch's record of every allocation on the CPU."""

from typing import Any

from torch.profiler import ProfilerActivity, profile


class StepMemory:
    """What is held between steps, and the peak of one: `begin`, then `note_step` before every step, in one thread.

    Torch keeps the record by thread, and knows the sizes only of what was allocated since the first record began: so it
    begins before there is a model.
    """

    NUM_STEPS = 4
    """Steps until both are known; the first ones make what stays, such as the moments of the optimizer."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._num_steps = 0
        self._record: Any = None

    @staticmethod
    def prepare() -> None:
        """For the main thread, once: torch's profiler complains when it is first used in another."""
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
        """What the record ended with, and its peak."""
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
