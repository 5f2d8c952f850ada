"""Ranks that hang without an error: every reachable rank names the culprit, and the job ends with exit code 75.

The faults are real: SIGSTOP, SIGKILL, endless loops, and C code that keeps the GIL. `make watch-faults` tries all of
them with every strategy.
"""

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from forgather.ml.distributed.watch import EXIT_CODE
from tests.support.warm_ranks import EndedRank, run_warm_ranks
from tests.support.watch_job import KINDS

# Long enough for a step on a loaded machine.
LIMIT_SECONDS = 6
SECONDS_TO_END = 60.0
PLACES = {
    "dataset": "loading data",
    "loss": "forward/backward",
    "callback": "a callback",
    "state": "saving",
    "evaluation": "evaluation",
    "earlyjoined": "code outside of training",
}


class Case(NamedTuple):
    """Strategy, fault and faulty rank."""

    kind: str
    fault: str
    rank: int

    @property
    def place(self) -> str:
        return "loading data" if self.fault.endswith("stopworker") else PLACES[self.fault.split("-")[0]]


COMPACT = [
    Case("ddp", "loss-stop", 1),
    Case("ddp", "dataset-loop", 1),
    Case("ddp", "loss-gil", 0),
    Case("ddp", "state-sleep", 1),
    Case("ddp", "earlyjoined-kill", 1),
    Case("fsdp2", "loss-sleep", 0),
    Case("pipeline", "callback-sleep", 0),
    Case("single", "callback-stopworker", 0),
    Case("ddp", "callback-orphan-sleep", 1),
]
EVERYTHING = [
    Case(kind, fault, _rank)
    for kind, _rank in (("ddp", 1), ("fsdp2", 0), ("pipeline", 1), ("hybrid", 3))
    for fault in ("loss-stop", "loss-loop", "loss-gil", "callback-loop", "callback-stop", "state-loop", "state-stop")
] + [
    # One rank of a pipeline reads the data of all.
    Case(kind, f"dataset-{how}", rank)
    for kind, rank in (("ddp", 1), ("fsdp2", 1), ("pipeline", 0), ("hybrid", 0))
    for how in ("loop", "stop", "gil")
]
REQUESTED = os.environ.get("EVERY_WATCH_FAULT", "")
"""1: every case. The name of a strategy: every case of it."""
CASES = [case for case in EVERYTHING if REQUESTED in ("1", case.kind)] or COMPACT
ORPHANS = [Case("ddp", "callback-orphan-sleep", 1), Case("ddp", "callback-orphan-kill", 1)]
"""Ranks that leave processes behind: one is ended by the watch, one is killed."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch")


@pytest.fixture(scope="module")
def jobs(directory: Path) -> dict[Case, list[EndedRank]]:
    """One job for each case, most of them at the same time because they mostly wait."""
    plans = {}
    cases = dict.fromkeys(CASES + ORPHANS)
    for case in cases:
        own = directory / name_of(case)
        own.mkdir(exist_ok=True)
        plans[name_of(case)] = (KINDS[case.kind][1], [str(own), *map(str, case), str(LIMIT_SECONDS)])
    ended = run_warm_ranks("tests.support.watch_job", plans, timeout=150.0 + 15.0 * len(plans))
    return {case: ended[name_of(case)] for case in cases}


def name_of(case: Case) -> str:
    return "_".join(map(str, case))


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=name_of)
def test_every_reachable_rank_names_the_culprit(case: Case, jobs: dict[Case, list[EndedRank]], directory: Path) -> None:
    ranks = jobs[case]
    others = [rank for number, rank in enumerate(ranks) if number != case.rank]
    culprit = ranks[case.rank]
    pattern = rf"rank {case.rank} \(host \S+, pid \d+\) .*{case.place}"
    is_silent = case.fault.endswith(("-stop", "-gil", "-kill"))
    for rank in others if is_silent else ranks:
        # A rank that is killed closes its connections, which the others notice before the watch.
        assert rank.code == (1 if case.fault == "earlyjoined-kill" else EXIT_CODE), rank.output
        assert re.search(pattern, rank.output), rank.output
    if is_silent:
        assert culprit.code == -9
    if case.fault.endswith("-stop"):
        assert "is stopped (SIGSTOP)" in others[0].output
    if case.fault.endswith("-stopworker"):
        assert re.search(r"its worker process \d+ is stopped", culprit.output)
    if others and not case.fault.endswith("-kill"):
        assert re.search(r"; ranks? [\d, ]+ waits? in ", others[0].output), others[0].output
    began = (directory / name_of(case) / "began").stat().st_mtime
    assert max(rank.ended_at for rank in ranks) - began < LIMIT_SECONDS + SECONDS_TO_END


@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case in CASES if case.fault.endswith(("-loop", "-sleep", "-gil")))
)
def test_stacks_of_the_culprit_show_the_loop(case: Case, jobs: dict[Case, list[EndedRank]], directory: Path) -> None:
    (path,) = (directory / name_of(case) / "output" / "watch").iterdir()
    assert path.name == f"rank{case.rank}.txt"
    stacks = path.read_text()
    assert "watch_job.py" in stacks and "in _hang" in stacks
    assert stacks.startswith(f"rank {case.rank} ")


@pytest.mark.parametrize("case", ORPHANS, ids=name_of)
def test_processes_of_the_culprit_end_with_it(case: Case, jobs: dict[Case, list[EndedRank]], directory: Path) -> None:
    pids = [int(line) for line in (directory / name_of(case) / "children").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + SECONDS_TO_END
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, (
            f"{pids} outlive rank {case.rank}, which ended with {jobs[case][case.rank].code}"
        )
        time.sleep(0.1)
