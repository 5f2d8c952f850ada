"""Failing saves on two ranks: one has no space or permission, or finds the directory in use.

Started as `python -m tests.support.faults.save_failures <directory> <report file>`. Runs every scenario below in forked
ranks, and reports the observations of each rank. The test judges them.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.distributed import Peers
from tests.support.faults.forked import Notes, fork, read_notes, wait_for
from tests.support.faults.job import Job, debris, warm_up

WORLD_SIZE = 2
NOBODY = 65534
SMALL_LIMIT_BYTES = 8 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _REMOUNT, _READ_ONLY, _RECURSIVE, _PRIVATE = 4096, 32, 1, 16384, 1 << 18

Facts = dict[str, Any]


def isolate_mounts() -> bool:
    """Give this process a private mount namespace; return False if the system does not allow it."""
    for flags in (_NEW_MOUNTS, _NEW_MOUNTS | _NEW_USER):
        if _libc.unshare(flags) == 0:
            return _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    return False


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> bool:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    return bool(_libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]) == 0)


def mount_small_disk(path: str, num_bytes: int) -> bool:
    return _mount("tmpfs", path, "tmpfs", 0, f"size={num_bytes}")


def make_read_only(path: str) -> bool:
    return _mount(path, path, None, _BIND) and _mount(path, path, None, _BIND | _REMOUNT | _READ_ONLY)


@contextlib.contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Make writes beyond `num_bytes` fail for any user, and ignore SIGXFSZ."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def without_rights() -> Iterator[bool]:
    """Act as an unprivileged user if this process runs as root; yield whether it does."""
    if os.geteuid() != 0:
        yield False
        return
    os.seteuid(NOBODY)
    try:
        yield True
    finally:
        os.seteuid(0)


def attempt(work: Callable[[], Any]) -> Facts:
    """Return the error of `work`, if any, and its duration."""
    start = time.monotonic()
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - every error is a fact for the test
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "value": value, "seconds": time.monotonic() - start}


def begin(output_dir: str, **options: Any) -> Job:
    """Return a job with one checkpoint that is about to save the next."""
    job = Job(output_dir, **options)
    job.train()
    job.save()
    job.train()
    return job


def finish(job: Job, facts: Facts) -> Facts:
    """Add the names and debris that remain after a save."""
    Peers.world().gather(None)
    output_dir = job.manager.config.output_dir
    return {**facts, "debris": debris(output_dir), "names": os.listdir(os.path.join(output_dir, "checkpoints"))}


def folder(output_dir: str) -> str:
    return os.path.join(output_dir, store.CHECKPOINTS_FOLDER)


def full_disk(output_dir: str, troubled: bool) -> Facts:
    """Save with too little disk space on one rank, which the save checks before writing."""
    mounted = troubled and isolate_mounts()
    job = begin(output_dir)
    mounted = mounted and mount_small_disk(folder(output_dir), 512 * 1024)
    return finish(job, {**attempt(job.save), "mounted": mounted})


def disk_fills_up(output_dir: str, troubled: bool) -> Facts:
    """Fill the disk of one rank between the space check and the write."""
    mounted = troubled and isolate_mounts()
    job = begin(output_dir)
    mounted = mounted and mount_small_disk(folder(output_dir), 2 * 2**20)
    if mounted:
        fill_after_check(folder(output_dir))
    return finish(job, {**attempt(job.save), "mounted": mounted})


def background_disk_fills_up(output_dir: str, troubled: bool, on_save_error: str = "raise") -> Facts:
    """Fill the disk of one rank during a background save, while the ranks train."""
    mounted = troubled and isolate_mounts()
    job = begin(output_dir, async_save=True, on_save_error=on_save_error)
    job.manager.finish_save()
    mounted = mounted and mount_small_disk(folder(output_dir), 2 * 2**20)
    if mounted:
        fill_after_check(folder(output_dir))
    job.save()
    job.train()
    facts = attempt(job.manager.finish_save)
    return finish(job, {**facts, "mounted": mounted, "num_save_errors": job.manager.num_save_errors})


def background_disk_fills_up_with_a_warning(output_dir: str, troubled: bool) -> Facts:
    return background_disk_fills_up(output_dir, troubled, "warn")


def fill_after_check(directory: str) -> None:
    real_open = os.open

    def open_when_full(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            os.open = real_open
            with contextlib.suppress(OSError), open(os.path.join(directory, "filler"), "wb") as file:
                for _ in range(512):
                    file.write(bytes(8192))
        return real_open(path, flags, *args, **options)

    os.open = open_when_full  # type: ignore[assignment]


def file_too_large(output_dir: str, troubled: bool) -> Facts:
    """Stop a write half-way by a limit on the file size."""
    job = begin(output_dir)
    with limited_file_size(SMALL_LIMIT_BYTES) if troubled else contextlib.nullcontext():
        facts = attempt(job.save)
    return finish(job, facts)


def read_only_disk(output_dir: str, troubled: bool) -> Facts:
    mounted = troubled and isolate_mounts()
    job = begin(output_dir)
    mounted = mounted and make_read_only(folder(output_dir))
    return finish(job, {**attempt(job.save), "mounted": mounted})


def no_permission(output_dir: str, troubled: bool) -> Facts:
    job = begin(output_dir)
    with without_rights() if troubled else contextlib.nullcontext(False) as changed:
        facts = attempt(job.save)
    return finish(job, {**facts, "changed_user": changed})


def warned_only(output_dir: str, troubled: bool) -> Facts:
    """Continue training after a failed save with on_save_error="warn"."""
    job = begin(output_dir, on_save_error="warn")
    with limited_file_size(SMALL_LIMIT_BYTES) if troubled else contextlib.nullcontext():
        facts = attempt(job.save)
    job.train()
    return finish(job, {**facts, "num_save_errors": job.manager.num_save_errors, "next": job.save()})


def unwritable_output_dir(output_dir: str, troubled: bool) -> Facts:
    """Start a job in a directory that rank 0 may not write to."""
    if dist.get_rank() == 0:
        os.mkdir(output_dir, 0o555)
    with without_rights() if dist.get_rank() == 0 else contextlib.nullcontext(False) as changed:
        facts = attempt(lambda: Job(output_dir) and None)
    return {**facts, "is_possible": changed or os.geteuid() != 0}


def directory_in_use(output_dir: str, troubled: bool) -> Facts:
    """Start a job in a directory that another process has locked."""
    holder = 0
    if dist.get_rank() == 0:
        reader, writer = os.pipe()

        def hold() -> None:
            OutputDirLock(output_dir).acquire()
            os.write(writer, b"held")
            signal.pause()

        holder = fork(hold)
        os.read(reader, 4)
    facts = attempt(lambda: Job(output_dir) and None)
    if holder:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    pid = Peers.world().broadcast(holder)
    after = attempt(lambda: Job(output_dir) and None)
    return {**facts, "holder": pid, "host": socket.gethostname(), "after": after["error"]}


def file_in_place_of_a_checkpoint(output_dir: str, troubled: bool) -> Facts:
    job = begin(output_dir)
    path = os.path.join(folder(output_dir), "checkpoint-2")
    if troubled:
        with open(path, "w") as file:
            file.write("not a checkpoint")
    Peers.world().gather(None)
    load = attempt(lambda: job.manager.load_checkpoint(path))
    resolve = attempt(lambda: job.manager.resolve_checkpoint_path(path))
    facts = finish(job, attempt(job.save))
    return {**facts, "load": load, "resolve": resolve, "newest": job.manager.load_checkpoint()}


def state_that_cannot_be_had(output_dir: str, troubled: bool) -> Facts:
    """Save with one rank that raises in `state_dict()`."""
    job = begin(output_dir)
    if troubled:
        job.tallies["dataset"].drawn = None  # type: ignore[assignment]
    return finish(job, attempt(job.save))


SCENARIOS = [
    full_disk,
    disk_fills_up,
    background_disk_fills_up,
    background_disk_fills_up_with_a_warning,
    file_too_large,
    read_only_disk,
    no_permission,
    warned_only,
    unwritable_output_dir,
    directory_in_use,
    file_in_place_of_a_checkpoint,
    state_that_cannot_be_had,
]


def run_scenario(scenario: Callable[[str, bool], Facts], troubled_rank: int, directory: str) -> list[Facts]:
    os.makedirs(directory)

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)
        notes = Notes(directory, rank)
        rendezvous = dist.FileStore(os.path.join(directory, "meeting"), WORLD_SIZE)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=WORLD_SIZE)
        notes.add("facts", scenario(os.path.join(directory, "output"), rank == troubled_rank))

    ranks = [fork(lambda rank=rank: run_rank(rank)) for rank in range(WORLD_SIZE)]  # type: ignore[misc]
    codes, _ = wait_for(ranks)
    assert codes == [0] * WORLD_SIZE, f"{scenario.__name__}: exit codes {codes}"
    return [read_notes(directory, rank, "facts")[0] for rank in range(WORLD_SIZE)]


def main(directory: str, report_path: str) -> None:
    torch.set_num_threads(1)
    warm_up()
    report = {}
    for scenario in SCENARIOS:
        for rank in range(WORLD_SIZE):
            name = f"{scenario.__name__} on rank {rank}"
            report[name] = run_scenario(scenario, rank, os.path.join(directory, name))
    with open(report_path, "w") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
