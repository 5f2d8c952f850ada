"""Weights of every kind of foreign directory are imported by name, into a full model or the stages of a rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.foreign import Owner, recognise
from tests.support.foreign_directories import (
    ImportingJob,
    content_of,
    save_unversioned,
    save_with_accelerate,
    save_with_dcp,
    train_with_transformers,
    zeroed,
)
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import TokenModel, tiny_llama, weights
from tests.support.tiny_parallel import PIPELINE, TinyModel, captured_logs, split


def by_transformers(folder: Path, model: nn.Module) -> Path:
    train_with_transformers(folder, model, steps=2)
    return folder / "checkpoint-2"


def by_accelerate(folder: Path, model: nn.Module) -> Path:
    save_with_accelerate(folder, model)
    return folder


def by_accelerate_as_bin(folder: Path, model: nn.Module) -> Path:
    save_with_accelerate(folder, model, safetensors=False)
    return folder


def by_hugging_face(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def by_dcp(folder: Path, model: nn.Module) -> Path:
    """Save model and optimizer under their keys, as torch's DCP examples do."""
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_with_dcp(folder, {"model": model_state, "optim": optimizer_state, "step": 4})
    return folder


def by_dcp_without_prefix(folder: Path, model: nn.Module) -> Path:
    save_with_dcp(folder, model.state_dict())
    return folder


def by_fsdp_of_accelerate(folder: Path, model: nn.Module) -> Path:
    """Save the sharded weights of an FSDP model in a separate folder, as Accelerate does."""
    save_with_accelerate(folder, model)
    (folder / "model.safetensors").unlink()
    save_with_dcp(folder / "pytorch_model_fsdp_0", {"model": model.state_dict()})
    return folder


def without_version(folder: Path, model: nn.Module) -> Path:
    save_unversioned(folder, model, {})
    return folder


def without_version_as_bin(folder: Path, model: nn.Module) -> Path:
    save_unversioned(folder, model, {}, safetensors=False)
    return folder


WRITERS: list[tuple[Callable[[Path, Any], Path], Owner]] = [
    (by_transformers, Owner.TRANSFORMERS),
    (by_accelerate, Owner.ACCELERATE),
    (by_accelerate_as_bin, Owner.ACCELERATE),
    (by_hugging_face, Owner.HUGGING_FACE),
    (by_dcp, Owner.TORCH_DCP),
    (by_dcp_without_prefix, Owner.TORCH_DCP),
    (by_fsdp_of_accelerate, Owner.ACCELERATE),
    (without_version, Owner.UNVERSIONED),
    (without_version_as_bin, Owner.UNVERSIONED),
]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(("write", "owner"), WRITERS, ids=lambda value: getattr(value, "__name__", ""))
def test_foreign_weights_are_imported(
    write: Callable[[Path, Any], Path], owner: Owner, tied: bool, tmp_path: Path
) -> None:
    theirs = tiny_llama(1, tie_word_embeddings=tied)
    path = write(tmp_path / "theirs", theirs)
    assert recognise(str(path)) is owner
    before = content_of(path)
    job = ImportingJob(tmp_path / "run", zeroed(tiny_llama(2, tie_word_embeddings=tied)))
    with captured_logs() as lines:
        job.load(path)
    expected = weights(theirs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in job.model.state_dict().items())
    (message,) = [line for line in lines if line.startswith("Imported")]
    assert message.startswith(f"Imported {path}, {owner.value}: model (") and "Not imported:\n  - " in message
    assert content_of(path) == before


def test_forgather_checkpoint_with_foreign_files_is_not_foreign(tmp_path: Path) -> None:
    job = ImportingJob(tmp_path, TokenModel())
    path = Path(job.coordinator().save_checkpoint(checkpoint_id=1))
    (path / "trainer_state.json").write_text("{}")
    assert recognise(str(path)) is None


def test_buffers_scalars_and_other_dtypes_are_imported_from_dcp(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 0), value))
            self.narrow = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
            self.register_buffer("scalar", torch.tensor(value))
            self.register_buffer("flags", torch.tensor([value > 1]))
            self.register_buffer("transposed", torch.full((2, 3), value).t())

    save_with_dcp(tmp_path / "theirs", {"app": {"net": Odd(2.0).state_dict()}})
    job = ImportingJob(tmp_path / "run", Odd(1.0))
    job.load(tmp_path / "theirs")
    assert all(torch.equal(tensor, Odd(2.0).state_dict()[name]) for name, tensor in job.model.state_dict().items())


# --- directories that do not fit


def test_dcp_tensors_under_two_prefixes_are_an_error(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "theirs", {"net": TokenModel(1).state_dict(), "average": TokenModel(2).state_dict()})
    with pytest.raises(CheckpointLoadError, match=r"several prefixes \(average\., net\.\).*under the key 'model'"):
        ImportingJob(tmp_path / "run", TokenModel()).load(tmp_path / "theirs")


@pytest.mark.parametrize("write", [by_dcp, by_dcp_without_prefix, without_version], ids=lambda value: value.__name__)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_hidden_layers": 1}, "tensors of the checkpoint are not in the model"),
        ({"num_hidden_layers": 3}, "tensors of the model are not in the checkpoint"),
        ({"intermediate_size": 32}, r"has shape \(24, 16\) in the checkpoint, but \(32, 16\) in the model"),
    ],
    ids=["fewer layers", "more layers", "wider"],
)
def test_model_that_does_not_fit_is_an_error_and_unchanged(
    write: Callable[[Path, Any], Path], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "theirs", tiny_llama(1))
    job = ImportingJob(tmp_path / "run", tiny_llama(2, **options))
    before = weights(job.model)
    with pytest.raises(CheckpointLoadError, match=reason):
        job.load(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


def test_deepspeed_weights_error_names_the_converter(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "global_step4").mkdir(parents=True)
    (tmp_path / "theirs" / "zero_to_fp32.py").write_text("")
    assert recognise(str(tmp_path / "theirs")) is Owner.DEEPSPEED
    with pytest.raises(CheckpointLoadError, match=r"zero_to_fp32\.py"):
        ImportingJob(tmp_path / "run", TokenModel()).load(tmp_path / "theirs")


# --- several ranks


def save_sharded(folder: str) -> None:
    """Save every weight sharded over two ranks, some of them unevenly."""
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in TinyModel(5).state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=folder)


def import_stage(folder: str, output_dir: str, tied: bool) -> dict[str, torch.Tensor]:
    """Import this rank's pipeline stage."""
    model = TinyModel(100 + dist.get_rank(), tied)
    stage = split(model, PIPELINE.boundaries)[dist.get_rank()]
    ImportingJob(Path(output_dir), model, [stage]).load(Path(folder))
    return weights(stage)


def test_sharded_dcp_weights_load_on_one_process_and_a_pipeline(tmp_path: Path) -> None:
    run_on_ranks(save_sharded, 2, str(tmp_path / "theirs"))
    expected = weights(TinyModel(5))
    job = ImportingJob(tmp_path / "run", TinyModel(6))
    job.load(tmp_path / "theirs")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in job.model.state_dict().items())
    stages = run_on_ranks(import_stage, 2, str(tmp_path / "theirs"), str(tmp_path / "run"), False)
    assert stages[0].keys() | stages[1].keys() == expected.keys() and stages[0].keys() != expected.keys()
    assert all(torch.equal(tensor, expected[name]) for stage in stages for name, tensor in stage.items())


def test_tied_weight_stored_once_reaches_both_stages(tmp_path: Path) -> None:
    theirs = TinyModel(5, tied=True)
    (tmp_path / "theirs").mkdir()
    save_model(theirs, str(tmp_path / "theirs" / "model.safetensors"))
    stages = run_on_ranks(import_stage, 2, str(tmp_path / "theirs"), str(tmp_path / "run"), True)
    assert torch.equal(stages[0]["embed.weight"], theirs.embed.weight)
    assert torch.equal(stages[1]["head.weight"], theirs.embed.weight)


def test_failed_import_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    save_unversioned(tmp_path / "theirs", TinyModel(5), {})
    outcomes = outcomes_on_ranks(import_with_a_misfit, 2, str(tmp_path / "theirs"), str(tmp_path / "run"))
    assert {outcome.error_type for outcome in outcomes} == {"CheckpointLoadError"}
    first, second = (str(outcome.error_message) for outcome in outcomes)
    assert first == second and "head.weight" in first and "shape" in first


def import_with_a_misfit(folder: str, output_dir: str) -> None:
    model = TinyModel(5)
    if dist.get_rank() == 1:
        model.head = nn.Linear(4, 9, bias=False)
    ImportingJob(Path(output_dir), model).load(Path(folder))
