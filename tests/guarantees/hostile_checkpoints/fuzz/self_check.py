"""Self-check of the fuzzer: it must detect children that misbehave on purpose."""

import os
import signal
import time
from collections.abc import Callable

from forgather.ml.checkpoint.errors import CheckpointError
from tests.guarantees.hostile_checkpoints.fuzz import limits
from tests.guarantees.hostile_checkpoints.fuzz.runner import Fuzzer, Result, judge_error

_SHORT_SECONDS = 0.5


def misbehaving_outcomes(fuzzer: Fuzzer) -> dict[str, str]:
    """Return the detected outcome for each kind of misbehaviour, by its expected name."""

    def run(work: Callable[[], Result], seconds: float = limits.WALL_SECONDS) -> str:
        return fuzzer.look_around(fuzzer.in_child(work, seconds)).outcome

    def raising(error: BaseException) -> Callable[[], Result]:
        return lambda: judge_error(error, "optimizer_state.pt", "checkpoint-2")

    return {
        "code ran": run(lambda: _after(lambda: fuzzer.marker.touch())),
        "outside touched": run(lambda: _after(lambda: _touch(fuzzer))),
        "crashed": run(lambda: _after(lambda: os.kill(os.getpid(), signal.SIGSEGV))),
        "hung": run(lambda: _after(lambda: time.sleep(60)), _SHORT_SECONDS),
        "memory": run(lambda: _after(lambda: bytearray(2**30))),
        "wrong error": run(raising(KeyError("step"))),
        "unnamed": run(raising(CheckpointError("restoring failed"))),
        "refused": run(raising(CheckpointError("optimizer_state.pt is damaged"))),
    }


def _after(work: Callable[[], object]) -> Result:
    work()
    return Result("equal")


def _touch(fuzzer: Fuzzer) -> None:
    """Change only the mtime of the sentinel."""
    os.utime(fuzzer.outside / "sentinel.pt", (1, 1))
