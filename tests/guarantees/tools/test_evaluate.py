"""`forgather evaluate` measures the loss that the run itself measured, whatever trainer saved the checkpoint."""

import json
import os
import shutil
from pathlib import Path

import pytest

from forgather.cli.commands.train import read_configuration
from forgather.cli.work.job import Job
from forgather.cli.work.train import build_trainer
from forgather.config.trainer_kinds import load_trainer
from tests.support.data_parallel import environment
from tests.support.ranks import run_on_ranks
from tests.unit.cli.conftest import process_as_before  # noqa: F401 - undoes the set-up of the command line
from tests.unit.cli.program import call, write_tiny_run

NUM_STEPS = 4
COMMON = (
    *("--model.config.num_hidden_layers", "2", "--args.max_steps", str(NUM_STEPS), "--args.learning_rate", "1e-2"),
    *("--args.eval_steps", "2", "--args.save_steps", "2", "--trainer.default_callbacks", "false"),
)
KINDS = {
    "ddp": (2, ("--args.max_eval_steps", "1", "--args.replica_check_steps", "2")),
    "fsdp2": (2, ()),
    "accelerate": (2, ()),
    "pipeline": (2, ("--args.max_eval_steps", "3")),
    "hybrid": (4, ("--args.pp_size", "2", "--args.max_eval_steps", "2")),
}


def train_on_rank(folder: str, kind: str, words: tuple[str, ...]) -> dict[int, float]:
    """Train as `forgather train` does, on this rank; returns the evaluation losses by step."""
    os.chdir(folder)
    configuration, _ = read_configuration(["tiny.yaml", "--trainer", kind, *COMMON, *words])
    trainer = build_trainer(configuration, load_trainer(kind), Job(environment()))
    trainer.train()
    return {record["step"]: record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_the_loss_of_the_run_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    write_tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    num_ranks, words = KINDS[kind]
    losses = run_on_ranks(train_on_rank, num_ranks, str(tmp_path), kind, words)[0]
    assert list(losses) == [2, 4]
    before = snapshot(tmp_path / "out")
    answer = call(capsys, "evaluate", "out", "--all", "--json")
    assert answer.code == 0, answer.errors
    found = json.loads(answer.output)["checkpoints"]
    assert [one["step"] for one in found] == [2, 4]
    assert [one["loss"] for one in found] == pytest.approx(list(losses.values()), rel=1e-6)
    assert snapshot(tmp_path / "out") == before
    # The tokens of the run are read from its directory; without them, they are not written there.
    shutil.rmtree(tmp_path / "out" / "tokens")
    without_tokens = snapshot(tmp_path / "out")
    answer = call(capsys, "evaluate", "out", "--json")
    assert json.loads(answer.output)["checkpoints"][0]["loss"] == found[1]["loss"]
    assert snapshot(tmp_path / "out") == without_tokens
