"""Self-test: trains, saves, kills and resumes a small model on the CPU, and trains on two ranks.

The work runs in processes of its own (`self_test_job.py`), in a temporary directory that is removed afterwards.
"""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_JOB = "forgather.tools.doctor.self_test_job"
_MOST_SECONDS = 120
_NUM_RANKS = 2
# Variables of a launcher or a Slurm step. The processes of the self-test form jobs of their own.
_OF_LAUNCHERS = ("TORCHELASTIC_", "FORGATHER_", "GROUP_", "ROLE_", "MASTER_", "PET_", "SLURM_")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Check:
    """Result of one part of the self-test."""

    name: str
    passed: bool
    detail: str
    seconds: float


class _CheckFailed(Exception):
    """Part of the self-test that failed; the message says why."""


def self_test(folder: str = os.curdir) -> Iterator[Check]:
    """Run the parts of the self-test in a temporary directory below `folder`; yields each result as soon as it exists.

    The directory is below `folder`, since file systems differ in what the transaction of a save needs.
    """
    with tempfile.TemporaryDirectory(prefix=".forgather-doctor-", dir=os.path.abspath(folder)) as directory:
        started = time.monotonic()
        with contextlib.closing(_Job(directory)) as job:
            yield _checked("train, save, SIGKILL, resume", _check_resume, job, started)
            yield _checked("two ranks with gloo", _check_ranks, job, time.monotonic())


def _checked(name: str, check: Callable[["_Job"], str], job: "_Job", started: float) -> Check:
    try:
        passed, detail = True, check(job)
    except (_CheckFailed, OSError) as error:
        passed, detail = False, str(error)
    return Check(name, passed, detail, time.monotonic() - started)


def _check_resume(job: "_Job") -> str:
    (code,) = job.run("killed")
    if code != -signal.SIGKILL:
        raise _CheckFailed(job.why("killed", 0, code))
    job.require_done("resumed", job.run("resumed"))
    whole, resumed = job.found("whole"), job.found("resumed")
    _require_learned(whole["losses"])
    if resumed["first_step"] == 0:
        raise _CheckFailed("the killed run left no checkpoint to resume from.")
    if resumed["digest"] != whole["digest"]:
        raise _CheckFailed("the resumed run ended with other bits than the uninterrupted one.")
    return f"resumed at step {resumed['first_step']}, the end is equal in every bit"


def _check_ranks(job: "_Job") -> str:
    port = str(_free_port())
    job.require_done("rank", job.run("rank", [_rank_variables(rank, port) for rank in range(_NUM_RANKS)]))
    found = [job.found(f"rank{rank}") for rank in range(_NUM_RANKS)]
    _require_learned(found[0]["losses"])
    if len({one["digest"] for one in found}) > 1:
        raise _CheckFailed("the two ranks ended with different weights.")
    if found[0]["damage"]:
        raise _CheckFailed(f"the checkpoint of two ranks is damaged: {found[0]['damage'][0]}")
    return "both ranks have the same weights, their checkpoint is intact"


def _require_learned(losses: Sequence[float]) -> None:
    if not losses or not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise _CheckFailed(f"the loss did not fall: {', '.join(f'{loss:.4g}' for loss in losses)}.")


class _Job:
    """Process that forks the processes of the self-test (`self_test_job.py`)."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._deadline = time.monotonic() + _MOST_SECONDS
        with open(self._log_path("job", 0), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _JOB, directory],
                cwd=directory,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # A group of its own, which `close` can end as a whole.
                start_new_session=True,
            )

    def run(self, role: str, variables: Sequence[dict[str, str]] = ({},)) -> list[int]:
        """Run one process for each set of variables, all at the same time, and return their exit codes."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):
            # After a broken pipe there is no answer, which is reported below.
            requests.write(json.dumps({"role": role, "variables": variables}).encode() + b"\n")
            requests.flush()
        readable, _, _ = select.select([answers], [], [], max(self._deadline - time.monotonic(), 0))
        if not readable:
            raise _CheckFailed(f"the processes did not end within {_MOST_SECONDS} seconds.")
        answer = answers.readline()
        if not answer:
            raise _CheckFailed(self.why("job", 0, self._process.wait()))
        codes: list[int] = json.loads(answer)
        return codes

    def require_done(self, role: str, codes: Sequence[int]) -> None:
        """Raise an error if a process has failed."""
        for number, code in enumerate(codes):
            if code != 0:
                raise _CheckFailed(self.why(role, number, code))

    def why(self, role: str, number: int, code: int) -> str:
        """Return how a process ended, with the last line that it printed."""
        with open(self._log_path(role, number), encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"a process {ending}: {lines[-1][:300] if lines else 'it printed nothing.'}"

    def found(self, name: str) -> dict[str, Any]:
        """Return what a process has written to its JSON file."""
        with open(os.path.join(self.directory, f"{name}.json"), encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
        return content

    def close(self) -> None:
        """End the process and all that it has forked, also after Ctrl-C and a time limit."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _log_path(self, role: str, number: int) -> str:
        return os.path.join(self.directory, f"{role}{number}.log")


def _environment() -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_RANKS
    }
    paths = filter(None, [own.get("PYTHONPATH"), _source_path()])
    return own | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _source_path() -> str:
    """Return the folder that Forgather was imported from, so that the processes import the same copy.

    It comes last: site-packages also has torch, and other paths of the user may replace it, as in this process.
    """
    return os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["forgather"].__file__ or "")))


def _rank_variables(rank: int, port: str) -> dict[str, str]:
    number, count = str(rank), str(_NUM_RANKS)
    values = (number, number, count, count)
    return dict(zip(_OF_RANKS, values, strict=True)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
