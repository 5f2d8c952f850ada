"""A rank that hangs under `forgather train --nproc`: restarts, the message as root cause, and exit code 75."""

import re
import sys
from pathlib import Path

from tests.support.launch import CapturedProcess, kill_leftovers
from tests.support.sampling import long_search
from tests.unit.cli.program import write_tiny_run

STOPPING = """\
import os
import signal
from forgather.ml.trainer.trainer_types import TrainerCallback

class StopsOnRank1(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
"""


@long_search
def test_job_with_a_stopped_rank_restarts_and_ends_with_75(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    (tmp_path / "stopping.py").write_text(STOPPING)
    words = ("train", "tiny.yaml", "--trainer", "ddp", "--nproc", "2", "--max-restarts", "1")
    fault = ("--callbacks+", "{class_path: stopping.StopsOnRank1}", "--args.watch.step_timeout", "6")
    command = [sys.executable, "-m", "forgather.cli.main", *words, *fault]
    process = CapturedProcess(command, {"COLUMNS": "200"}, tmp_path, name="forgather")
    try:
        assert process.wait(150.0) == 75, process.output
    finally:
        kill_leftovers()
    who = r"forgather: rank 1 \(host \S+, pid \d+\)"
    sentence = rf"{who} is stopped \(SIGSTOP\) and has been in a callback for \d+ s; rank 0 waits"
    assert len(re.findall(sentence, process.output)) == 2, process.output
    assert "Restarting (1 of 1)." in process.output
    assert "resumed at step 2" in process.output
