"""Background saves with less staging memory than state: training continues up to the change of a tensor to be read."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import CheckpointSaveError, store
from forgather.ml.checkpoint.files.planned_file import PlannedFile
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, fsdp2_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, Recorder, quiet_trainer, token_samples

SAVED_STEP, NUM_STEPS = 3, 5
WIDTH = 64
# Enough for running statistics and random state, but not for weights, moments and averages of 80 KB.
SMALL = "24KB"
# Far longer than a step takes on a busy machine. A save that never gets here fails the test.
PATIENCE = 30.0
OPTIONS: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.05})}


class NormModel(nn.Module):
    """Token model with running statistics, which every forward pass changes."""

    def __init__(self, max_norm: float | None = None, change: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH, max_norm=max_norm)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self._change = change

    def forward(self, input_ids: Tensor) -> Tensor:
        if self._change is not None and self.training:
            self._change(self)
        embedded = self.norm(self.embedding(input_ids).flatten(0, 1))
        logits: Tensor = self.head(embedded.view(*input_ids.shape, WIDTH))
        return logits


class HeldDisk:
    """Disk that takes no file of a save before training has come to a point, and then only after a pause."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.has_waited_in_vain = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        patch, write = pytest.MonkeyPatch(), PlannedFile.write

        def late(file: PlannedFile, *arguments: Any) -> Any:
            self.has_waited_in_vain |= not self.is_reached.wait(PATIENCE)
            self.is_reached.set()
            time.sleep(0.05)
            return write(file, *arguments)

        patch.setattr(PlannedFile, "write", late)
        try:
            yield
        finally:
            patch.undo()


def build(kind: str, output_dir: Path, model: Callable[[], nn.Module], *callbacks: Any, **settings: Any) -> Trainer:
    settings = {
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED_STEP,
        "save_total_limit": None,
        "per_device_train_batch_size": 2,
        "trainer_options": OPTIONS,
        **settings,
    }
    train = token_samples(32)
    if kind == "ddp":
        return ddp_trainer(output_dir, model(), train, *callbacks, **settings)
    if kind == "fsdp2":
        return fsdp2_trainer(output_dir, model, train, *callbacks, **settings)
    return quiet_trainer(output_dir, model(), train, *callbacks, **settings)


def saved_files(output_dir: Path, step: int) -> dict[str, bytes]:
    """Return the content of the checkpoint, without the manifest, which contains the time."""
    path = output_dir / "checkpoints" / f"checkpoint-{step}"
    assert store.verify_checkpoint(str(path)) == []
    return {one.name: one.read_bytes() for one in path.iterdir() if one.name != "checkpoint_manifest.json"}


def expect_foreground_files(
    kind: str,
    directory: Path,
    model: Callable[[], nn.Module] = NormModel,
    *callbacks: Any,
    step: int = SAVED_STEP,
    **settings: Any,
) -> None:
    """Save in the foreground, and compare with the files of the caller in the folder "background"."""
    build(kind, directory / "foreground", model, *callbacks, **settings).train()
    assert saved_files(directory / "foreground", step) == saved_files(directory / "background", step)


def hold_until(disk: HeldDisk, trainer: Trainer, point: str) -> None:
    """Release the disk when a forward or backward pass after the save has come to its end."""

    def reach(*_: Any) -> None:
        if trainer.state.global_step == SAVED_STEP:
            disk.is_reached.set()

    head = trainer.unwrapped_model().head
    if point == "forward":
        head.register_forward_hook(reach)
    else:
        head.register_full_backward_hook(reach)


def train_during_the_save(kind: str, directory: str, point: str, settings: dict[str, Any]) -> None:
    """Train with a disk that waits for the next step; the files must contain no part of that step."""
    disk, output_dir = HeldDisk(), Path(directory)
    setup = Recorder(on_train_begin=lambda trainer, **_: hold_until(disk, trainer, point))
    trainer = build(kind, output_dir / "background", NormModel, async_save=True, async_save_memory=SMALL, **settings)
    trainer.add_callback(OnlyAtBegin(setup))
    with disk.installed():
        trainer.train()
    assert not disk.has_waited_in_vain
    expect_foreground_files(kind, output_dir, **settings)


class OnlyAtBegin:
    """Callback with one handler: before other handlers of users, training waits for the save."""

    changes_control = False

    def __init__(self, recorder: Recorder) -> None:
        self.on_train_begin = recorder.on_train_begin


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("backward", {}),
    "average": ("backward", {"ema_decay": 0.9}),
    "step in backward": ("forward", {"fuse_optim_with_backward": True, "max_grad_norm": None}),
    "accumulation": ("backward", {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_next_gradients_are_computed_while_pieces_are_outstanding(tmp_path: Path, case: str) -> None:
    train_during_the_save("single", str(tmp_path), *CASES[case])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_compute_gradients_while_pieces_are_outstanding(tmp_path: Path, kind: str) -> None:
    run_on_ranks(train_during_the_save, 2, kind, str(tmp_path), "backward", {})


def slow_run(directory: Path, model: Callable[[], nn.Module], *callbacks: Any, **settings: Any) -> Trainer:
    """Train on a slow disk with little staging memory."""
    disk = HeldDisk()
    disk.is_reached.set()
    settings = {"async_save_memory": SMALL, **settings}
    trainer = build("single", directory / "background", model, *callbacks, async_save=True, **settings)
    with disk.installed():
        trainer.train()
    return trainer


def test_weights_that_a_forward_pass_changes_are_copied_first(tmp_path: Path) -> None:
    slow_run(tmp_path, lambda: NormModel(max_norm=0.5))
    expect_foreground_files("single", tmp_path, lambda: NormModel(max_norm=0.5))


@pytest.mark.parametrize("memory", ["24KB", "1KB"])
def test_callback_that_changes_weights_waits_for_the_save(tmp_path: Path, memory: str) -> None:
    def clip(state: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step == SAVED_STEP:
            with torch.no_grad():
                model.get_parameter("head.weight").clamp_(-0.01, 0.01)

    slow_run(tmp_path, NormModel, Recorder(on_step_begin=clip), async_save_memory=memory)
    expect_foreground_files("single", tmp_path, NormModel, Recorder(on_step_begin=clip))


def test_evaluation_of_averages_waits_for_the_save(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ema_decay": 0.9,
        "eval_ema": True,
        "per_device_train_batch_size": 8,
        "eval_strategy": "epoch",
        # The save comes right before the evaluation at the end of the epoch.
        "save_steps": 4,
        "trainer_options": {**OPTIONS, "eval_dataset": token_samples(2)},
    }
    slow_run(tmp_path, NormModel, **settings)
    expect_foreground_files("single", tmp_path, NormModel, step=4, **settings)


def test_early_change_of_a_weight_fails_the_save(tmp_path: Path) -> None:
    passes = []

    def change(model: nn.Module) -> None:
        passes.append(model)
        if len(passes) == SAVED_STEP + 1:
            model.get_parameter("head.weight").detach().mul_(0.5)

    with pytest.raises(CheckpointSaveError, match="changed before the background save had read them"):
        slow_run(tmp_path, lambda: NormModel(change=change))
    assert store.find_checkpoints(str(tmp_path / "background" / "checkpoints")) == []


def test_log_explains_the_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forgather"):
        slow_run(tmp_path, NormModel)
    assert "in pieces: 23.4 KiB of" in caplog.text and f"async_save_memory={SMALL!r} per rank" in caplog.text
    assert "forward and backward passes continue" in caplog.text
