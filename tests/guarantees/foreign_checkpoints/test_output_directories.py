"""Output directories with foreign checkpoints: a run stops, imports the named one, or starts beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import StateComponent
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.distributed import from_env
from forgather.ml.sharded_checkpoint import load_checkpoint
from forgather.ml.trainer.trainer import Trainer
from tests.support.foreign_directories import (
    ImportingJob,
    content_of,
    moments_of,
    save_unversioned,
    save_with_accelerate,
    save_with_dcp,
    train_with_transformers,
)
from tests.support.pipelines import pipeline_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, tiny_llama, token_samples, weights
from tests.support.tiny_parallel import captured_logs


def unversioned(folder: Path) -> None:
    model = TokenModel(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {"optimizer": optimizer.state_dict(), "trainer": {"global_step": 4, "epoch": 0.25}}
    save_unversioned(folder, TokenModel(1), states)


def accelerate(folder: Path) -> None:
    save_with_accelerate(folder, TokenModel(1))


def torch_dcp(folder: Path) -> None:
    save_with_dcp(folder, {"model": TokenModel(1).state_dict()})


def trainer_in(output_dir: Path, model: Any = None, **settings: Any) -> Trainer:
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, **settings}
    optimizer = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
    return quiet_trainer(
        output_dir,
        model or TokenModel(),
        token_samples(16),
        trainer_options={"optimizer_cls_and_kwargs": optimizer},
        **options,
    )


WRITERS: list[Callable[[Path], None]] = [unversioned, accelerate, torch_dcp]


@pytest.mark.parametrize("place", ["checkpoints/checkpoint-4", "checkpoint-4", "checkpoints/newest"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda value: value.__name__)
def test_run_stops_imports_or_starts_beside_foreign_checkpoint(
    write: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    theirs = run / place
    write(theirs)
    before = content_of(theirs)
    with pytest.raises(CheckpointError, match=r"is a checkpoint.*never replaced or deleted") as stopped:
        trainer_in(run).train()
    for remedy in (f"resume_from_checkpoint={str(theirs)!r}", "another output_dir", "resume_from_checkpoint=False"):
        assert remedy in str(stopped.value)
    importing = trainer_in(run, save_total_limit=1)
    with captured_logs() as lines:
        importing.load_checkpoint(str(theirs))
    assert importing.model is not None
    expected = weights(TokenModel(1))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in importing.model.state_dict().items())
    assert sum(line.startswith("Imported") for line in lines) == 1
    assert trainer_in(run, resume_from_checkpoint=str(theirs), save_total_limit=1).train().global_step == 8
    assert trainer_in(run, resume_from_checkpoint=False, save_total_limit=1).train().global_step == 8
    assert content_of(theirs) == before, "neither replaced nor deleted"
    newest = store.find_checkpoints(str(run / "checkpoints"))[-1]
    assert newest.manifest.step == 8 and store.verify_checkpoint(newest.path) == []


def test_error_suggests_the_latest_step(tmp_path: Path) -> None:
    for step in (500, 1000):
        accelerate(tmp_path / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match=r"Import it with resume_from_checkpoint='[^']*checkpoint-1000'"):
        trainer_in(tmp_path).train()


def test_save_with_a_taken_name_gets_a_suffix_and_resumes(tmp_path: Path) -> None:
    unversioned(tmp_path / "checkpoints" / "checkpoint-4")
    before = content_of(tmp_path / "checkpoints" / "checkpoint-4")
    trainer_in(tmp_path, max_steps=4, resume_from_checkpoint=False).train()
    beside = tmp_path / "checkpoints" / "checkpoint-4-forgather"
    assert store.open_checkpoint(str(beside)).manifest.step == 4
    assert trainer_in(tmp_path, max_steps=6).train().global_step == 6, "ours is resumed"
    assert content_of(tmp_path / "checkpoints" / "checkpoint-4") == before


def test_moments_are_imported_into_a_trainer(tmp_path: Path) -> None:
    unversioned(tmp_path / "theirs")
    trainer = trainer_in(tmp_path / "run")
    trainer.load_checkpoint(str(tmp_path / "theirs"))
    assert trainer.model is not None
    moments = moments_of(trainer.unwrapped_model(), trainer.optimizer)
    assert moments.keys() == {"embedding.weight", "head.weight"}
    assert all(torch.equal(one["step"], torch.tensor(1.0)) for one in moments.values())


def test_transformers_run_resumes_in_a_trainer(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "linear", "weight_decay": 0.1, "learning_rate": 0.01}
    theirs = train_with_transformers(tmp_path / "theirs", tiny_llama(1), **settings)
    path = tmp_path / "theirs" / "checkpoint-4"
    before = content_of(path)
    trainer = quiet_trainer(
        tmp_path / "run",
        tiny_llama(2),
        token_samples(16),
        trainer_options={"optimizer_cls_and_kwargs": None},
        max_steps=8,
        **settings,
    )
    with captured_logs() as lines:
        trainer.load_checkpoint(str(path))
    assert trainer.model is not None and theirs.model is not None
    expected = weights(theirs.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.unwrapped_model().state_dict().items())
    moments, theirs_moments = (
        moments_of(trainer.unwrapped_model(), trainer.optimizer),
        moments_of(theirs.model, theirs.optimizer),
    )
    assert moments.keys() == theirs_moments.keys()
    for name, one in theirs_moments.items():
        assert all(torch.equal(moments[name][key], value) for key, value in one.items())
    (message,) = [line for line in lines if line.startswith("Imported")]
    assert "optimizer, scheduler" in message.partition("\n")[0]
    trainer.train()
    assert content_of(path) == before


def test_manager_without_a_trainer_imports_and_stops(tmp_path: Path) -> None:
    unversioned(tmp_path / "run" / "checkpoint-4")
    job = ImportingJob(tmp_path / "run", TokenModel())

    class Provider:
        def get_state_components(self) -> list[StateComponent]:
            return job.components()

    config = CheckpointConfig(output_dir=str(tmp_path / "run"), save_total_limit=None)
    manager = CheckpointManager(config, from_env(), Provider(), job.model)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=False"):
        manager.load_checkpoint()
    path = str(tmp_path / "run" / "checkpoint-4")
    assert manager.resolve_checkpoint_path(path) == path
    assert manager.load_checkpoint(path) == path
    assert job.trainer.progress == (4, 0.25) and len(job.moments()) == 2
    manager.close()


def import_into_pipeline(theirs: str, output_dir: str) -> str:
    options = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01})}
    trainer = pipeline_trainer(
        Path(output_dir),
        tiny_llama,
        token_samples(16),
        max_steps=4,
        per_device_train_batch_size=4,
        trainer_options=options,
    )
    with captured_logs() as lines:
        trainer.load_checkpoint(theirs)
    trainer.save_checkpoint(f"{output_dir}/imported")
    assert trainer.train().global_step == 4
    return "\n".join(lines)


def test_pipeline_imports_a_single_device_run(tmp_path: Path) -> None:
    theirs = train_with_transformers(tmp_path / "theirs", tiny_llama(1), steps=2)
    assert theirs.model is not None
    path = str(tmp_path / "theirs" / "checkpoint-2")
    lines = run_on_ranks(import_into_pipeline, 2, path, str(tmp_path / "run"))
    expected, imported = weights(theirs.model), load_checkpoint(str(tmp_path / "run" / "imported"))
    assert imported is not None and imported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in imported.items())
    assert "optimizer" in lines[0].partition("Imported")[2].partition("\n")[0] and "Imported" not in lines[1]
