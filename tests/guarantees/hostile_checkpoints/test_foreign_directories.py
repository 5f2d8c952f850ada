"""Foreign files and directories are never emptied, replaced or deleted."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointSaveError
from forgather.ml.checkpoint.foreign.ownership import Owner, owner_of
from forgather.ml.checkpoint.manifest import MANIFEST_NAME
from forgather.ml.checkpoint.output_lock import LOCK_FILE_NAME, OutputDirLock
from tests.support.faults.hostile import trained, trainer_in
from tests.support.tiny_models import saved_steps


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the lock file


def test_symlinked_lock_file_leaves_its_target_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE_NAME).symlink_to(precious)
    with pytest.raises(OSError, match="Cannot lock the output directory"):
        OutputDirLock(tmp_path / "run").acquire()
    with pytest.raises((OSError, CheckpointError), match="lock the output directory"):
        trainer_in(tmp_path / "run").train()
    assert precious.read_text() == "content"


@pytest.mark.parametrize("kind", ["hard link", "other content", "fifo", "directory"])
def test_foreign_lock_file_is_left_alone(kind: str, tmp_path: Path) -> None:
    precious, lock = tmp_path / "precious", tmp_path / LOCK_FILE_NAME
    precious.write_text("content")
    if kind == "hard link":
        os.link(precious, lock)
    elif kind == "other content":
        lock.write_text("content")
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(OSError, match="Cannot lock"):
        OutputDirLock(tmp_path).acquire()
    assert precious.read_text() == "content"
    assert kind != "other content" or lock.read_text() == "content"


# --- links in place of checkpoints


def test_recovery_does_not_follow_symlinks(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / ".checkpoint_manifest.json-01234567").write_text("mine")
    (target / MANIFEST_NAME).write_text("{}")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "checkpoint-1").symlink_to(target)
    (folder / ".tmp-checkpoint-2-0123456789ab").symlink_to(target)
    before = content_of(target)
    assert store.recover(str(folder)) == []
    assert content_of(target) == before
    assert store.find_checkpoints(str(folder)) == []


def test_recovery_cleans_only_forgather_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / ".notes.txt-01234567").write_text("mine")
    assert store.recover(str(tmp_path)) == []
    assert (folder / ".notes.txt-01234567").exists()


def test_symlinked_checkpoint_stops_the_start(tmp_path: Path) -> None:
    target = trained(tmp_path / "other")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "checkpoint-4").symlink_to(target)
    before = content_of(target)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is a symbolic link.*Move it elsewhere"):
        trainer_in(tmp_path / "run").train()
    assert content_of(target) == before


def test_deletion_does_not_follow_symlinks(tmp_path: Path) -> None:
    target = trained(tmp_path / "other")
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(CheckpointError, match="not deleted"):
        store.delete_checkpoint(str(link))
    assert target.exists() and link.is_symlink()


# --- directories of others


def transformers_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    torch.save({}, folder / "optimizer.pt")
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")


def unversioned_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    fields = {"checkpoint_path": "x", "world_size": 1, "timestamp": "2026-01-01T00:00:00", "components": {}}
    (folder / MANIFEST_NAME).write_text(json.dumps(fields))
    torch.save({}, folder / "optimizer_state.pt")


def dcp_checkpoint(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.zeros(2)}, checkpoint_id=str(folder), no_dist=True)


def accelerate_checkpoint(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.prepare(torch.optim.SGD(model.parameters()))
    accelerator.save_state(str(folder))


OTHERS: list[tuple[Any, Owner]] = [
    (transformers_checkpoint, Owner.TRANSFORMERS),
    (unversioned_checkpoint, Owner.UNVERSIONED),
    (dcp_checkpoint, Owner.TORCH_DCP),
    (accelerate_checkpoint, Owner.ACCELERATE),
]


@pytest.mark.parametrize(("make", "owner"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_foreign_checkpoint_is_an_error_at_start(make: Any, owner: Owner, tmp_path: Path) -> None:
    theirs = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    make(theirs)
    assert owner_of(str(theirs)) is owner
    before = content_of(theirs)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is a checkpoint.*never replaced or deleted"):
        trainer_in(tmp_path / "run").train()
    with pytest.raises(OSError, match="never replaced"):
        store.Transaction(str(theirs), store.new_attempt()).begin(0)
    assert content_of(theirs) == before


def test_auto_resume_stops_at_foreign_checkpoints(tmp_path: Path) -> None:
    transformers_checkpoint(tmp_path / "run" / "checkpoint-500")
    before = content_of(tmp_path / "run" / "checkpoint-500")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-500 is a checkpoint of transformers.*resume_from_checkpoint=False"
    ):
        trainer_in(tmp_path / "run").train()
    assert trainer_in(tmp_path / "run").train(resume_from_checkpoint=False).global_step == 4
    assert content_of(tmp_path / "run" / "checkpoint-500") == before


def test_exported_weights_do_not_stop_training(tmp_path: Path) -> None:
    trainer_in(tmp_path / "run").save_model(str(tmp_path / "run" / "exported"))
    assert trainer_in(tmp_path / "run").train().global_step == 4


@pytest.mark.parametrize("damaged", [False, True], ids=["not ours", "damaged"])
def test_directory_with_the_name_of_a_save_is_set_aside(
    damaged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints" / "checkpoint-4"
    if damaged:
        trained(run)
        (folder / MANIFEST_NAME).write_text("damaged")
    else:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    before = content_of(folder)
    with caplog.at_level(logging.WARNING):
        trainer_in(run).train()
    (aside,) = run.glob("checkpoints/checkpoint-4.set-aside-*")
    assert content_of(aside) == before
    assert str(aside) in caplog.text
    assert store.verify_checkpoint(str(folder)) == []
    trainer_in(run, steps=8, save_total_limit=1).train()
    assert content_of(aside) == before, "never deleted"
    assert [Path(found.path).name for found in store.find_checkpoints(str(run / "checkpoints"))] == ["checkpoint-8"]


def test_checkpoint_found_damaged_at_load_is_set_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = trained(run)
    content = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = content_of(newest)
    trainer_in(run).train()
    (aside,) = run.glob("checkpoints/checkpoint-4.set-aside-*")
    assert content_of(aside) == before
    assert store.verify_checkpoint(str(newest)) == []


# --- a fresh start in a used directory


def test_fresh_start_keeps_the_older_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    trained(run, steps=4)
    before = content_of(run / "checkpoints")
    with caplog.at_level(logging.WARNING):
        trainer_in(run, steps=6, save_total_limit=1, resume_from_checkpoint=False).train()
    (older,) = run.glob("checkpoints/before-*Z")
    assert content_of(older) == before
    assert str(older) in caplog.text
    assert saved_steps(run) == [6]
    assert trainer_in(run, steps=6).train().global_step == 6, "resumes the newer run"


def test_fresh_start_changes_nothing_before_its_first_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run)

    class Failing:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise ValueError("before the first save")

    before = content_of(run)
    trainer = trainer_in(run, steps=6, resume_from_checkpoint=False)
    trainer.add_callback(Failing())
    with pytest.raises(ValueError, match="before the first save"):
        trainer.train()
    (run / "failures.jsonl").unlink()
    assert content_of(run) == before


def test_second_train_call_without_resume_is_a_fresh_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trainer_in(run, save_total_limit=1)
    trainer.train()
    trainer.train(resume_from_checkpoint=False)
    (older,) = run.glob("checkpoints/before-*Z")
    assert [path.name for path in older.iterdir()] == ["checkpoint-4"]
    assert saved_steps(run) == [4]


def test_load_checkpoint_before_train_is_no_fresh_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = trained(run)
    trainer = trainer_in(run, steps=6)
    trainer.load_checkpoint(str(newest))
    trainer.train()
    assert list(run.glob("checkpoints/before-*")) == []


# --- output directories that change while a job runs


class Removing:
    """Removes or renames the output directory of a running job, or removes its lock file."""

    def __init__(self, run: Path, what: str) -> None:
        self._run, self._what = run, what

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != 3:
            return
        if self._what == "renamed":
            self._run.rename(self._run.with_name("elsewhere"))
        elif self._what == "lock removed":
            (self._run / LOCK_FILE_NAME).unlink()
        else:
            subprocess.run(["rm", "-r", str(self._run)], check=True)


@pytest.mark.parametrize("what", ["renamed", "lock removed", "removed"])
def test_removed_output_directory_is_an_error_at_the_next_save(what: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trainer_in(run)
    trainer.add_callback(Removing(run, what))
    with pytest.raises(CheckpointSaveError, match="removed or renamed while this job was running"):
        trainer.train()
    assert what != "renamed" or not run.exists(), "nothing is written to the old name"


READ_ONLY = """
import sys
from pathlib import Path
from tests.support.faults.hostile import trainer_in
from tests.guarantees.hostile_checkpoints.test_foreign_directories import ReadOnly

for setting, folder in zip(("warn", "raise"), map(Path, sys.argv[1:])):
    trainer = trainer_in(folder / "run", on_save_error=setting)
    trainer.add_callback(ReadOnly(folder))
    output = trainer.train()
    print(setting, "ended at step", output.global_step, "with", trainer.checkpoint_manager.num_save_errors, "errors")
"""


class ReadOnly:
    """Makes the file system of a folder read-only before the second save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != 3:
            return
        # The lock file is open for writing, so only a second mount of the folder can be read-only.
        folder, lock = str(self._folder), str(self._folder / "run" / LOCK_FILE_NAME)
        for command in (
            ["chattr", "+i", lock],
            ["mount", "--bind", folder, folder],
            ["mount", "-o", "remount,bind,ro", folder],
        ):
            subprocess.run(command, check=True)


def test_file_system_that_becomes_read_only_fails_the_save(tmp_path: Path) -> None:
    folders = [tmp_path / "warn", tmp_path / "raise"]
    for folder in folders:
        folder.mkdir()
    # The mount namespace ends with the process.
    mounts = " && ".join(f'mount -t tmpfs none "{folder}"' for folder in folders)
    command = f"{mounts} && exec \"{sys.executable}\" -c '{READ_ONLY}' {' '.join(map(str, folders))}"
    result = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True)
    if "unshare: " in result.stderr or "mount: " in result.stderr or "chattr: " in result.stderr:
        pytest.skip("needs permission to mount file systems")
    assert "warn ended at step 4 with 2 errors" in result.stdout, result.stderr
    assert result.returncode == 1
    last = [line for line in result.stderr.splitlines() if line and not line.startswith(" ")][-1]
    assert last.startswith("forgather.ml.checkpoint.errors.CheckpointSaveError: ") and "Read-only file system" in last
