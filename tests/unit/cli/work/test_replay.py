"""`forgather samples` and `forgather replay` on a run with a bad document, and on ranks of which one computes wrong."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sampling import long_search
from tests.unit.cli.program import Answer, call, spawn, write_tiny_run

BAD = "text/bad.txt"
SETTINGS = {
    "args.max_steps": "12",
    "args.save_steps": "4",
    "args.save_total_limit": "5",
    "args.learning_rate": "3e-2",
    "args.eval_strategy": "no",
    "data.eval_fraction": "0",
}
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on documents that repeat one sentence, and on one of digits and signs."""
    folder = tmp_path_factory.mktemp("replay")
    write_tiny_run(folder)
    (folder / BAD).write_text("".join(chr(35 + (37 * number * number) % 29) for number in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from forgather.cli.main import main

        assert main(["train", "tiny.yaml", *OPTIONS]) == 0
    return folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(trained)
    yield trained


def in_json(answer: Answer) -> Any:
    assert answer.code == 0, answer.errors
    return json.loads(answer.output)


def bad_step(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[int]]:
    """Return a late step with samples of the bad document and others, and the indices of the bad ones."""
    found = in_json(call(capsys, "samples", "out", "--step", "6", "--to", "12", "--json"))
    assert found["schema"] == "forgather.samples/1"
    for step in range(12, 5, -1):
        samples = [one for one in found["samples"] if one["step"] == step]
        bad = [one["index"] for one in samples if all(part["file"] == BAD for part in one["sources"])]
        if 0 < len(bad) < len(samples):
            return step, bad
    raise AssertionError("no step mixes good and bad samples")


def test_a_bad_document_is_the_worst_sample_and_can_be_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, bad = bad_step(capsys)
    indices = ",".join(map(str, bad))
    report = in_json(call(capsys, "replay", "out", "--step", str(step), "--without", indices, "--json"))
    assert report["schema"] == "forgather.replay/1"
    replayed, without = report["steps"][0], report["steps_without"][0]
    assert replayed["logged"]["is_exact"]
    worst = max(replayed["samples"], key=lambda one: one["loss"])
    assert worst["index"] in bad and worst["source"].startswith(BAD)
    assert replayed["worst_tokens"][0]["index"] in bad
    assert without["loss"] < replayed["loss"]
    # The resumed run without these samples has the loss that the replay has shown.
    shutil.copytree(run / "out", run / "again")
    start = str(run / "out" / "checkpoints" / "checkpoint-4")
    more = ["--args.output_dir", "again", "--args.resume_from_checkpoint", start, "--args.skip_samples", f"[{indices}]"]
    assert call(capsys, "train", "tiny.yaml", *OPTIONS, *more).code == 0
    records = [json.loads(line) for line in (run / "again" / "trainer_logs.jsonl").read_text().splitlines()]
    assert without["loss"] in [one["loss"] for one in records if one["step"] == step and "grad_norm" in one]
    listed = in_json(call(capsys, "samples", "again", "--step", str(step), "--json"))
    assert [one["index"] for one in listed["samples"] if one["is_skipped"]] == bad


def test_people_see_sources_samples_tokens_and_layers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, bad = bad_step(capsys)
    shown = call(capsys, "samples", "out", "--step", str(step), "--text")
    assert shown.code == 0 and f"{BAD}, document 1" in shown.output and str(bad[0]) in shown.output
    answer = call(capsys, "replay", "out", "--step", str(step))
    for part in ("the same bits", f"{BAD}, document 1", "worst tokens", "model.layers.0", "largest activations"):
        assert part in answer.output
    table = call(capsys, "replay", "out", "--step", str(step - 1), "--to", str(step))
    assert table.output.count("the same bits") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["samples", "nowhere", "--step", "1"], "is not a run"),
        (["samples", "tiny.yaml", "--step", "1"], "it is a file"),
        (["samples", "text", "--step", "1"], "has no config.yaml"),
        (["samples", "out", "--step", "0"], "counted from 1"),
        (["samples", "out"], "--step"),
        (["samples", "out", "--step", "13"], "The run ends at step 12"),
        (["samples", "out", "--step", "1", "--to", "1000000"], "at most 10000 steps"),
        (["evaluate", "text"], "is not a checkpoint and has none"),
        (["generate", "text", "--prompt", "x"], "is not a checkpoint and has none"),
        (["generate", "out", "--prompt", "x", "--seed", str(2**64)], "a seed of 64 bits"),
        (["checkpoint", "diff", "out", "out", "--component", "nothing"], "has a component 'nothing'"),
        (["checkpoint", "import", "text", "new"], "not recognised"),
        (["replay", "out", "--step", "5", "--to", "4"], "precedes"),
        (["replay", "out", "--step", "99"], "The run ends at step 12"),
        (["replay", "out", "--step", "5", "--without", "x"], "expected dataset indices"),
        (["replay", "out", "--step", "5", "--without", "99999"], "no sample with the dataset index 99999"),
        (["replay", "out", "--step", "5", "--nproc", "2"], "--each-rank"),
        (["replay", "out", "--step", "5", "--each-rank"], "--nproc"),
    ],
)
def test_mistakes_are_explained_in_one_message(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    answer = call(capsys, *words)
    assert answer.code == 2 and message in " ".join(answer.errors.split())
    assert "Traceback" not in answer.errors


@pytest.mark.parametrize("words", [["evaluate", "RUN"], ["checkpoint", "inspect", "RUN"]])
def test_a_run_with_damaged_checkpoints_only_names_the_command_that_says_why(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    shutil.copytree(run / "out", tmp_path / "damaged")
    for path in tmp_path.glob("damaged/checkpoints/*/model.safetensors"):
        path.unlink()
    answer = call(capsys, *(str(tmp_path / "damaged") if word == "RUN" else word for word in words))
    assert answer.code == 1 and "forgather checkpoint ls" in answer.errors


def test_files_that_are_no_regular_files_do_not_stop_a_report(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(run / "out", tmp_path / "odd")
    for name in ("run_record.jsonl", "config.yaml"):
        (tmp_path / "odd" / name).unlink()
        # Opening a FIFO without a writer waits forever.
        os.mkfifo(tmp_path / "odd" / name)
    report = in_json(call(capsys, "report", str(tmp_path / "odd"), "--json"))
    assert report["source"] == "trainer_logs.jsonl" and "config.yaml" in report["problems"][0]
    answer = call(capsys, "compare", "out", str(tmp_path / "odd"))
    assert answer.code == 0 and "no readable config.yaml" in answer.output


def test_a_damaged_checkpoint_is_reported(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(run / "out", tmp_path / "damaged")
    for path in tmp_path.glob("damaged/checkpoints/*/*dataset*"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    answer = call(capsys, "samples", str(tmp_path / "damaged"), "--step", "9")
    assert answer.code == 1 and "Traceback" not in answer.errors and "dataset" in answer.errors


def test_code_that_a_run_names_is_not_run(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    text = (run / "out" / "config.yaml").read_text()
    (hostile / "config.yaml").write_text(text.replace("class_path: null", "class_path: os.getcwd", 1))
    answer = call(capsys, "replay", str(hostile), "--step", "9")
    assert answer.code == 2 and "model.class_path" in answer.errors and "--config" in answer.errors


def test_help_needs_no_torch(tmp_path: Path) -> None:
    program = "from forgather.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for command in ("samples", "replay"):
        assert spawn(tmp_path, command, "--help", program=program).code == 0


# --- each rank

BROKEN = """\
import os

import torch
from torch import nn

from plain import PlainModel, samples


def flipped(gradient):
    bits = gradient.clone().view(torch.int32)
    bits.view(-1)[0] ^= 1 << 12
    return bits.view(torch.float32)


class Broken(PlainModel):
    def __init__(self):
        super().__init__()
        if os.environ.get("RANK") == os.environ.get("BROKEN_RANK"):
            self.output_decoder.weight.register_hook(flipped)
"""


@long_search
def test_a_rank_that_differs_alone_has_a_bad_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.cli.program import write_plain_run

    write_plain_run(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "plain.yaml").write_text(
        (tmp_path / "plain.yaml").read_text().replace("plain.PlainModel", "broken.Broken")
    )
    # No rank is broken in the run itself: RANK is not set, and BROKEN_RANK is.
    monkeypatch.setenv("BROKEN_RANK", "1")
    assert spawn(tmp_path, "train", "plain.yaml", "--args.save_total_limit", "9").code == 0
    words = ["replay", "out", "--step", "3", "--each-rank", "--nproc", "3", "--config", "plain.yaml", "--json"]
    answer = spawn(tmp_path, *words)
    assert answer.code == 1, answer.errors
    found = json.loads(answer.output)
    assert found["schema"] == "forgather.replay.each_rank/1"
    assert found["different"] == [1] and found["parameters"] == ["output_decoder.weight"]
    assert "bad device" in found["verdict"]
