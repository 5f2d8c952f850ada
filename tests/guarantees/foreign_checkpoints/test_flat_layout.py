"""Layout `<output_dir>/checkpoint-N` of transformers: its tools find the checkpoints, and its own checkpoints stay."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.trainer_callback import TrainerState as HuggingFaceState
from transformers.trainer_utils import get_last_checkpoint

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.finalize import resolve_checkpoint
from forgather.ml.sharded_checkpoint import find_latest_checkpoint, maybe_delete_oldest_checkpoint, next_checkpoint_path
from forgather.ml.trainer.trainer import Trainer
from tests.support.faults.job import debris
from tests.support.foreign_directories import content_of, moments_of, train_with_transformers
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, tiny_llama, token_samples, weights
from tests.support.tiny_parallel import captured_logs


def flat_trainer(output_dir: Path, model: Any = None, evaluate: bool = False, **settings: Any) -> Trainer:
    options = {"save_strategy": "steps", "save_steps": 2, "checkpoint_layout": "output_dir", **settings}
    adamw = (torch.optim.AdamW, {"lr": 0.01})
    trainer_options = {"optimizer_cls_and_kwargs": adamw} | ({"eval_dataset": token_samples(4)} if evaluate else {})
    return quiet_trainer(
        output_dir, model or TokenModel(), token_samples(16), trainer_options=trainer_options, **options
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def test_tools_of_transformers_find_and_read_checkpoints(tmp_path: Path) -> None:
    settings = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_strategy": "steps"}
    trainer = flat_trainer(tmp_path, tiny_llama(), evaluate=True, max_steps=6, save_total_limit=2, **settings)
    trainer.train()
    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-6") and names_in(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    state = HuggingFaceState.load_from_json(os.path.join(last, "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.save_steps, state.eval_steps) == (6, 6, 2, 2)
    assert state.epoch == trainer.state.epoch and state.train_batch_size == trainer.args.per_device_train_batch_size
    assert [record["step"] for record in state.log_history if "eval_loss" in record] == [2, 4, 6]
    assert state.best_model_checkpoint == trainer.state.best_model_checkpoint
    assert state.best_global_step is not None and state.best_metric == trainer.state.best_metric
    assert store.verify_checkpoint(last) == []
    files = [record.path for record in store.open_checkpoint(last).manifest.files]
    assert "trainer_state.json" in files, "it has a checksum"
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(trainer.unwrapped_model()).items())


def test_edited_trainer_state_does_not_prevent_a_resume(tmp_path: Path) -> None:
    flat_trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    # Users and their tools may edit this file. No load reads it, so it is no damage.
    assert store.verify_checkpoint(str(tmp_path / "checkpoint-2")) == []
    assert flat_trainer(tmp_path, max_steps=4).train().global_step == 4


@pytest.mark.parametrize("async_save", [False, True])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, async_save: bool) -> None:
    whole = flat_trainer(tmp_path / "whole", max_steps=6, async_save=async_save)
    whole.train()
    flat_trainer(tmp_path / "parts", max_steps=6, save_steps=3, async_save=async_save).train()
    store.delete_checkpoint(str(tmp_path / "parts" / "checkpoint-6"))
    resumed = flat_trainer(tmp_path / "parts", max_steps=6, save_steps=3, async_save=async_save)
    resumed.train()
    assert resumed.args.resume_from_checkpoint == str(tmp_path / "parts" / "checkpoint-3")
    expected = weights(whole.unwrapped_model())
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights(resumed.unwrapped_model()).items())
    assert debris(tmp_path) == []


def test_best_checkpoint_is_preserved_and_loaded(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "preserve_best_model": True}
    trainer = flat_trainer(
        tmp_path, evaluate=True, max_steps=6, save_total_limit=1, best_model_greater_is_better=True, **settings
    )
    trainer.train()
    # The loss falls, so with the direction reversed the first checkpoint is the best one.
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    resumed = flat_trainer(
        tmp_path, evaluate=True, max_steps=8, save_total_limit=1, best_model_greater_is_better=True, **settings
    )
    resumed.train()
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-8"]


def test_fresh_run_moves_older_checkpoints_but_no_other_directory(tmp_path: Path) -> None:
    first = flat_trainer(tmp_path, max_steps=4)
    first.train()
    first.save_checkpoint(str(tmp_path / "by-hand"))
    (tmp_path / "runs").mkdir()
    flat_trainer(tmp_path, max_steps=2, resume_from_checkpoint=False, save_total_limit=1).train()
    (moved,) = [name for name in names_in(tmp_path) if name.startswith("before-")]
    assert names_in(tmp_path) == [moved, "by-hand", "checkpoint-2", "runs"]
    assert names_in(tmp_path / moved) == ["checkpoint-2", "checkpoint-4"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert store.verify_checkpoint(str(tmp_path / "by-hand")) == [], "retention counts only checkpoint-<step>"


@pytest.mark.parametrize("resume", [True, False, "path"])
@pytest.mark.parametrize("layouts", [("checkpoints", "output_dir"), ("output_dir", "checkpoints")])
def test_checkpoints_in_the_other_place_are_an_error_that_names_both(
    tmp_path: Path, layouts: tuple[str, str], resume: bool | str
) -> None:
    places = {"checkpoints": tmp_path / "checkpoints", "output_dir": tmp_path}
    flat_trainer(tmp_path, max_steps=2, checkpoint_layout=layouts[0]).train()
    path = str(places[layouts[0]] / "checkpoint-2")
    before = content_of(tmp_path)
    trainer = flat_trainer(
        tmp_path, max_steps=4, checkpoint_layout=layouts[1], resume_from_checkpoint=path if resume == "path" else resume
    )
    with pytest.raises(CheckpointError, match="checkpoints in another layout") as raised:
        trainer.train()
    assert path in str(raised.value) and str(places[layouts[1]] / "checkpoint-<step>") in str(raised.value)
    assert f"Set checkpoint_layout={layouts[0]!r}" in str(raised.value)
    after = content_of(tmp_path)
    assert {name: after[name] for name in before if "checkpoint-" in name} == {
        name: content for name, content in before.items() if "checkpoint-" in name
    }


def test_helpers_and_commands_know_both_places(tmp_path: Path) -> None:
    flat, nested = tmp_path / "flat", tmp_path / "nested"
    flat_trainer(flat, max_steps=4).train()
    flat_trainer(nested, max_steps=4, checkpoint_layout="checkpoints").train()
    for root, folder in ((flat, flat), (nested, nested / "checkpoints")):
        assert find_latest_checkpoint(str(root)) == str(folder / "checkpoint-4")
        assert resolve_checkpoint(str(root)) == str(folder / "checkpoint-4")
        assert next_checkpoint_path(str(root), 6) == str(folder / "checkpoint-6")
        assert maybe_delete_oldest_checkpoint(str(root), 1) == [str(folder / "checkpoint-2")]
    (flat / "checkpoints").mkdir()
    os.rename(nested / "checkpoints" / "checkpoint-4", flat / "checkpoints" / "checkpoint-8")
    for find in (find_latest_checkpoint, resolve_checkpoint):
        with pytest.raises(CheckpointError, match="checkpoint-8 belongs to checkpoint_layout='checkpoints'"):
            find(str(flat))


def test_transformers_run_continues_beside_its_own_checkpoint(tmp_path: Path) -> None:
    """Weights, moments, schedule and step come from transformers; its directory stays, and the next one lies beside."""
    settings = {"lr_scheduler_type": "linear", "weight_decay": 0.1, "learning_rate": 0.01}
    theirs = train_with_transformers(tmp_path, tiny_llama(1), **settings)
    path = tmp_path / "checkpoint-4"
    before = content_of(path)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is a checkpoint of transformers.Trainer"):
        flat_trainer(tmp_path, tiny_llama(2), max_steps=8).train()
    begun: list[Any] = []

    def note(model: Any, optimizer: Any, lr_scheduler: Any, state: Any, **_: Any) -> None:
        begun.extend(
            [weights(model), deepcopy(moments_of(model, optimizer)), lr_scheduler.last_epoch, state.global_step]
        )

    trainer = quiet_trainer(
        tmp_path,
        tiny_llama(2),
        token_samples(16),
        Recorder(on_train_begin=note),
        trainer_options={"optimizer_cls_and_kwargs": None},
        **{**settings, "max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
        checkpoint_layout="output_dir",
        resume_from_checkpoint=str(path),
    )
    assert trainer.train().global_step == 8
    assert theirs.model is not None
    imported, moments, last_epoch, step = begun
    assert all(torch.equal(imported[name], tensor) for name, tensor in weights(theirs.model).items())
    for name, one in moments_of(theirs.model, theirs.optimizer).items():
        assert all(torch.equal(moments[name][key], value) for key, value in one.items())
    assert last_epoch == theirs.lr_scheduler.last_epoch == 4 and step == 4
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"], "limit 1 counts only ours"
    assert content_of(path) == before
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-8")


def test_taken_name_is_kept_and_the_user_is_told(tmp_path: Path) -> None:
    train_with_transformers(tmp_path, tiny_llama(1))
    before = content_of(tmp_path / "checkpoint-4")
    settings = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    trainer = flat_trainer(
        tmp_path, tiny_llama(2), evaluate=True, max_steps=4, resume_from_checkpoint=False, **settings
    )
    with captured_logs() as lines:
        trainer.train()
    assert content_of(tmp_path / "checkpoint-4") == before
    beside = str(tmp_path / "checkpoint-4-forgather")
    assert store.verify_checkpoint(beside) == []
    assert trainer.state.best_model_checkpoint == beside, "the best weights are ours"
    (told,) = [line for line in lines if "get_last_checkpoint" in line]
    assert beside in told and "resume_from_checkpoint=True" in told
