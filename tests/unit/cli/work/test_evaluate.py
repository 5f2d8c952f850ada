"""`forgather evaluate` on checkpoints of `forgather train`."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.unit.cli.program import Answer, call, write_plain_run, write_tiny_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once with averaged weights, on text files."""
    from forgather.cli.main import main

    folder = tmp_path_factory.mktemp("evaluate")
    write_tiny_run(folder)
    write_plain_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["--args.ema_decay", "0.5", "--args.eval_ema", "true", "--args.learning_rate", "1e-2"]
        words += ["--args.eval_steps", "2", "--args.max_steps", "4"]
        assert main(["train", "tiny.yaml", *words]) == 0
        assert main(["train", "plain.yaml", "--args.output_dir", "plain_out"]) == 0
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def losses(folder: Path, key: str = "eval_loss", run: str = "out") -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / run / "trainer_logs.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, float]]:
    answer = call(capsys, "evaluate", *words, "--json")
    assert answer.code == 0, answer.errors
    document = json.loads(answer.output)
    assert document["schema"] == "forgather.evaluate/1"
    found: list[dict[str, float]] = document["checkpoints"]
    return found


def refused(answer: Answer, message: str, code: int = 2) -> None:
    assert answer.code == code
    assert message in " ".join(answer.errors.split())
    assert "Traceback" not in answer.errors


def test_loss_of_a_configuration_and_of_a_directory_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (by_file,) = evaluated(capsys, "tiny.yaml")
    (by_directory,) = evaluated(capsys, "out")
    assert by_file["loss"] == by_directory["loss"] == losses(folder)[4]
    assert by_file["perplexity"] == math.exp(by_file["loss"])
    assert by_file["num_samples"] > 0 and by_file["num_tokens"] > by_file["num_samples"]


def test_averaged_weights_have_the_loss_that_the_run_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = evaluated(capsys, "out", "--ema")
    assert found["loss"] == pytest.approx(losses(folder, "eval_ema_loss")[4], rel=1e-6)
    assert found["loss"] != losses(folder)[4] and found["averaged"] is True


def test_several_checkpoints_make_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["out/checkpoints/checkpoint-4", "out/checkpoints/checkpoint-2"]
    answer = call(capsys, "evaluate", "tiny.yaml", "--checkpoint", *paths)
    lines = answer.output.splitlines()
    assert lines[0].split() == ["step", "loss", "perplexity", "samples", "tokens", "checkpoint"]
    assert [line.split()[0] for line in lines[1:]] == ["4", "2"]
    assert f"{losses(folder)[2]:.6f}" in lines[2]


def test_keys_of_the_configuration_can_be_overridden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = evaluated(capsys, "out", "--args.max_eval_steps", "1", "--args.per_device_eval_batch_size=2")
    assert found["num_samples"] == 2
    (found,) = evaluated(capsys, "out", "--data.eval_files", "text/1.txt")
    assert found["num_tokens"] < 200


def test_stored_configuration_that_names_code_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "evaluate", "plain_out")
    refused(answer, "sets data.class_path, model.class_path, and using it would run code that the checkpoint names.")
    (found,) = evaluated(capsys, "plain_out/config.yaml")
    assert found["loss"] == losses(folder, run="plain_out")[5]


def test_one_damaged_checkpoint_does_not_stop_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("out/checkpoints/checkpoint-4", tmp_path / "checkpoint-4")
    weights = tmp_path / "checkpoint-4" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    good = "out/checkpoints/checkpoint-2"
    answer = call(capsys, "evaluate", "tiny.yaml", "--checkpoint", str(tmp_path / "checkpoint-4"), good, "--json")
    damaged, fine = json.loads(answer.output)["checkpoints"]
    assert answer.code == 1 and "error" in damaged and fine["step"] == 2
    refused(call(capsys, "evaluate", "tiny.yaml", "--checkpoint", str(tmp_path / "checkpoint-4")), "checksum", 1)


def test_wrong_usage_is_one_clear_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(call(capsys, "evaluate"), "the following arguments are required: PATH")
    refused(call(capsys, "evaluate", "nowhere"), "'nowhere' is not a checkpoint: there is no such directory")
    refused(
        call(capsys, "evaluate", "out", "--all", "--checkpoint", "out"), "--all and --checkpoint cannot be combined"
    )
    refused(call(capsys, "evaluate", "out", "--args.max_eval_step", "1"), "Did you mean '--args.max_eval_steps'?")
    refused(call(capsys, "evaluate", "out", "--model.config.hidden_size", "8"), "give the configuration file instead")
    refused(call(capsys, "evaluate", "out", "--data.files", "no/*.txt"), "No file matches 'no/*.txt'")
    refused(call(capsys, "evaluate", "tiny.yaml", "--args.output_dir", str(tmp_path)), "no complete checkpoint")
