"""Memory plan of background saves: how many bytes each rank may use for staging, from `async_save_memory`.

The plan follows from numbers that all ranks of a node have gathered, so their shares never exceed the limit together.
`BackgroundSaves` makes one before the first save, and another one when the state has grown.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DEFAULT_SHARE = 0.25
"""Share of the node's free memory that a full copy may take without `async_save_memory`."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", re.IGNORECASE)
_CGROUP = "/sys/fs/cgroup"
_OWN_CGROUPS = "/proc/self/cgroup"
_ROOTS = ["0::/", "1:memory:/"]
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_VERSION_2 = ("memory.max", "memory.current")
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
    """Return the bytes that processes of this node can still allocate, within the limits of container and scheduler."""
    return max(0, min([_available(), *_left_in_cgroups()]))


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


def _left_in_cgroups() -> list[int]:
    """Return the memory that is left in each cgroup around this process; schedulers nest theirs below the root."""
    left = (_left_in(folder, *names) for folder, names in _cgroups())
    return [one for one in left if one is not None]


def _cgroups() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the folders of the cgroups around this process, with the files of limit and usage, the innermost first."""
    for line in _lines_of(_OWN_CGROUPS) or _ROOTS:
        _, controllers, path = line.strip().split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (os.path.join(_CGROUP, "memory"), _VERSION_1) if controllers else (_CGROUP, _VERSION_2)
        # In a container the path may be that of the host, which does not exist here. Its root then has the limit.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield os.path.join(root, *parts[:depth]), names


def _left_in(folder: str, limit_name: str, used_name: str) -> int | None:
    try:
        limit, used = (_number_in(os.path.join(folder, name)) for name in (limit_name, used_name))
        return limit - used + _cached(os.path.join(folder, "memory.stat"))
    except (OSError, ValueError):
        # No such group, another version of cgroups, or "max": a group without a limit.
        return None


def _lines_of(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []


def _cached(path: str) -> int:
    """Return the page cache of the container that the kernel frees on demand."""
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("inactive_file "))


def _number_in(path: str) -> int:
    with open(path) as file:
        return int(file.read())
