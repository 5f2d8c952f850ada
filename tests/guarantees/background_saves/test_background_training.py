"""Trainers with async_save: exact resume, events at the commit, errors at step boundaries, preemption."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files.planned_file import PlannedFile
from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, fsdp2_trainer
from tests.support.data_parallel import run as run_trainer
from tests.support.pipelines import joined, llama, pipeline_trainer, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, quiet_trainer, saved_steps, tiny_llama, token_samples

NUM_STEPS = 6
SAVED_STEP = 3


def build(kind: str, output_dir: Path, *callbacks: Any, **settings: Any) -> Trainer:
    train = token_samples(16)
    settings = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": SAVED_STEP, **settings}
    if kind == "ddp":
        return ddp_trainer(output_dir, tiny_llama(), train, *callbacks, momentum=0.9, **settings)
    if kind == "fsdp2":
        return fsdp2_trainer(output_dir, tiny_llama, train, *callbacks, momentum=0.9, **settings)
    if kind == "hsdp":
        settings["fsdp2"] = {"replicate_size": 2}
        return fsdp2_trainer(output_dir, tiny_llama, train, *callbacks, momentum=0.9, **settings)
    if kind == "pipeline":
        settings["per_device_train_batch_size"] = 4
        return pipeline_trainer(output_dir, llama, train, *callbacks, momentum=0.9, **settings)
    if kind == "hybrid":
        settings = {"per_device_train_batch_size": 4, "n_microbatches": 2, "pp_size": 2, **settings}
        return trainer_of(HybridTrainer, output_dir, llama, train, *callbacks, momentum=0.9, **settings)
    if kind == "accel":
        options = {"accelerator": Accelerator(cpu=True)}
        settings = {"trainer_class": AccelTrainer, "trainer_options": options, **settings}
    return quiet_trainer(output_dir, tiny_llama(), train, *callbacks, momentum=0.9, **settings)


def final_weights(trainer: Trainer, kind: str) -> dict[str, torch.Tensor]:
    weights = run_trainer(trainer).weights
    return joined(weights) if kind in ("pipeline", "hybrid") else weights


def slow_writes(seconds: float) -> pytest.MonkeyPatch:
    """Delay every file of a save, so that training takes several steps meanwhile."""
    patch = pytest.MonkeyPatch()
    write = PlannedFile.write

    def late(self: PlannedFile, *arguments: Any) -> Any:
        time.sleep(seconds)
        return write(self, *arguments)

    patch.setattr(PlannedFile, "write", late)
    return patch


def resume_from_background(kind: str, directory: str) -> None:
    """Train straight through with background saves, then again from the checkpoint in the middle."""
    straight, resumed = Path(directory) / "straight", Path(directory) / "resumed"
    patch = slow_writes(0.05)
    expected = final_weights(build(kind, straight, async_save=True, save_total_limit=None), kind)
    patch.undo()
    path = straight / "checkpoints" / f"checkpoint-{SAVED_STEP}"
    assert store.verify_checkpoint(str(path)) == []
    trainer = build(kind, resumed, resume_from_checkpoint=str(path))
    found = final_weights(trainer, kind)
    assert trainer.state.global_step == NUM_STEPS
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def content_of(path: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, without the manifest, which contains the time."""
    return {one.name: one.read_bytes() for one in path.iterdir() if one.name != "checkpoint_manifest.json"}


def resume_and_compare(kind: str, directory: str, memory: str | None = None) -> None:
    """Compare the checkpoints of a background run with a foreground run, and resume from one."""
    patch, foreground, background = slow_writes(0.02), Path(directory) / "foreground", Path(directory) / "background"
    settings: dict[str, Any] = {"save_total_limit": None, "max_steps": NUM_STEPS}
    expected = final_weights(build(kind, foreground, **settings), kind)
    # With the same callbacks: a callback that reads the gradient norm of a pipeline gets it in float32.
    final_weights(build(kind, background, async_save=True, async_save_memory=memory, **settings), kind)
    patch.undo()
    name = f"checkpoints/checkpoint-{SAVED_STEP}"
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert store.verify_checkpoint(str(background / name)) == []
        one, other = content_of(background / name), content_of(foreground / name)
        assert [file for file in {**one, **other} if one.get(file) != other.get(file)] == []
    resumed = build(kind, Path(directory) / "resumed", resume_from_checkpoint=str(background / name), **settings)
    found = final_weights(resumed, kind)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_resume_from_a_background_checkpoint_is_bit_exact(tmp_path: Path) -> None:
    resume_from_background("single", str(tmp_path))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "pipeline"])
def test_resume_on_two_ranks_is_bit_exact(tmp_path: Path, kind: str) -> None:
    run_on_ranks(resume_from_background, 2, kind, str(tmp_path))


# The accelerator keeps its state for the life of a process, so each case has processes of its own.
@pytest.mark.parametrize("kind, num_ranks", sampled([("accel", 2), ("hybrid", 4), ("hsdp", 4)], [("hybrid", 4)]))
@pytest.mark.parametrize("memory", sampled([None, "12KB"], ["12KB"]))
def test_other_trainers_save_and_resume_as_in_the_foreground(
    tmp_path: Path, kind: str, num_ranks: int, memory: str | None
) -> None:
    run_on_ranks(resume_and_compare, num_ranks, kind, str(tmp_path), memory)


def events_of_saves(kind: str, directory: str) -> list[tuple[int, str, bool]]:
    """Return the step of the trainer, the name and the completeness of the checkpoint at each on_save."""
    seen = []

    def on_save(state: Any, checkpoint_path: str, trainer: Trainer, **_: Any) -> None:
        is_complete = store.verify_checkpoint(checkpoint_path) == []
        seen.append((trainer.state.global_step, os.path.basename(checkpoint_path), is_complete))
        assert os.path.basename(checkpoint_path) == f"checkpoint-{state.global_step}"
        assert state.epoch == pytest.approx(state.global_step / state.epoch_train_steps)

    patch = slow_writes(0.02)
    recorder = Recorder(on_save=on_save, on_step_end=lambda **_: time.sleep(0.05))
    build(kind, Path(directory), recorder, async_save=True, save_steps=20, max_steps=60, save_total_limit=None).train()
    patch.undo()
    return seen


def check_events(seen: list[tuple[int, str, bool]]) -> None:
    assert [(name, is_complete) for _, name, is_complete in seen] == [
        (f"checkpoint-{step}", True) for step in (20, 40, 60)
    ]
    # The last one is waited for at the end of training.
    assert [step > saved for (step, _, _), saved in zip(seen, (20, 40, 60), strict=True)] == [True, True, False]


def test_on_save_fires_after_the_commit(tmp_path: Path) -> None:
    check_events(events_of_saves("single", str(tmp_path)))


def test_on_save_fires_at_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    seen = run_on_ranks(events_of_saves, 2, "ddp", str(tmp_path))
    assert seen[0] == seen[1]
    check_events(seen[0])


def failing_run(kind: str, directory: str, failing_rank: int, **settings: Any) -> tuple[str, int, int]:
    """Fail the first save on one rank; return the error, the last step and the number of errors that only warned."""
    patch = pytest.MonkeyPatch()

    def fail(self: PlannedFile, *arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    trainer = build(kind, Path(directory), async_save=True, max_steps=400, save_steps=10, **settings)
    recorder = Recorder(on_step_end=lambda **_: time.sleep(0.01))
    trainer.add_callback(recorder)
    if trainer.dist.rank == failing_rank:
        patch.setattr(PlannedFile, "write", fail)
    try:
        trainer.train()
        error = ""
    except Exception as failure:  # noqa: BLE001 - the test judges it
        error = f"{type(failure).__name__}: {failure}"
    patch.undo()
    return error, trainer.state.global_step, trainer.checkpoint_manager.num_save_errors


def test_error_surfaces_at_a_step_boundary(tmp_path: Path) -> None:
    error, step, _ = failing_run("single", str(tmp_path), 0)
    assert error.startswith("CheckpointSaveError") and "No space left on device" in error
    assert 10 < step < 400


def test_error_of_one_rank_surfaces_on_all_ranks(tmp_path: Path) -> None:
    found = run_on_ranks(failing_run, 2, "ddp", str(tmp_path), 1)
    assert found[0][1] == found[1][1] < 400
    for error, _, _ in found:
        assert error.startswith("CheckpointSaveError") and "rank 1 failed" in error and "No space left" in error


def test_warned_error_leaves_no_record_of_the_checkpoint(tmp_path: Path) -> None:
    patch = pytest.MonkeyPatch()

    def fail(self: PlannedFile, *arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    recorder = Recorder(on_epoch_begin=lambda **_: patch.setattr(PlannedFile, "write", fail))
    trainer = build("single", tmp_path, recorder, async_save=True, on_save_error="warn")
    trainer.train()
    patch.undo()
    assert recorder.names.count("on_save") == 0
    # As in the foreground, the end of training tries the failed save of the last step again.
    assert (trainer.checkpoint_manager.num_save_errors, trainer.loop.saved_step) == (3, -1)
    assert saved_steps(tmp_path) == []


def preempted_run(kind: str, directory: str) -> list[int]:
    """Send SIGTERM while a background save is in flight; return the steps of the checkpoints."""
    patch = slow_writes(0.1)

    def kill(state: Any, **_: Any) -> None:
        if state.global_step == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = build(kind, Path(directory), Recorder(on_step_end=kill), async_save=True, max_steps=500, save_steps=10)
    with pytest.raises(Preempted) as caught:
        trainer.train()
    patch.undo()
    assert caught.value.checkpoint_path.endswith(f"checkpoint-{trainer.state.global_step}")
    assert store.verify_checkpoint(caught.value.checkpoint_path) == []
    return saved_steps(Path(directory))


def check_preempted(steps: list[int]) -> None:
    assert steps[0] == 10 and len(steps) == 2


def test_sigterm_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    check_preempted(preempted_run("single", str(tmp_path)))


def test_sigterm_on_two_ranks_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    for steps in run_on_ranks(preempted_run, 2, "ddp", str(tmp_path)):
        check_preempted(steps)


def test_best_checkpoint_equals_a_foreground_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "preserve_n_best": 2,
    }
    found = []
    for name, is_async in (("foreground", False), ("background", True)):
        trainer = build(
            "single",
            tmp_path / name,
            async_save=is_async,
            trainer_options={"eval_dataset": token_samples(4, seed=3)},
            **settings,
        )
        trainer.train()
        best = [(os.path.basename(path), value) for path, value in trainer.checkpoint_manager.best_checkpoints]
        best_path = os.path.basename(str(trainer.state.best_model_checkpoint))
        found.append((best, best_path, saved_steps(tmp_path / name)))
        shutil.rmtree(tmp_path / name)
    assert found[0] == found[1]


def test_save_by_hand_returns_after_the_commit(tmp_path: Path) -> None:
    patch = slow_writes(0.02)
    seen: list[bool] = []

    def save(state: Any, trainer: Trainer, **_: Any) -> None:
        if state.global_step == SAVED_STEP + 1:
            path = trainer.save_checkpoint()
            seen.append(store.verify_checkpoint(path) == [])

    recorder = Recorder(on_step_end=save)
    build("single", tmp_path, recorder, async_save=True, save_total_limit=None).train()
    patch.undo()
    assert seen == [True]
    assert recorder.steps("on_save") == [SAVED_STEP, SAVED_STEP + 1, NUM_STEPS]
    assert saved_steps(tmp_path) == [SAVED_STEP, SAVED_STEP + 1, NUM_STEPS]
