"""Hybrid trainer with dp_strategy="shard": memory per rank, checkpoint files, and rejected settings."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part
from forgather.ml.trainer.hybrid import HybridTrainer, HybridTrainingArguments
from tests.support.pipelines import joined, tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import token_samples, weights

SHARD: dict[str, Any] = {"output_dir": "unused", "pp_size": 2, "dp_strategy": "shard"}


class OfRank(NamedTuple):
    """State of a rank after training."""

    stage_elements: int
    """Elements of the full parameters of the rank's stages."""
    held_elements: int
    moment_elements: int
    gradient_elements: list[int]
    """Elements of the gradients of each update."""
    are_sharded: list[bool]
    """Whether all parameters are shards after training, evaluation, generation and a save."""
    weights: dict[str, Tensor]


def elements(tensors: Any) -> int:
    return sum(local_part(one.detach()).numel() for one in tensors if one is not None)


def train_and_save(output_dir: Path) -> OfRank:
    seen: list[int] = []

    class Counting(HybridTrainer[Any]):
        def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
            seen.append(elements(one.grad for one in self.pipeline.part.parameters()))
            return super()._clip_grad_norm(max_grad_norm, norm_type)

    trainer = trainer_of(
        Counting,
        output_dir,
        functools.partial(tied_gpt2, 4),
        token_samples(16),
        trainer_options={
            "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2}),
            "eval_dataset": token_samples(5),
        },
        schedule="zbv",
        pp_size=2,
        dp_strategy="shard",
        n_microbatches=4,
        per_device_train_batch_size=4,
        max_steps=2,
        save_strategy="steps",
        ema_decay=0.9,
    )
    assert isinstance(trainer, HybridTrainer)
    part_parameters = lambda: list(trainer.pipeline.part.parameters())  # noqa: E731
    are_sharded = []
    for action in (
        trainer.train,
        trainer.evaluate,
        lambda: trainer.pipeline_generate(torch.arange(6).reshape(1, 6), 2, do_sample=False),
        lambda: trainer.save_model(str(output_dir / "exported")),
    ):
        action()
        are_sharded.append(all(map(is_sharded, part_parameters())))
    moments = [value for state in trainer.optimizer.state.values() for key, value in state.items() if key != "step"]
    return OfRank(
        sum(one.numel() for one in part_parameters()),
        elements(part_parameters()),
        elements(moments),
        seen,
        are_sharded,
        joined(weights(trainer.pipeline.part)),
    )


class Run(NamedTuple):
    ranks: list[OfRank]
    output_dir: Path

    @property
    def checkpoint(self) -> Path:
        return self.output_dir / "checkpoints" / "checkpoint-2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output_dir = tmp_path_factory.mktemp("sharded")
    return Run(run_on_ranks(train_and_save, 4, output_dir), output_dir)


def test_ranks_hold_half_of_their_stages(run: Run) -> None:
    for rank in run.ranks:
        # Rows of an odd number are not divided evenly.
        assert abs(rank.held_elements - rank.stage_elements / 2) < 0.02 * rank.stage_elements
        assert rank.moment_elements == 2 * rank.held_elements
        assert rank.gradient_elements == [rank.held_elements] * 2
        assert rank.are_sharded == [True] * 4


def test_every_rank_writes_full_tensors_of_some_names(run: Run) -> None:
    def files(pattern: str) -> list[str]:
        return sorted(path.name for path in run.checkpoint.glob(pattern))

    for key in ("optimizer", "ema"):
        assert files(f"{key}*") == [f"{key}_state_rank_{rank}.pt" for rank in range(4)]
    assert files("*.safetensors") == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    manifest = read_manifest(str(run.checkpoint))
    for key in ("model", "optimizer", "ema"):
        component = manifest.components[key]
        assert (component.sharing_pattern, component.group_name) == ("per_rank", None)
        assert component.metadata["sharding"] == {"num_shards": 2, "placement": "Shard(0)"}
    assert manifest.mesh == {"shape": [2, 2], "axis_names": ["data_parallel", "pipeline_parallel"]}


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_transformers_loads_the_trained_model(run: Run, kind: str) -> None:
    directory = run.checkpoint if kind == "checkpoint" else run.output_dir / "exported"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    found = loaded.state_dict()
    assert found.keys() == run.ranks[0].weights.keys()
    if kind == "checkpoint":
        assert all(torch.equal(found[name], tensor) for name, tensor in run.ranks[0].weights.items())


# --- settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dp_strategy": "divide"}, ["dp_strategy='divide'", "'replicate', 'shard'"]),
        ({"param_precision": "bf16_master"}, ["param_precision='bf16_master'", "dp_strategy='shard'"]),
        ({"save_on_each_node": True}, ["save_on_each_node=True", "dp_strategy='shard'"]),
        ({"fuse_optim_with_backward": True, "n_microbatches": 1}, ["fuse_optim_with_backward=True"]),
        ({"mixed_precision": "fp16"}, ["mixed_precision='fp16'", "'bf16'"]),
    ],
)
def test_contradicting_settings_are_rejected(settings: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        HybridTrainingArguments(**{**SHARD, **settings})
    for part in told:
        assert part in str(refusal.value)
