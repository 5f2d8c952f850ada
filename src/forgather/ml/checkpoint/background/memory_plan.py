"""Memory plan of background saves: how many bytes each rank may use for staging, from `async_save_memory`.

The plan follows from numbers that all ranks of a node have gathered, so their shares never exceed the limit together.
`BackgroundSaves` makes one before the first save, and another one when the state has grown.
"""

import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_SHARE = 0.25
"""Share of the node's free memory that a full copy may take without `async_save_memory`."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NUMBER = re.compile(r"\s*[-+]?[\d.]+(?:e[-+]?\d+)?\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", re.IGNORECASE)
_CGROUP = "/sys/fs/cgroup"
_MEMINFO = "/proc/meminfo"


class MemoryNeed(NamedTuple):
    """Bytes that a rank stages for one save, and the free memory of its node as the rank measured it.

    `held_bytes` is staging memory that the rank has already, which is not free any more.
    """

    num_bytes: int
    free_bytes: int
    held_bytes: int = 0


class MemoryPlan(NamedTuple):
    """Bytes that this rank may stage, and an explanation for the log."""

    limit: int
    reason: str


def checked_async_save_memory(value: str | float | None) -> str | float | None:
    """Return `async_save_memory`, a share in text as a number; raise `ValueError` if it is neither size nor share."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        # The command line passes text.
        value = float(value)
    if isinstance(value, str):
        if _parsed_size(value) is None:
            raise ValueError(
                f"async_save_memory={value!r} is not a size. Set bytes with a unit, such as '4GiB' or '500MB' (per rank), a "
                "share of the node's free memory as a number above 0 and at most 1, such as 0.25, or None."
            )
    elif value is not None and (isinstance(value, bool) or not 0 < value <= 1):
        raise ValueError(
            f"async_save_memory={value!r} is not a share of the node's free memory: it must be above 0 and at most 1. To set "
            "bytes per rank, add a unit, such as '4GiB'."
        )
    return value


def _parsed_size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    num_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    return num_bytes or None


def plan_memory(setting: str | float | None, needs: Sequence[MemoryNeed], position: int) -> MemoryPlan:
    """Return the plan of the rank at `position` among the ranks of its node; `needs` are in the same order."""
    own, total = needs[position].num_bytes, sum(need.num_bytes for need in needs)
    if isinstance(setting, str):
        size = _parsed_size(setting)
        assert size is not None, "the setting was checked"
        return MemoryPlan(size, f"async_save_memory={setting!r} per rank")
    # Ranks measure at slightly different moments. The smallest value is safe for all of them.
    free = min(need.free_bytes for need in needs) + sum(need.held_bytes for need in needs)
    share = DEFAULT_SHARE if setting is None else setting
    # In proportion to the needs: of the ranks that hold copies of a state, only one stages it.
    limit = math.floor(share * free * own / total) if total else 0
    origin = "default" if setting is None else f"async_save_memory={setting!r}"
    return MemoryPlan(
        limit, f"{origin}: {share:.0%} of {size_text(free)} free memory of this node, {len(needs)} rank(s)"
    )


def size_text(num_bytes: float) -> str:
    """Return a size in a unit that a reader can compare."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def free_memory() -> int:
    """Return the bytes that processes of this node can still allocate, within the limit of the container."""
    return max(0, min([_available(), *_left_in_cgroup()]))


def _available() -> int:
    try:
        with open(_MEMINFO) as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Systems without /proc. Half of the memory is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _left_in_cgroup() -> list[int]:
    """Return the memory that the container has left; empty without a limit."""
    for folder, limit_name, used_name in (
        (_CGROUP, "memory.max", "memory.current"),
        (os.path.join(_CGROUP, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (_number_in(os.path.join(folder, name)) for name in (limit_name, used_name))
            return [limit - used + _cached(os.path.join(folder, "memory.stat"))]
        except (OSError, ValueError):
            # Another version of cgroups, or "max": a container without a limit.
            continue
    return []


def _cached(path: str) -> int:
    """Return the page cache of the container that the kernel frees on demand."""
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("inactive_file "))


def _number_in(path: str) -> int:
    with open(path) as file:
        return int(file.read())
