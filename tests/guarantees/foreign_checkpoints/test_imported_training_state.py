"""Optimizer, scheduler and step are imported from transformers and from unversioned Forgather checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import BertConfig, BertForMaskedLM

from forgather.ml.checkpoint.foreign.moments import possible_orders
from forgather.ml.checkpoint.foreign.ownership import Owner
from tests.support.foreign_directories import (
    ImportingJob,
    Moments,
    content_of,
    moments_of,
    save_unversioned,
    save_with_accelerate,
    train_with_transformers,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, tiny_llama, token_samples
from tests.support.tiny_parallel import NUM_STEPS, PIPELINE, Box, TinyModel, TinyTrainer, captured_logs, split


def assert_same(found: Moments, expected: Moments) -> None:
    assert found.keys() == expected.keys() and expected
    for name, moments in expected.items():
        assert found[name].keys() == moments.keys()
        assert all(torch.equal(found[name][key], value) for key, value in moments.items()), name


def report_of(lines: list[str]) -> str:
    (message,) = [line for line in lines if line.startswith("Imported")]
    return message


# --- transformers.Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Moments, Any]:
    """Transformers checkpoint at step 4, with its optimizer moments and model state."""
    folder = tmp_path_factory.mktemp("transformers")
    trainer = train_with_transformers(folder, tiny_llama(1), lr_scheduler_type="constant")
    assert trainer.model is not None
    return (
        folder / "checkpoint-4",
        moments_of(trainer.model, trainer.optimizer),
        trainer.model.state_dict(),
    )


def test_transformers_run_resumes(trained: tuple[Path, Moments, Any], tmp_path: Path) -> None:
    path, moments, state = trained
    job = ImportingJob(tmp_path, tiny_llama(2))
    before = content_of(path)
    with captured_logs() as lines:
        job.load(path)
    assert_same(job.moments(), moments)
    assert all(torch.equal(tensor, state[name]) for name, tensor in job.model.state_dict().items())
    assert job.scheduler.last_epoch == 4 and job.trainer.progress == (4, 0.5)
    message = report_of(lines)
    assert "model (21 tensors), optimizer, scheduler, step 4." in message
    assert "  - rng: rng_state.pth: " in message
    assert content_of(path) == before


def test_step_after_import_equals_the_transformers_step(tmp_path: Path) -> None:
    """One more step on the same batch gives the same weights in both."""
    theirs = train_with_transformers(
        tmp_path / "theirs", tiny_llama(1), lr_scheduler_type="constant", max_grad_norm=0.0
    )
    assert theirs.model is not None and theirs.optimizer is not None
    model = tiny_llama(2)
    decayed, undecayed = possible_orders(Owner.TRANSFORMERS, [model], [])[0]
    parameters = dict(model.named_parameters())
    job = ImportingJob(tmp_path / "run", model)
    job.optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in decayed], "weight_decay": 0.1},
            {"params": [parameters[name] for name in undecayed], "weight_decay": 0.0},
        ],
        lr=0.01,
        fused=True,
    )
    job.scheduler = LambdaLR(job.optimizer, lambda step: 1.0)
    job.load(tmp_path / "theirs" / "checkpoint-4")
    batch = {name: value[None] for name, value in token_samples(1)[0].items()}
    for net, optimizer in ((theirs.model, theirs.optimizer), (model, job.optimizer)):
        net.eval()
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
    expected = theirs.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_transformers_weight_decay_groups_are_reconstructed() -> None:
    from transformers.trainer import Trainer as HuggingFaceTrainer

    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    for model in (tiny_llama(1), tiny_llama(1, tie_word_embeddings=True), BertForMaskedLM(config), TokenModel()):
        decayed = HuggingFaceTrainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
        names = [name for name, _ in model.named_parameters()]
        groups = possible_orders(Owner.TRANSFORMERS, [model], [])[0]
        assert groups == [[name for name in names if name in decayed], [name for name in names if name not in decayed]]


def test_transformers_optimizer_with_one_group_is_mapped(tmp_path: Path) -> None:
    theirs = train_with_transformers(tmp_path / "theirs", tiny_llama(1), steps=2)
    assert theirs.model is not None
    single = torch.optim.AdamW(theirs.model.parameters())
    for parameter in theirs.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    single.step()
    path = tmp_path / "theirs" / "checkpoint-2"
    torch.save(single.state_dict(), path / "optimizer.pt")
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    job.load(path)
    assert_same(job.moments(), moments_of(theirs.model, single))


@pytest.mark.parametrize("what", ["another shape", "another number"])
def test_moments_that_do_not_fit_are_skipped_and_listed(
    what: str, trained: tuple[Path, Moments, Any], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name, content in content_of(trained[0]).items():
        (theirs / name).write_bytes(content)
    state = torch.load(theirs / "optimizer.pt", weights_only=True)
    if what == "another shape":
        state["state"][3]["exp_avg"] = torch.zeros(5, 5)
    else:
        state["param_groups"][0]["params"].append(99)
    torch.save(state, theirs / "optimizer.pt")
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    with captured_logs() as lines:
        job.load(theirs)
    assert job.moments() == {} and job.scheduler.last_epoch == 4 and job.trainer.progress == (4, 0.5)
    message = report_of(lines)
    assert "  - optimizer: its parameter groups do not fit the model: " in message
    assert ("have shape [5, 5]" if what == "another shape" else "groups of [17, 5] parameters") in message


def test_scheduler_of_another_kind_is_skipped_and_listed(trained: tuple[Path, Moments, Any], tmp_path: Path) -> None:
    job = ImportingJob(tmp_path, tiny_llama(2))
    job.scheduler = StepLR(job.optimizer, step_size=1)
    with captured_logs() as lines:
        job.load(trained[0])
    assert "  - scheduler: 'lr_lambdas' belongs to a different kind of scheduler than StepLR" in report_of(lines)
    assert job.scheduler.last_epoch == 0


def test_trainer_without_import_progress_keeps_its_step(trained: tuple[Path, Moments, Any], tmp_path: Path) -> None:
    job = ImportingJob(tmp_path, tiny_llama(2))
    job.trainer = Box(step=0)
    with captured_logs() as lines:
        job.load(trained[0])
    assert job.trainer.state == {"step": 0}
    assert "  - trainer: the checkpoint is at step 4, but Box has no import_progress(global_step, epoch)" in report_of(
        lines
    )


def test_skipped_components_keep_their_state(trained: tuple[Path, Moments, Any], tmp_path: Path) -> None:
    job = ImportingJob(tmp_path, tiny_llama(2))
    with captured_logs() as lines:
        job.coordinator().load_checkpoint(str(trained[0]), skip=["optimizer"])
    assert job.moments() == {} and "  - optimizer: it is listed in skip_checkpoint_components" in report_of(lines)


def test_only_weights_are_imported_from_accelerate(tmp_path: Path) -> None:
    save_with_accelerate(tmp_path / "theirs", TokenModel(1))
    job = ImportingJob(tmp_path / "run", TokenModel())
    with captured_logs() as lines:
        job.load(tmp_path / "theirs")
    assert job.moments() == {} and job.trainer.progress is None
    message = report_of(lines)
    for key in ("optimizer", "scheduler", "trainer"):
        assert f"  - {key}: only weights are imported from a checkpoint of accelerate.save_state" in message


# --- our layout without a version


def tiny_states(trainer: TinyTrainer) -> dict[str, Any]:
    return {
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "trainer": {"global_step": NUM_STEPS, "raw_epoch": 1.0},
    }


def tiny_run() -> TinyTrainer:
    from tests.support.tiny_parallel import SINGLE

    trainer = TinyTrainer(SINGLE, seed=5)
    trainer.train()
    return trainer


@pytest.mark.parametrize("num_groups", [1, 2], ids=["same groups", "other groups"])
def test_unversioned_checkpoint_resumes(num_groups: int, tmp_path: Path) -> None:
    theirs = tiny_run()
    save_unversioned(tmp_path / "theirs", theirs.parts[0], tiny_states(theirs))
    job = ImportingJob(tmp_path / "run", TinyModel(6))
    if num_groups == 2:
        parameters = list(job.model.parameters())
        job.optimizer = torch.optim.AdamW([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.01)
    job.scheduler = StepLR(job.optimizer, step_size=1, gamma=0.5)
    with captured_logs() as lines:
        job.load(tmp_path / "theirs")
    assert_same(job.moments(), moments_of(theirs.parts[0], theirs.optimizer))
    assert job.trainer.progress == (NUM_STEPS, 1.0)
    message = report_of(lines)
    assert "optimizer" in message.partition("\n")[0] and f"step {NUM_STEPS}" in message
    if num_groups == 1:
        assert job.scheduler.last_epoch == NUM_STEPS
        assert job.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]
    else:
        assert "  - scheduler: 'base_lrs' has a different type of value" in message


def test_parameter_names_in_the_file_override_the_order(tmp_path: Path) -> None:
    theirs = TinyModel(5)
    optimizer = torch.optim.AdamW(list(reversed(list(theirs.named_parameters()))))
    for parameter in theirs.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save_unversioned(tmp_path / "theirs", theirs, {"optimizer": optimizer.state_dict()})
    job = ImportingJob(tmp_path / "run", TinyModel(6))
    job.load(tmp_path / "theirs")
    assert_same(job.moments(), moments_of(theirs, optimizer))


def test_step_comes_from_the_directory_name_without_trainer_state(tmp_path: Path) -> None:
    save_unversioned(tmp_path / "checkpoint-70", TokenModel(1), {"dataset": {"index": 3}})
    job = ImportingJob(tmp_path / "run", TokenModel())
    with captured_logs() as lines:
        job.load(tmp_path / "checkpoint-70")
    assert job.trainer.progress == (70, 0.0)
    message = report_of(lines)
    assert "  - dataset: only the loader that saved a position can restore it" in message
    assert "  - optimizer: the directory has no state for it" in message


def import_moments(folder: str, output_dir: str) -> tuple[Moments, tuple[int, float] | None, list[str]]:
    model = TinyModel(100 + dist.get_rank())
    job = ImportingJob(Path(output_dir), model, [split(model, PIPELINE.boundaries)[dist.get_rank()]])
    job.scheduler = StepLR(job.optimizer, step_size=1, gamma=0.5)
    with captured_logs() as lines:
        job.load(Path(folder))
    return job.moments(), job.trainer.progress, [line for line in lines if line.startswith("Imported")]


def test_pipeline_stages_import_only_their_moments(tmp_path: Path) -> None:
    theirs = tiny_run()
    save_unversioned(tmp_path / "theirs", theirs.parts[0], tiny_states(theirs))
    results = run_on_ranks(import_moments, 2, str(tmp_path / "theirs"), str(tmp_path / "run"))
    expected = moments_of(theirs.parts[0], theirs.optimizer)
    assert_same({**results[0][0], **results[1][0]}, expected)
    assert results[0][0].keys().isdisjoint(results[1][0]) and len(results[0][0]) < len(expected)
    assert [progress for _, progress, _ in results] == [(NUM_STEPS, 1.0)] * 2
    assert [len(messages) for _, _, messages in results] == [1, 0], "one message for the job"


def test_per_rank_optimizer_files_are_imported_by_the_same_rank(tmp_path: Path) -> None:
    theirs = TinyModel(5)
    stages = split(theirs, PIPELINE.boundaries)
    optimizers = [torch.optim.AdamW(stage.parameters()) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for parameter in stage.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    states = {f"optimizer_rank_{rank}": one.state_dict() for rank, one in enumerate(optimizers)}
    save_unversioned(tmp_path / "theirs", theirs, states, world_size=2)
    results = run_on_ranks(import_moments, 2, str(tmp_path / "theirs"), str(tmp_path / "run"))
    for (moments, _, _), stage, optimizer in zip(results, stages, optimizers, strict=True):
        assert_same(moments, moments_of(stage, optimizer))
    job = ImportingJob(tmp_path / "run", TinyModel(6))
    with captured_logs() as lines:
        job.load(tmp_path / "theirs")
    assert job.moments() == {}
    assert "optimizer_state_rank_0.pt, optimizer_state_rank_1.pt belong to single ranks" in report_of(lines)


def import_unevenly(folder: str, output_dir: str) -> tuple[int, list[str]]:
    """Import with an optimizer on rank 1 that cannot use the moments."""
    model: nn.Module = TokenModel()
    job = ImportingJob(Path(output_dir), model)
    if dist.get_rank() == 1:
        job.optimizer = torch.optim.AdamW([next(model.parameters())], lr=0.01, amsgrad=True)
    with captured_logs() as lines:
        job.load(Path(folder))
    return len(job.moments()), lines


def test_component_unusable_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    model = TokenModel(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["max_exp_avg_sq"] = torch.zeros(3, 3)
    save_unversioned(tmp_path / "theirs", model, {"optimizer": state})
    results = run_on_ranks(import_unevenly, 2, str(tmp_path / "theirs"), str(tmp_path / "run"))
    assert [count for count, _ in results] == [0, 0]
    assert "  - optimizer: " in report_of(results[0][1])


def test_non_numeric_progress_is_skipped(tmp_path: Path) -> None:
    train_with_transformers(tmp_path / "theirs", tiny_llama(1), steps=2)
    path = tmp_path / "theirs" / "checkpoint-2"
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps({**state, "global_step": "many"}))
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    with captured_logs() as lines:
        job.load(path)
    assert job.trainer.progress is None and "global_step" in report_of(lines)
