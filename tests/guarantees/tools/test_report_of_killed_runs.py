"""A run that was killed with SIGKILL and resumed: the report shows the kill, the lost steps and one line that counts."""

import os
import sys
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.tools.report import write_report
from tests.unit.cli.program import PLAIN, PLAIN_MODULE, spawn

KILLING = """

class Killing:
    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 6 and not __import__("os").path.exists("killed"):
            open("killed", "w").close()
            __import__("os").kill(__import__("os").getpid(), 9)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    settings = PLAIN.replace("max_steps: 5", "max_steps: 8").replace("save_steps: 2", "save_steps: 4")
    (tmp_path / "plain.yaml").write_text(settings + "callbacks: [{class_path: plain.Killing}]\n")
    (tmp_path / "plain.py").write_text(PLAIN_MODULE + KILLING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    return tmp_path


def test_report_of_a_killed_and_resumed_run(folder: Path) -> None:
    assert spawn(folder, "train", "plain.yaml").code == -9
    killed = write_report("out").report
    assert killed.state == "killed" and killed.is_over and killed.goodput is not None
    assert main(["train", "plain.yaml"]) == 0
    sys.modules.pop("plain", None)
    report = write_report("out").report
    assert [one.outcome for one in report.attempts] == ["killed", "finished"]
    assert [one.counts_until for one in report.attempts] == [4, 8] and report.attempts[1].first_step == 4
    losses = report.series["loss"]
    assert [one.step for one in losses if one.counts] == list(range(1, 9))
    assert {one.step for one in losses if not one.counts} <= {5, 6}
    assert {"killed", "restart"} <= {event.kind for event in report.events}
    assert report.goodput is not None and report.goodput.repeated > 0 and report.goodput.down >= 0
    page = Path("out", "report.html").read_text()
    assert "done again after a restart" in page and os.path.abspath("out") in page
