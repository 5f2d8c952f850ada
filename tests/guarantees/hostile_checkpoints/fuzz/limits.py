"""Resource limits of fuzzer children: memory, CPU time and wall time."""

import os
import resource
import select
import signal
from pathlib import Path

MIB = 2**20
WALL_SECONDS = 10.0
# The library promises this limit: memory of a load per byte of its files.
MEMORY_PER_FILE_BYTE = 4
MEMORY_BASE = 64 * MIB
MEMORY_NOISE = 96 * MIB
"""Measured noise. Every child briefly reserves 64 MiB of address space, even for the untouched checkpoint. The rest
covers buffers and stacks of the IO threads, and rounding by Python's allocator.
"""


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_address_space() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))


def tree_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_symlink() and path.is_file())


def limit_myself(file_bytes: int) -> None:
    limit_memory(file_bytes)
    seconds = int(WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(file_bytes: int, num_checkpoints: int = 1) -> None:
    """Limit the address space relative to current use: a rejected file frees its memory, but not its addresses."""
    allowance = MEMORY_PER_FILE_BYTE * file_bytes + MEMORY_BASE * num_checkpoints + MEMORY_NOISE
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + allowance, resource.RLIM_INFINITY))


def lift_memory_limit() -> None:
    """Lift the limit, so that the child can report an error after running out of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def wait_or_kill(child: int, seconds: float) -> tuple[int, bool]:
    """Return the exit code of a child, and whether it was killed after `seconds`."""
    descriptor = os.pidfd_open(child)
    try:
        watch = select.poll()
        watch.register(descriptor, select.POLLIN)
        is_late = not watch.poll(seconds * 1000)
    finally:
        os.close(descriptor)
    if is_late:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_late
