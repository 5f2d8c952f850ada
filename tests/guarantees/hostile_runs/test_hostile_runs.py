"""Run folders from elsewhere: a link, FIFO, device, huge file or bomb in place of any file.

Every command of the program runs in a forked process with little memory, and ends soon. Nothing outside the run is read
into an output or changed, and a refusal names the file.
"""

import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forgather.cli.main import main
from tests.support.faults.forked import fork
from tests.support.sampling import RUNS_ALL
from tests.unit.cli.program import Answer, spawn, write_tiny_run
from tests.unit.config.test_configuration import BOMB

SECRET = "PRIVATE-KEY-OF-THE-USER"
MOST_MEMORY = 500 * 10**6
HANGS_AFTER = 60.0

NEWEST = "out/checkpoints/checkpoint-4"
OLDER = "out/checkpoints/checkpoint-2"
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "tiny.yaml", "--args.max_steps", "5"),
    "ls": ("checkpoint", "ls", "out"),
    "inspect": ("checkpoint", "inspect", NEWEST),
    "verify": ("checkpoint", "verify", NEWEST),
    "verify-run": ("checkpoint", "verify", "out"),
    "diff": ("checkpoint", "diff", OLDER, NEWEST),
    "export": ("checkpoint", "export", NEWEST, "exported"),
    "modify": ("checkpoint", "modify", NEWEST, "--output", "modified", "--set", "args.max_steps=9"),
    "finalize": ("finalize", NEWEST, "final"),
    "report": ("report", "out"),
    "compare": ("compare", "out", "other"),
    "evaluate": ("evaluate", NEWEST),
    "generate": ("generate", NEWEST, "--prompt", "This", "--max-new-tokens", "2"),
    "samples": ("samples", "out", "--step", "4"),
    "replay": ("replay", "out", "--step", "4"),
    "control": ("control", "out", "status"),
}
ORDINARY_CODES = {"diff": 1, "control": 1}
"""Exit codes for the run as it was: its checkpoints differ, and no job runs."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run in `out`, copies of it in `other` and `pristine`, and a private file."""
    folder = tmp_path_factory.mktemp("run")
    write_tiny_run(folder)
    assert spawn(folder, "train", "tiny.yaml", "--args.max_steps", "4").code == 0
    (folder / "out/watch").mkdir(exist_ok=True)
    (folder / "out/watch/rank0.txt").write_text("stacks\n")
    for name in ("failures.jsonl", "report.html"):
        (folder / "out" / name).write_text("{}\n")
    for copy in ("other", "pristine"):
        shutil.copytree(folder / "out", folder / copy)
    (folder / "private").write_text(SECRET)
    return folder


def attempt(folder: Path, words: tuple[str, ...]) -> Answer:
    """Run the program in a fork of this process, with little further memory and without a network."""

    def work() -> None:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # Not those of pytest, which capture.
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        with open("/proc/self/statm", "rb") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_MEMORY, in_use + MOST_MEMORY))
        os._exit(main(list(words)))

    child, deadline = fork(work), time.monotonic() + HANGS_AFTER
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    texts = [(folder / name).read_text(errors="replace") for name in ("output", "errors")]
    return Answer(os.waitstatus_to_exitcode(ended[1]), *texts)


def put_link(path: Path, private: Path) -> None:
    path.unlink()
    path.symlink_to(private)


def put_hard_link(path: Path, private: Path) -> None:
    path.unlink()
    os.link(private, path)


def put_fifo(path: Path, private: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_device(path: Path, private: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("only root makes devices")


def put_huge(path: Path, private: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(10 * 2**30)


def put_bomb(path: Path, private: Path) -> None:
    bombs = {
        ".yaml": BOMB.decode(),
        ".json": "[" * 10**5,
        ".jsonl": "{}\n" * 10**6 + ("[" * 10**5 + "\n") * 3 + '{"step": 1' + "0" * 10**5 + "}\n",
    }
    path.write_text(bombs.get(path.suffix, "PK\x03\x04" + "\x80\x02" * 10**5))


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": put_link,
    "hard link": put_hard_link,
    "fifo": put_fifo,
    "device": put_device,
    "huge": put_huge,
    "bomb": put_bomb,
}


def files_of(run: Path) -> list[str]:
    """Return the files of the run that a stranger can replace; the older checkpoint has the same as the newest."""
    pristine = run / "pristine"
    found = [f"out/{path.relative_to(pristine)}" for path in sorted(pristine.rglob("*")) if path.is_file()]
    return [name for name in found if not name.startswith(OLDER)]


@pytest.mark.parametrize("kind", KINDS)
def test_commands_refuse_strange_files_of_a_run(run: Path, kind: str) -> None:
    failures, names, files = [], list(COMMANDS), files_of(run)
    # Over the kinds, each file meets some commands; make test-all tries more pairs of both.
    offset = list(KINDS).index(kind)
    for number in range(len(files)) if RUNS_ALL else range(offset % 3, len(files), 3):
        start = (3 * number + 5 * offset) % len(names)
        for name in (names[start:] + names[:start])[:: 5 if RUNS_ALL else len(names)]:
            found = faults(run, files[number], kind, name)
            failures += [f"{files[number]} as {kind}, {name}: {fault}" for fault in found]
    assert not failures, "\n\n".join(failures)


def faults(folder: Path, file: str, kind: str, name: str) -> list[str]:
    """Return what is wrong with the answer of a command to a run with a strange file."""
    private, made = folder / "private", ("exported", "modified", "final")
    for path in (folder / "out", *(folder / one for one in made)):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / "pristine", folder / "out")
    KINDS[kind](folder / file, private)
    answer = attempt(folder, COMMANDS[name])
    text = answer.output + answer.errors
    found = []
    if answer.code not in (0, 1, 2):
        found.append(f"exit code {answer.code}")
    found += [
        f"{word} in the output" for word in ("Traceback", "MemoryError", "RecursionError", SECRET) if word in text
    ]
    # Tokens have no structure that a bomb breaks: the data are others, and no file is at fault.
    is_data = kind == "bomb" and file.endswith(".bin")
    if answer.code != ORDINARY_CODES.get(name, 0) and os.path.basename(file) not in text and not is_data:
        found.append("the message does not name the file")
    if private.read_text() != SECRET:
        found.append("the private file was changed")
    for path in folder.rglob("*"):
        status = os.lstat(path)
        is_own = path != private and stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if is_own and status.st_size < 2**24 and SECRET.encode() in path.read_bytes():
            found.append(f"the private file is in {path.relative_to(folder)}")
    return [f"{one}\n{answer.errors[-600:]}" for one in found]
