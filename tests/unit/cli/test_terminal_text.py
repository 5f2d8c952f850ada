"""Control characters of files, peers and models never reach the terminal, whichever way they come."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forgather._control import messages
from forgather._control.server import Server
from tests.unit.cli.program import PLAIN, PLAIN_MODULE, Answer, spawn, write_plain_run

HOSTILE = "\x1b[2J\x9b31m\x07fake"
RESPONSES: dict[str, dict[str, Any]] = {
    "save": {"step": 1, "checkpoint": HOSTILE},
    "evaluate": {"step": 1, "metrics": {HOSTILE: HOSTILE}},
    "stop": {"step": 1, "checkpoint": HOSTILE},
    "abort": {"step": 1, "checkpoint": HOSTILE},
    "set": {"step": 1, "changed": {HOSTILE: [HOSTILE, HOSTILE]}},
    "stacks": {"stacks": {"0": HOSTILE}},
    "status": {
        **dict.fromkeys(("output_dir", "trainer", "host", "phase", "checkpoint"), HOSTILE),
        "pid": 1,
        "world_size": 2,
        "uptime": 1.0,
        "step": 1,
        "max_steps": 2,
        "epoch": 0.5,
        "num_epochs": 1.0,
        "seconds_since_step": 1.0,
        "background_save": True,
        "ranks": [
            {"rank": rank, "host": HOSTILE, "pid": 1, "step": 1, "phase": HOSTILE, "stopped": False} for rank in (0, 1)
        ],
    },
}
SPEAKING = """

import logging
import threading
import warnings


class SpeakingModel(PlainModel):
    def __init__(self):
        super().__init__()
        text = "\\x1b[2J\\x9b31m\\x07"
        logging.getLogger("forgather.tests").info(f"{text} from logging")
        warnings.warn(f"{text} from warnings")
        raise RuntimeError(f"{text} from an error")
"""


def check(answer: Answer, *expected: str) -> None:
    for text in (answer.output, answer.errors):
        assert not {"\x1b", "\x9b", "\x07"} & set(text), text
    for one in expected:
        assert one in answer.output + answer.errors


@pytest.fixture
def hostile_job(tmp_path: Path) -> Iterator[Path]:
    """Directory of a job that answers each request with escape sequences."""
    ready = threading.Event()

    def answer(request: messages.Request, client: int) -> None:
        ready.wait()
        refused = request.values.get("refused")
        server.send(client, messages.failure(messages.REFUSED, HOSTILE) if refused else success(request.command))

    def success(command: str) -> bytes:
        return messages.success(RESPONSES[command])

    server = Server(str(tmp_path), answer, lambda now: None)
    ready.set()
    yield tmp_path
    server.close()


@pytest.mark.parametrize("request_words", [["set", "a=1"], *([name] for name in RESPONSES if name != "set")])
def test_answers_of_a_job(hostile_job: Path, request_words: list[str]) -> None:
    answer = spawn(hostile_job, "control", ".", *request_words)
    assert answer.code == 0, answer.errors
    check(answer, "fake")


def test_refusal_of_a_job(hostile_job: Path) -> None:
    check(spawn(hostile_job, "control", ".", "set", "refused=1"), "fake")


def test_log_messages_warnings_and_tracebacks(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text(PLAIN.replace("plain.PlainModel", "plain.SpeakingModel"))
    (tmp_path / "plain.py").write_text(PLAIN_MODULE + SPEAKING)
    answer = spawn(tmp_path, "train", "plain.yaml", "--debug")
    assert answer.code == 1
    check(answer, "from logging", "from warnings", "Traceback", "RuntimeError: \N{SYMBOL FOR ESCAPE}[2J")


def test_resume_that_quotes_a_failure(tmp_path: Path) -> None:
    write_plain_run(tmp_path)
    assert spawn(tmp_path, "train", "plain.yaml").code == 0
    note = {
        **dict.fromkeys(("attempt", "host", "error_type", "message", "fingerprint"), HOSTILE),
        "time": "2030",
        "step": 9,
        "rank": 0,
        "resumed_from": None,
    }
    (tmp_path / "out" / "failures.jsonl").write_text(json.dumps(note) + "\n")
    answer = spawn(tmp_path, "train", "plain.yaml", "--args.max_steps", "6")
    assert answer.code == 0
    check(answer, "The last attempt failed: ", "fake at step 9")
