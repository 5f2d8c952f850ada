"""`forgather checkpoint` on real checkpoints of every trainer, intact and damaged."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, read_manifest
from forgather.ml.trainer.elastic.failure_notes import failure_of, note_failure
from forgather.tools.checkpoints import compare_checkpoints, inspect_checkpoint, modify_checkpoint
from forgather.tools.checkpoints.verification import verify_checkpoints
from tests.unit.cli.program import Answer, call
from tests.unit.tools.checkpoints.runs import KINDS

Capture = pytest.CaptureFixture[str]
Runs = Callable[[str], Path]
OTHERS = [name for name in KINDS if name != "single"]


def checkpoint(capsys: Capture, *words: object) -> Answer:
    return call(capsys, "checkpoint", *map(str, words))


def parsed(capsys: Capture, *words: object) -> Any:
    answer = checkpoint(capsys, *words, "--json")
    return json.loads(answer.output)


def last(run: Path) -> Path:
    return run / "checkpoints" / "checkpoint-2"


def flip(path: Path, offset: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


# --- every trainer


@pytest.mark.parametrize("name", OTHERS)
def test_weights_and_moments_of_every_trainer_compare_by_name(runs: Runs, name: str) -> None:
    found = compare_checkpoints(str(runs("single")), str(runs(name)), ["model", "optimizer"])
    assert found.num_tensors > 100 and not found.values
    assert all(one.kind == "values" and one.change is not None and one.change.change < 1e-5 for one in found.tensors)
    assert found.tensors, "sums in another order differ in some bits"


@pytest.mark.parametrize("name", KINDS)
def test_inspect_lists_weights_and_moments_of_every_trainer(runs: Runs, name: str) -> None:
    details = inspect_checkpoint(str(runs(name)), tensors=True)
    assert details.summary.world_size == KINDS[name].num_ranks
    assert details.summary.trainer == KINDS[name].trainer_class.__name__
    tensors = {(one.component, one.name): one for one in details.tensors or ()}
    assert tensors["model", "transformer.wte.weight"].dtype == "float32"
    assert tensors["optimizer", "transformer.wte.weight.exp_avg"].shape == (32, 16)


@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_of_every_trainer_verify(capsys: Capture, runs: Runs, name: str) -> None:
    answer = checkpoint(capsys, "verify", runs(name), "--all")
    assert answer.code == 0 and answer.output.count("intact") == 2 and "GB/s" in answer.output


def test_export_of_a_hybrid_run_loads_with_transformers(capsys: Capture, runs: Runs, tmp_path: Path) -> None:
    assert checkpoint(capsys, "export", runs("hybrid"), tmp_path / "model").code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    single = AutoModelForCausalLM.from_pretrained(last(runs("single")))
    torch.testing.assert_close(model.state_dict(), single.state_dict())


# --- ls


def test_ls_marks_newest_best_and_the_checkpoint_before_a_failure(capsys: Capture, run: Path) -> None:
    for step, loss in ((1, 2.5), (2, 3.5)):
        (run / "checkpoints" / f"checkpoint-{step}" / "eval_metrics.json").write_text(f'{{"eval_loss": {loss}}}')
    progress = {"attempt": "a", "step": 7, "resumed_from": None}
    note_failure(str(run), failure_of(progress, 1, "OSError", "the disk is \x1b[31mfull"))
    first, second = parsed(capsys, "ls", run)["checkpoints"]
    assert (first["best_rank"], second["best_rank"]) == (1, None)
    assert (first["is_newest"], second["is_newest"]) == (False, True)
    assert second["failures"][0]["step"] == 7 and not first["failures"]
    answer = checkpoint(capsys, "ls", run)
    assert "newest; died once after it: OSError at step 7 on rank 1" in answer.output
    assert "best (eval_loss)" in answer.output


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/checkpoint-2"])
def test_ls_accepts_the_output_directory_its_folder_and_one_checkpoint(capsys: Capture, run: Path, place: str) -> None:
    found = parsed(capsys, "ls", run / place)["checkpoints"]
    assert [one["step"] for one in found] == ([2] if place.endswith("2") else [1, 2])
    assert found[-1]["is_newest"] and found[-1]["trainer"] == "Trainer" and found[-1]["size_bytes"] > 10_000


def test_ls_shows_the_flat_layout(capsys: Capture, run: Path, tmp_path: Path) -> None:
    flat = shutil.move(run / "checkpoints", tmp_path / "flat")
    assert [one["step"] for one in parsed(capsys, "ls", flat)["checkpoints"]] == [1, 2]


def test_ls_says_why_a_directory_is_no_complete_checkpoint(capsys: Capture, run: Path) -> None:
    root = run / "checkpoints"
    for name in ("checkpoint-3", "checkpoint-4", "checkpoint-5", ".tmp-checkpoint-6-0123456789ab"):
        shutil.copytree(last(run), root / name)
    (root / "checkpoint-3" / "model.safetensors").unlink()
    (root / "checkpoint-4" / "model.safetensors").write_bytes(b"short")
    (root / "checkpoint-5" / MANIFEST_NAME).unlink()
    (root / "checkpoint-7").mkdir()
    (root / "checkpoint-7" / "trainer_state.json").write_text("{}")
    os.symlink(last(run), root / "checkpoint-8")
    shutil.copytree(last(run), root / "checkpoint-9")
    (root / "checkpoint-9" / MANIFEST_NAME).write_text("[]")
    found = {one["name"]: one for one in parsed(capsys, "ls", os.path.relpath(run))["checkpoints"]}
    assert found["checkpoint-9"]["reason"].startswith(f"{MANIFEST_NAME} is damaged")
    assert "model.safetensors (component 'model')" in found["checkpoint-3"]["reason"]
    assert "is missing" in found["checkpoint-3"]["reason"] and "has 5" in found["checkpoint-4"]["reason"]
    assert f"{MANIFEST_NAME} is missing" in found["checkpoint-5"]["reason"]
    assert found[".tmp-checkpoint-6-0123456789ab"]["status"] == "temporary"
    assert found["checkpoint-7"]["status"] == "foreign" and "transformers" in found["checkpoint-7"]["reason"]
    assert found["checkpoint-8"]["status"] == "link"
    assert [name for name, one in found.items() if one["is_newest"]] == ["checkpoint-2"]


# --- verify


def test_verify_names_every_damaged_file(capsys: Capture, run: Path) -> None:
    flip(last(run) / "model.safetensors")
    (last(run) / "trainer_state.pt").write_bytes(b"")
    answer = checkpoint(capsys, "verify", run, "--all")
    assert answer.code == 1
    assert "model.safetensors is damaged" in answer.output and "trainer_state.pt is damaged" in answer.output
    assert "intact     " + str(run / "checkpoints" / "checkpoint-1") in answer.output
    verdicts = parsed(capsys, "verify", last(run))
    assert not verdicts["intact"] and len(verdicts["checkpoints"][0]["problems"]) == 2


def test_verify_of_a_run_names_a_damaged_checkpoint_after_the_newest_complete_one(capsys: Capture, run: Path) -> None:
    (last(run) / MANIFEST_NAME).write_text("[]")
    answer = checkpoint(capsys, "verify", os.path.relpath(run))
    assert answer.code == 1 and "intact     " in answer.output and "DAMAGED    " in answer.output
    assert f"           {MANIFEST_NAME} is damaged" in answer.output


# --- checkpoints that a job deletes or replaces meanwhile

DELETE = "import sys; from forgather.ml.checkpoint import store; store.delete_checkpoint(sys.argv[1])"
REPLACE = """
import os, shutil, sys
from forgather.ml.checkpoint.store import Transaction, new_attempt
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, read_manifest
saved, replaced = sys.argv[1:]
transaction = Transaction(replaced, new_attempt())
shutil.copytree(saved, transaction.temporary_path)
os.remove(transaction.path_of(MANIFEST_NAME))
transaction.commit(read_manifest(saved))
"""
ROTATE = """
import os, shutil, sys
from forgather.ml.checkpoint import store
saved, folder = sys.argv[1:]
while True:
    for number in range(10, 16):
        path = os.path.join(folder, f"checkpoint-{number}")
        if os.path.isdir(path):
            store.delete_checkpoint(path)
        temporary = store.Transaction(path, store.new_attempt()).temporary_path
        shutil.copytree(saved, temporary)
        os.rename(temporary, path)
        print(number, flush=True)
"""


def in_another_process(program: str, *words: object) -> Callable[[int], None]:
    """Return a function that runs the program once, at its first call."""
    done: list[int] = []
    lock = threading.Lock()

    def run_once(_: int) -> None:
        with lock:
            if not done:
                done.append(subprocess.run([sys.executable, "-c", program, *map(str, words)], check=True).returncode)

    return run_once


def test_verify_does_not_call_a_deleted_checkpoint_damaged(run: Path) -> None:
    first, second = (str(run / "checkpoints" / f"checkpoint-{step}") for step in (1, 2))
    result = verify_checkpoints([second, first], in_another_process(DELETE, second))
    assert (list(result.gone), [one.path for one in result.checkpoints]) == ([second], [first])
    assert result.is_intact
    nothing = verify_checkpoints([second])
    assert nothing.gone == [second] and not nothing.is_intact


def test_verify_reads_a_replaced_checkpoint_again(run: Path) -> None:
    first, second = run / "checkpoints" / "checkpoint-1", last(run)
    result = verify_checkpoints([str(second)], in_another_process(REPLACE, first, second))
    assert result.is_intact and not result.gone and len(result.checkpoints) == 1
    assert read_manifest(str(second)).step == 1


def test_commands_see_no_damage_while_a_job_rotates_its_checkpoints(capsys: Capture, run: Path) -> None:
    folder, statuses = run / "checkpoints", set()
    shutil.copytree(last(run), run / "saved")
    shutil.rmtree(folder / "checkpoint-1")
    with subprocess.Popen(
        [sys.executable, "-c", ROTATE, run / "saved", folder], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline()
        try:
            for _ in range(60):
                statuses |= {one["status"] for one in parsed(capsys, "ls", run)["checkpoints"]}
            for _ in range(20):
                answer = checkpoint(capsys, "verify", run, "--all")
                assert answer.code == 0 and "DAMAGED" not in answer.output and "intact" in answer.output
            assert job.poll() is None
        finally:
            job.kill()
    assert statuses <= {"complete", "temporary"}


def test_verify_of_a_deleted_checkpoint_is_a_usage_error(capsys: Capture, run: Path) -> None:
    shutil.copytree(last(run), run / "saved")
    path = run / "checkpoints" / "checkpoint-12"
    with subprocess.Popen(
        [sys.executable, "-c", ROTATE, run / "saved", run / "checkpoints"], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline()
        try:
            for command in ("verify", "ls") * 100:
                answer = checkpoint(capsys, command, path)
                assert answer.code in (0, 2) and "damaged" not in answer.output.lower(), answer
            assert job.poll() is None
        finally:
            job.kill()


def test_verify_accepts_edited_metrics_and_missing_optional_files(capsys: Capture, run: Path) -> None:
    (last(run) / "rng_state_rank_0.pt").unlink()
    answer = checkpoint(capsys, "verify", run)
    assert answer.code == 0 and "rng_state_rank_0.pt is missing; a resume starts this part fresh" in answer.output


# --- diff


def test_a_copy_is_equal_and_a_later_step_is_different(capsys: Capture, run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(last(run), tmp_path / "copy")
    answer = checkpoint(capsys, "diff", run, copied)
    assert answer.code == 0 and "equal" in answer.output
    found = parsed(capsys, "diff", run / "checkpoints" / "checkpoint-1", run)
    assert not found["equal"]
    changes = [one["change"]["change"] for one in found["tensors"] if one["change"]]
    assert changes == sorted(changes, reverse=True) and changes[0] > 0.1
    assert {"model", "optimizer"} <= {one["component"] for one in found["layers"]}
    assert "transformer.h.0" in {one["layer"] for one in found["layers"]}
    assert ("trainer", "state.global_step", 1, 2) in {
        (one["component"], one["name"], *map(_hashable, (one["a"], one["b"]))) for one in found["values"]
    }
    answer = checkpoint(capsys, "diff", run / "checkpoints" / "checkpoint-1", run, "--top", 2, "--component", "model")
    assert answer.code == 1 and "optimizer" not in answer.output and "more; --top" in answer.output


def _hashable(value: object) -> object:
    return str(value) if isinstance(value, list) else value


def test_diff_refuses_damaged_weights(capsys: Capture, run: Path) -> None:
    flip(last(run) / "model.safetensors")
    answer = checkpoint(capsys, "diff", run / "checkpoints" / "checkpoint-1", run)
    assert answer.code == 1 and "model.safetensors is damaged" in answer.errors


# --- modify


def test_modified_checkpoint_in_a_missing_directory_is_refused(capsys: Capture, run: Path, tmp_path: Path) -> None:
    words = ("--set", "optimizer.lr=0.5", "--output", tmp_path / "nowhere" / "new")
    answer = checkpoint(capsys, "modify", last(run), *words)
    assert answer.code == 2 and f"there is no directory {tmp_path / 'nowhere'}" in " ".join(answer.errors.split())
    assert not (tmp_path / "nowhere").exists()


def test_modified_checkpoint_verifies_and_keeps_the_original(capsys: Capture, run: Path) -> None:
    before = {path.name: path.read_bytes() for path in last(run).iterdir()}
    answer = checkpoint(capsys, "modify", run, "--scale", "optimizer.lr=0.5", "--drop", "dataset")
    assert answer.code == 0 and "newest checkpoint" in answer.output
    assert {path.name: path.read_bytes() for path in last(run).iterdir()} == before
    modified = Path(f"{last(run)}-modified")
    assert checkpoint(capsys, "verify", modified).code == 0
    state = read_state(str(modified / "optimizer_state.pt"))
    assert state["param_groups"][0]["initial_lr"] == 1.5e-3 and state["initial_options"][0]["lr"] == 3e-3
    assert set(read_state(str(modified / "scheduler_state.pt"))["base_lrs"]) == {1.5e-3}
    found = parsed(capsys, "diff", run / "checkpoints" / "checkpoint-2", modified)
    assert not found["tensors"] and {one["component"] for one in found["values"]} == {
        "optimizer",
        "scheduler",
        "dataset",
    }
    assert parsed(capsys, "ls", run)["checkpoints"][-1]["name"] == "checkpoint-2-modified"


def test_large_files_become_hard_links_and_small_ones_copies(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forgather.tools.checkpoints.modification._LINKED_FROM", 10_000)
    result = modify_checkpoint(str(run), str(tmp_path / "new"), scales=[("optimizer.lr", "2")])
    assert os.path.samefile(last(run) / "model.safetensors", tmp_path / "new" / "model.safetensors")
    assert not os.path.samefile(last(run) / "config.json", tmp_path / "new" / "config.json")
    assert result.linked_bytes > 10_000 and not result.is_auto_resumed


def test_damaged_original_is_refused_and_nothing_is_written(capsys: Capture, run: Path) -> None:
    flip(last(run) / "model.safetensors")
    answer = checkpoint(capsys, "modify", last(run), "--scale", "optimizer.lr=0.5")
    assert answer.code == 1 and "nothing was written" in answer.errors
    assert sorted(os.listdir(run / "checkpoints")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "optimizer.lrr=1"], "Did you mean 'lr'?"),
        (["--set", "optimizer.lr=fast"], "expected float"),
        (["--set", "trainer.state.global_step=1.5"], "expected int"),
        (["--set", "trainer.state.globalstep=1"], "Did you mean 'global_step'?"),
        (["--set", "args.max_steps=7"], "has no config.yaml"),
        (["--scale", "optimizer.lr=nan"], "must be finite"),
        (["--scale", "optimizer.lr=-1"], "must not be negative"),
        (["--set", "optimizer.lr=1e999"], "must be finite"),
        (["--set", "optimizer.weight_decay=.nan"], "must be finite"),
        (["--scale", "trainer.best_model_checkpoint=2"], "cannot be scaled"),
        (["--drop", "model"], "a resume needs it"),
        (["--drop", "nothing"], "has no component 'nothing'"),
        ([], "Nothing to change"),
    ],
)
def test_changes_that_do_not_fit_are_refused(capsys: Capture, run: Path, words: list[str], message: str) -> None:
    answer = checkpoint(capsys, "modify", last(run), *words)
    assert answer.code == 2 and message in answer.errors and "Traceback" not in answer.errors
    assert sorted(os.listdir(run / "checkpoints")) == ["checkpoint-1", "checkpoint-2"]


# --- hostile input

ONE_PATH = ("ls", "inspect", "verify")
COMMANDS: list[list[str]] = [
    *([name, "PATH"] for name in ONE_PATH),
    ["diff", "PATH", "PATH"],
    ["export", "PATH", "OUT"],
    ["modify", "PATH", "--scale", "optimizer.lr=1"],
    ["import", "PATH", "OUT"],
]
EVERY_COMMAND = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])


def on(words: list[str], path: Path, out: Path) -> list[object]:
    return [{"PATH": path, "OUT": out}.get(word, word) for word in words]


def assert_refused(answer: Answer, codes: tuple[int, ...]) -> None:
    assert answer.code in codes
    message = (answer.errors + answer.output).replace("(forgather --debug ... shows the traceback)", "")
    assert "Traceback" not in message and "\x1b" not in message
    assert message.strip()


@EVERY_COMMAND
def test_wrong_paths_are_usage_errors(capsys: Capture, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("text")
    for name in ("nothing", "file"):
        assert_refused(checkpoint(capsys, *on(words, tmp_path / name, tmp_path / "out")), (2,))


@EVERY_COMMAND
@pytest.mark.parametrize("damage", ["no manifest", "huge manifest", "wrong manifest", "link", "missing weights"])
def test_damaged_checkpoints_give_one_clear_message(
    capsys: Capture, run: Path, tmp_path: Path, words: list[str], damage: str
) -> None:
    path = last(run)
    if damage == "no manifest":
        (path / MANIFEST_NAME).unlink()
    elif damage == "huge manifest":
        with open(path / MANIFEST_NAME, "wb") as file:
            file.truncate(2**27)
    elif damage == "wrong manifest":
        (path / MANIFEST_NAME).write_text('{"format_version": 1, "\x1b[31m": "\x1b[2J"}')
    else:
        (path / "model.safetensors").unlink()
        if damage == "link":
            os.symlink("/etc/passwd", path / "model.safetensors")
    # `ls` describes damage, all others fail.
    assert_refused(checkpoint(capsys, *on(words, path, tmp_path / "new")), (0,) if words[0] == "ls" else (1, 2))
    assert not (tmp_path / "new" / "model.safetensors").exists()


def test_control_characters_of_a_file_never_reach_the_terminal(capsys: Capture, run: Path) -> None:
    folder = run / "checkpoints" / "checkpoint-\x1b[31m9\nfake row"
    shutil.copytree(last(run), folder)
    answer = checkpoint(capsys, "ls", run)
    assert answer.code == 0 and "\x1b" not in answer.output and "9\N{SYMBOL FOR LINE FEED}fake row" in answer.output


@pytest.mark.parametrize("name", [words[0] for words in COMMANDS])
def test_help_is_printed(capsys: Capture, name: str) -> None:
    answer = checkpoint(capsys, name, "--help")
    assert answer.code == 0 and f"forgather checkpoint {name}" in answer.output and "--json" in answer.output
