"""`forgather compare`: the first step, checkpoint and tensor that differ between two real runs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.cli.main import main
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from forgather.tools.comparison.runs import RunComparison, compare_runs
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, token_samples
from tests.unit.cli.program import Answer, call, write_plain_run

NAME = "model.layers.1.mlp.up_proj.weight"
SAVES = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1, "max_steps": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `forgather train`: a, the same again, and runs with one other setting."""
    folder = tmp_path_factory.mktemp("runs")
    before = os.getcwd()
    os.chdir(folder)
    try:
        write_plain_run(folder)
        cases: dict[str, list[str]] = {
            "a": [],
            "same": [],
            "longer": ["--args.max_steps", "8"],
            "seed": ["--args.seed", "2"],
            "sparse": ["--args.logging_steps", "2"],
        }
        common = ["--args.lr_scheduler_type", "constant", "--args.save_total_limit", "9"]
        for name, words in cases.items():
            assert main(["train", "plain.yaml", "--args.output_dir", name, *common, *words]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def in_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def compare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    answer = call(capsys, "compare", *words, "--json")
    assert not answer.errors
    return answer.code, json.loads(answer.output)


def test_equal_runs_are_equal_and_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compare(capsys, "a", "same")
    assert code == 0 and found["equal"] and found["schema"] == "forgather.compare/1"
    assert found["settings"] == [], "the names of the directories are no difference"
    assert found["logs"]["equal_until"] == found["logs"]["num_compared"] == 5
    assert found["checkpoints"] == {"equal_steps": [2, 4, 5], "first_different": None}
    answer = call(capsys, "compare", "a", "same")
    assert "equal up to step 5" in answer.output and "equal in all that both have" in answer.output


def test_modified_copy_does_not_hide_the_checkpoint_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("same", "changed")
    assert call(capsys, "checkpoint", "modify", "changed", "--scale", "optimizer.lr=0.5").code == 0
    assert compare(capsys, "a", "changed")[1]["checkpoints"] == {"equal_steps": [2, 4, 5], "first_different": None}


def test_another_seed_differs_from_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compare(capsys, "a", "seed")
    assert code == 1 and not found["equal"]
    assert found["settings"] == [{"key": "args.seed", "first": 1, "second": 2}]
    assert [(one["name"], one["step"]) for one in found["logs"]["differences"][:2]] == [("loss", 1), ("grad_norm", 1)]
    first = found["checkpoints"]["first_different"]
    assert first["step"] == 2
    assert [one["name"] for one in first["shown"][:2]] == ["input_encoder.weight", "layer_stack.0.weight"]
    assert first["shown"][0]["largest"] > 0
    assert "forgather replay a --step 1" in call(capsys, "compare", "a", "seed").output


def test_runs_of_different_lengths_are_compared_where_both_have_steps(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = compare(capsys, "a", "longer")
    assert found["logs"]["last_steps"] == [5, 8] and found["logs"]["differences"] == []
    assert found["checkpoints"]["equal_steps"] == [2, 4] and found["checkpoints"]["first_different"] is None
    answer = call(capsys, "compare", "a", "longer")
    assert "run A was logged up to step 5, run B up to step 8" in answer.output
    assert answer.code == 1 and "different settings, equal results so far" in answer.output


def test_losses_over_other_intervals_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = compare(capsys, "a", "sparse")
    assert found["logs"]["different_intervals"] and found["logs"]["differences"] == []


def changed_log(folder: Path, change: Any) -> None:
    shutil.copytree("a", folder)
    path = folder / "trainer_logs.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def with_loss(line: str, loss: str) -> str:
    before, _, rest = line.partition('"loss": ')
    return f'{before}"loss": {loss}{rest[rest.index(",") :]}'


def test_later_line_of_a_repeated_step_counts(tmp_path: Path) -> None:
    changed_log(tmp_path / "run", lambda lines: [*lines[:1], with_loss(lines[1], "9.5"), *lines[1:]])
    assert compare_runs("a", str(tmp_path / "run")).are_equal
    changed_log(tmp_path / "other", lambda lines: [*lines, with_loss(lines[1], "9.5")])
    first = compare_runs("a", str(tmp_path / "other")).logs.first
    assert first is not None and (first.name, first.step, first.second) == ("loss", 2, 9.5)


def test_hostile_lines_of_a_log_are_skipped(tmp_path: Path) -> None:
    shutil.copytree("a", tmp_path / "run")
    with (tmp_path / "run" / "trainer_logs.jsonl").open("a") as log:
        log.write("[" * 100_000 + "\n" + f'{{"step": 1, "eval_loss": {10**400}}}\n')
    assert compare_runs("a", str(tmp_path / "run")).are_equal


def test_one_bit_of_a_loss_is_a_difference_and_nan_equals_nan(tmp_path: Path) -> None:
    loss = json.loads(Path("a/trainer_logs.jsonl").read_text().splitlines()[2])["loss"]
    neighbour = torch.nextafter(torch.tensor(loss, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)).item()
    changed_log(tmp_path / "bit", lambda lines: [*lines[:2], with_loss(lines[2], repr(neighbour)), *lines[3:]])
    found = compare_runs("a", str(tmp_path / "bit")).logs
    assert found.equal_until == 2 and found.first is not None and found.first.step == 3
    for name in ("nan", "same"):
        changed_log(tmp_path / name, lambda lines: [*lines[:2], with_loss(lines[2], "null"), *lines[3:]])
    assert compare_runs(str(tmp_path / "nan"), str(tmp_path / "same")).are_equal
    first = compare_runs("a", str(tmp_path / "nan")).logs.first
    assert first is not None and (first.step, first.second) == (3, None)


def test_running_runs_and_runs_without_logs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The last line is being written.
    changed_log(tmp_path / "running", lambda lines: [*lines[:3], lines[3][:20]])
    assert compare(capsys, "a", str(tmp_path / "running"))[1]["logs"]["last_compared"] == 3
    changed_log(tmp_path / "silent", lambda lines: [])
    (tmp_path / "silent" / "trainer_logs.jsonl").unlink()
    answer = call(capsys, "compare", "a", str(tmp_path / "silent"))
    assert answer.code == 0 and "not compared: run B has no log" in answer.output


KEPT: dict[str, Any] = {**SAVES, "learning_rate": 0.0, "momentum": 0.9}
"""Settings that keep the initial weights, which are equal in all topologies."""
ONLY_MODEL = {"checkpoint_components": ["model"]}
PIPED = {"n_microbatches": 2, "per_device_train_batch_size": 2, "schedule": "1f1b"}


def train_pairs(folder: str) -> None:
    path, data = Path(folder), token_samples(40)
    trainer_of(DDPTrainer, path / "ddp", llama, data, **KEPT, **ONLY_MODEL).train()
    trainer_of(PipelineTrainer, path / "pipeline", llama, data, **KEPT, **PIPED).train()


def train_hybrid(folder: str) -> None:
    def change(state: Any, trainer: Any, **_: Any) -> None:
        parameters = dict(trainer._named_parameters())
        if state.global_step == 3 and NAME in parameters:
            parameters[NAME].data.view(-1)[5] += 0.5

    recorder, data = Recorder(on_step_end=change), token_samples(40)
    settings = {**KEPT, **PIPED, **ONLY_MODEL, "dp_size": 2, "pp_size": 2}
    trainer_of(HybridTrainer, Path(folder) / "hybrid", llama, data, recorder, **settings).train()


def test_runs_of_different_topologies_are_compared_by_name(tmp_path: Path) -> None:
    run_on_ranks(train_pairs, 2, str(tmp_path))
    run_on_ranks(train_hybrid, 4, str(tmp_path))
    trainer_of(Trainer, tmp_path / "single", llama, token_samples(40), **KEPT, per_device_train_batch_size=2).train()

    def compared(name: str) -> RunComparison:
        return compare_runs(str(tmp_path / "single"), str(tmp_path / name))

    assert compared("ddp").settings is None, "runs that were started from Python have no config.yaml"
    assert compared("ddp").equal_checkpoints == (2, 4) and compared("ddp").checkpoint is None
    found = compared("hybrid")
    assert found.equal_checkpoints == (2,) and found.checkpoint is not None
    assert (found.checkpoint.step, found.checkpoint.num_different) == (4, 1)
    (changed,) = found.checkpoint.shown
    assert (changed.component, changed.name, changed.largest) == ("model", NAME, pytest.approx(0.5))
    # The stages add gradients in another order. Both runs have the same names, and no moment is far from the other.
    difference = compared("pipeline").checkpoint
    shown = () if difference is None else difference.shown
    assert all("missing" not in one.what and one.largest is not None and one.largest < 1e-5 for one in shown), shown


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("nowhere", 2, "there is no such directory"),
        ("plain.yaml", 2, "it is a file"),
        ("empty", 2, "it has neither trainer_logs.jsonl nor complete checkpoints"),
        ("damaged", 1, "is damaged"),
        ("truncated", 1, "cannot be compared: optimizer_state.pt (component 'optimizer') should have"),
    ],
)
def test_wrong_paths_and_damage_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, code: int, told: str
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree("a", tmp_path / "damaged")
    state = tmp_path / "damaged" / "checkpoints" / "checkpoint-2" / "optimizer_state.pt"
    state.write_bytes(bytes(state.stat().st_size))
    # A checkpoint that is skipped must not make the runs equal.
    shutil.copytree("a", tmp_path / "truncated")
    os.truncate(tmp_path / "truncated" / "checkpoints" / "checkpoint-4" / "optimizer_state.pt", 100)
    given = path if path in ("nowhere", "plain.yaml") else str(tmp_path / path)
    answer: Answer = call(capsys, "compare", "a", given)
    assert answer.code == code and told in answer.errors and "Traceback" not in answer.errors
    assert answer.output == ""


def test_text_of_files_does_not_reach_the_terminal_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("a", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1", 'seed: "[red]\\e[2J"'))
    answer = call(capsys, "compare", "a", str(tmp_path / "run"))
    assert answer.code == 1 and "\x1b" not in answer.output and "[red]" in answer.output
