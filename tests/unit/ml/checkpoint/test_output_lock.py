"""OutputDirLock: one job per output directory, checked with real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgather.ml.checkpoint.errors import OutputDirLockedError
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.output_lock import LOCK_FILE_NAME, OutputDirLock

# Acquires the lock, prints its pid, and holds until it reads a line or is killed. Then it releases, prints, and stays
# alive until the next line.
HOLD = """
import os, sys
from forgather.ml.checkpoint.output_lock import OutputDirLock
lock = OutputDirLock(sys.argv[1])
lock.acquire()
print(os.getpid(), flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""

# Holds the lock, and has a forked child that outlives it.
HOLD_WITH_CHILD = """
import os, sys, time
from forgather.ml.checkpoint.output_lock import OutputDirLock
OutputDirLock(sys.argv[1]).acquire()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""

TRY = """
import sys
from forgather.ml.checkpoint.output_lock import OutputDirLock
with OutputDirLock(sys.argv[1]):
    print("acquired")
"""

Start = Callable[[str, Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def run(script: str, output_dir: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", script, str(output_dir)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def proceed(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def attempt(output_dir: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", TRY, str(output_dir)], capture_output=True, text=True, timeout=60)


def test_second_job_is_rejected_with_pid_and_host_of_the_holder(tmp_path: Path, start: Start) -> None:
    holder_pid = line(start(HOLD, tmp_path))
    with pytest.raises(OutputDirLockedError) as caught:
        OutputDirLock(tmp_path).acquire()
    message = str(caught.value)
    since = json.loads((tmp_path / LOCK_FILE_NAME).read_text())["since"]
    for part in (str(tmp_path), f"process {holder_pid}", socket.gethostname(), since, "another output_dir"):
        assert part in message


def test_rejected_job_can_acquire_after_the_holder_releases(tmp_path: Path, start: Start) -> None:
    holder = start(HOLD, tmp_path)
    line(holder)
    assert "OutputDirLockedError" in attempt(tmp_path).stderr
    proceed(holder)
    assert line(holder) == "released"
    with OutputDirLock(tmp_path):
        assert holder.poll() is None


def test_killed_holder_frees_the_directory_while_its_forked_child_lives(tmp_path: Path, start: Start) -> None:
    holder = start(HOLD_WITH_CHILD, tmp_path)
    child_pid = int(line(holder))
    try:
        assert "OutputDirLockedError" in attempt(tmp_path).stderr
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        before = time.monotonic()
        with OutputDirLock(tmp_path):
            assert time.monotonic() - before < 1
            os.kill(child_pid, 0)  # Raises if the child is gone.
            assert f"process {os.getpid()} " in attempt(tmp_path).stderr
    finally:
        os.kill(child_pid, signal.SIGKILL)


def test_lock_is_reentrant_and_freed_by_the_last_release(tmp_path: Path) -> None:
    output_dir, alias = tmp_path / "out", tmp_path / "alias"
    output_dir.mkdir()
    alias.symlink_to(output_dir)
    first, second = OutputDirLock(output_dir), OutputDirLock(alias)
    first.acquire()
    second.acquire()
    first.acquire()
    for lock in (second, first):
        lock.release()
        assert f"process {os.getpid()}" in attempt(output_dir).stderr
    first.release()
    assert attempt(output_dir).stdout == "acquired\n"


def test_release_without_acquire_does_not_free_the_lock(tmp_path: Path) -> None:
    with OutputDirLock(tmp_path):
        OutputDirLock(tmp_path).release()
        assert "OutputDirLockedError" in attempt(tmp_path).stderr


def test_forked_child_neither_holds_nor_frees_its_parents_lock(tmp_path: Path) -> None:
    script = """
import os, sys
from forgather.ml.checkpoint.errors import OutputDirLockedError
from forgather.ml.checkpoint.output_lock import OutputDirLock
lock = OutputDirLock(sys.argv[1])
lock.acquire()
parent = os.getpid()
if os.fork() == 0:
    lock.release()
    try:
        OutputDirLock(sys.argv[1]).acquire()
    except OutputDirLockedError as error:
        os._exit(0 if f"process {parent} " in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert line(parent) == "0"
        assert f"process {parent.pid} " in attempt(tmp_path).stderr
        proceed(parent)


def test_deleted_lock_file_is_recreated(tmp_path: Path) -> None:
    first, second = OutputDirLock(tmp_path), OutputDirLock(tmp_path)
    first.acquire()
    (tmp_path / LOCK_FILE_NAME).unlink()
    second.acquire()
    first.release()
    assert "OutputDirLockedError" in attempt(tmp_path).stderr
    second.release()
    assert attempt(tmp_path).stdout == "acquired\n"


def test_missing_directory_is_created(tmp_path: Path) -> None:
    with OutputDirLock(tmp_path / "new" / "dir"):
        assert (tmp_path / "new" / "dir" / LOCK_FILE_NAME).exists()


def test_parents_of_new_directories_are_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(durable, "fsync_directory", synced.append)
    with OutputDirLock(tmp_path / "new" / "dir"):
        assert synced == [str(tmp_path), str(tmp_path / "new")]


def test_output_dir_that_is_a_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(FileExistsError, match=r"Cannot lock the output directory .*file.*another output_dir"):
        OutputDirLock(path).acquire()


def test_directory_without_write_permission_is_explained() -> None:
    # Root can write anywhere, so the script drops to another user if it runs as root.
    script = """
import os, sys
from forgather.ml.checkpoint.output_lock import OutputDirLock
if os.getuid() == 0:
    os.setuid(65534)
OutputDirLock(sys.argv[1]).acquire()
"""
    with tempfile.TemporaryDirectory() as output_dir:
        os.chmod(output_dir, 0o555)
        result = subprocess.run([sys.executable, "-c", script, output_dir], capture_output=True, text=True, timeout=60)
    assert "PermissionError" in result.stderr
    assert f"Cannot lock the output directory {output_dir!r}" in result.stderr
    assert "Fix its permissions or choose another output_dir" in result.stderr
