"""Peak memory of a function, from the profiler's record of torch allocations on the CPU."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the peak of the memory allocated during `work`, without the memory allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = [one for one in record.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak
