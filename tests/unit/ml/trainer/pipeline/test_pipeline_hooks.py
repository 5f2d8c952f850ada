"""Hooks and attributes of pipeline trainers for subclasses (contract, sections 2 and 3)."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineSchedulerT
from tests.support.data_parallel import Result, assert_same_training
from tests.support.pipelines import tied_gpt2, trainer_of, whole_result
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import token_samples

MODEL = functools.partial(tied_gpt2, 4)
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "n_microbatches": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "max_grad_norm": 1.0,
    "logging_strategy": "steps",
    "logging_steps": 1,
}
OF_STAGES = (
    *("mesh", "pp_group", "n_pipeline_stages", "scheduler", "pipeline_modules", "sharing_metadata", "shard_index"),
    *("stage_indices", "pp_has_first_stage", "pp_has_last_stage", "pp_last_stage_rank"),
)


def made(kind: type[PipelineTrainer[Any]], output_dir: Path, **settings: Any) -> PipelineTrainer[Any]:
    trainer = trainer_of(kind, output_dir, MODEL, token_samples(24), **{**SETTINGS, **settings})
    assert isinstance(trainer, PipelineTrainer)
    return trainer


def alone(kind: type[PipelineTrainer[Any]], output_dir: Path, **settings: Any) -> PipelineTrainer[Any]:
    """Construct a trainer in one process, as one of two ranks."""
    env = StaticDistributedEnvironment(world_size=2, local_world_size=2)
    return made(kind, output_dir, trainer_options={"distributed_env": env}, **settings)


# --- attributes


def attributes(output_dir: Path) -> dict[str, Any]:
    """Train on ranks and return the pipeline attributes."""
    trainer = made(PipelineTrainer, output_dir, schedule="1f1b")
    before = [getattr(trainer, name) for name in OF_STAGES]
    trainer.train()
    values = {name: getattr(trainer, name) for name in OF_STAGES}
    assert isinstance(values["scheduler"], PipelineSchedulerT) and isinstance(values["scheduler"], Schedule1F1B)
    assert trainer.unwrapped_model() is trainer.pipeline.part
    assert values["pipeline_modules"] == list(trainer.pipeline.own.values())
    whole = {name for name, _ in trainer.model.named_parameters(remove_duplicate=False)}
    own = {name for name, _ in trainer.unwrapped_model().named_parameters(remove_duplicate=False)}
    meta = {name for name, one in trainer.model.named_parameters(remove_duplicate=False) if one.is_meta}
    assert own < whole and meta == whole - own
    plain = {name: values[name] for name in OF_STAGES[7:]}
    return {"before": before, "stages": values["n_pipeline_stages"], "tied": values["sharing_metadata"], **plain}


def test_attributes_are_none_before_preparation_and_per_rank_afterwards(tmp_path: Path) -> None:
    first, last = run_on_ranks(attributes, 2, tmp_path)
    for found in (first, last):
        assert found.pop("before") == [None] * len(OF_STAGES)
        assert found.pop("stages") == 2 and found.pop("pp_last_stage_rank") == 1
        assert sorted(found.pop("tied")[0]) == ["lm_head.weight", "transformer.wte.weight"]
    assert first == {"stage_indices": (0,), "pp_has_first_stage": True, "pp_has_last_stage": False}
    assert last == {"stage_indices": (1,), "pp_has_first_stage": False, "pp_has_last_stage": True}


def test_state_is_declared_right_after_construction(tmp_path: Path) -> None:
    shared = {"scheduler": SharingPattern.REPLICATED, "trainer": SharingPattern.REPLICATED}
    own = {**shared, "rng": SharingPattern.PER_RANK}
    stages = dict.fromkeys(("model", "optimizer"), SharingPattern.PER_RANK)
    copies = dict.fromkeys(("model", "optimizer"), SharingPattern.PER_GROUP)
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (PipelineTrainer, {}, {**own, **stages, "dataset": SharingPattern.GLOBAL}),
        (HybridTrainer, {"pp_size": 2}, {**own, **copies, "dataset": SharingPattern.GLOBAL}),
        (
            HybridTrainer,
            {"pp_size": 2, "dispatch_batches": False},
            {**own, **copies, "dataset": SharingPattern.PER_GROUP},
        ),
    ]
    for kind, settings, expected in cases:
        components = alone(kind, tmp_path, **settings).get_state_components()
        assert {one.key: one.sharing_pattern for one in components} == expected
        compared = {one.key for one in components if one.validate_replication}
        assert compared == ({"model", "optimizer"} if kind is HybridTrainer else set())


# --- hooks that are called


class Hooked(PipelineTrainer[Any]):
    """Trainer that records the calls of pipeline hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def _construct_model(self, device: torch.device) -> nn.Module:
        self.calls.append(f"construct on {device.type}")
        return super()._construct_model(device)

    def _get_example(self, dataloader: Any) -> Any:
        assert dataloader is self.train_dataloader
        (inputs,), keywords = super()._get_example(dataloader)
        self.calls.append(f"example of {inputs.shape[0]} rows on {inputs.device.type}")
        return (inputs,), keywords

    def _split_model(self, model: nn.Module, example: Any, stage_indices: Any) -> Any:
        self.calls.append(f"split into {stage_indices}")
        return super()._split_model(model, example, stage_indices)

    def _all_reduce_norm(self, total_norm: Tensor, norm_type: float) -> Tensor:
        self.calls.append(f"norm {norm_type}")
        return super()._all_reduce_norm(total_norm, norm_type)


def hooks_of(output_dir: Path) -> list[str]:
    """Train on ranks without clipping, so that no rank needs the full norm, and return the calls."""
    trainer = made(Hooked, output_dir, max_grad_norm=0.0)
    assert isinstance(trainer, Hooked)
    trainer.train()
    return trainer.calls


def test_pipeline_hooks_are_called_in_order(tmp_path: Path) -> None:
    first, last = run_on_ranks(hooks_of, 2, tmp_path)
    split = ["construct on meta", "example of 2 rows on meta", "split into [(0,), (1,)]"]
    assert first == [*split, "construct on cpu", *["norm 2.0"] * 3]
    assert last == [*split, *["norm 2.0"] * 3]


class OwnStep(PipelineTrainer[Any]):
    """Trainer with a custom step, written with the hooks of the contract."""

    def _train_step(self, data_iterator: Iterator[Mapping[str, Any]]) -> tuple[Tensor, Tensor | None, int | Tensor]:
        losses, tokens = [], []
        is_last = False
        while not is_last:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            losses.append(self._forward_backward_step(input_dict, labels))
            tokens.append(self._count_batch_tokens(input_dict, labels))
            is_last = self._should_sync_gradients()
        norm = self._clip_grad_norm(self.args.max_grad_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum(), norm, sum(tokens)


class OwnHybridStep(OwnStep, HybridTrainer[Any]):
    pass


def trained(kind: type[PipelineTrainer[Any]], output_dir: Path, settings: dict[str, Any]) -> Result:
    """Train on ranks and return the result."""
    return whole_result(made(kind, output_dir, **settings))


@pytest.mark.parametrize("is_hybrid", [False, True], ids=["pipeline", "hybrid"])
def test_custom_step_trains_like_the_built_in_step(is_hybrid: bool, tmp_path: Path) -> None:
    """Gradients of tied weights are summed and gradients of replicas reduced, also with a custom step."""
    kinds: tuple[Any, Any] = (HybridTrainer, OwnHybridStep) if is_hybrid else (PipelineTrainer, OwnStep)
    settings, num_ranks = ({"pp_size": 2}, 4) if is_hybrid else ({}, 2)
    ours, own = (run_on_ranks(trained, num_ranks, kind, tmp_path / kind.__name__, settings)[0] for kind in kinds)
    assert_same_training(ours, own, tolerance=0.0)


# --- hooks that cannot work


class Backward(PipelineTrainer[Any]):
    def _backward(self, loss: Tensor) -> None:
        loss.backward()


def test_backward_hook_is_rejected_because_the_schedule_runs_it(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Backward\._backward would never be called: torch's schedule runs the backward"
    ):
        alone(Backward, tmp_path)


class Wrapped(PipelineTrainer[Any]):
    def _wrap(self) -> None:
        self.model = nn.Sequential(self.model)


def train_wrapped(output_dir: Path) -> None:
    made(Wrapped, output_dir).train()


def test_wrap_that_replaces_the_model_is_rejected_on_every_rank(tmp_path: Path) -> None:
    for outcome in outcomes_on_ranks(train_wrapped, 2, tmp_path):
        assert "Wrapped._wrap replaced self.model by a Sequential, which would never run" in str(outcome.error_message)
