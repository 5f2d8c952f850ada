"""DDP: ranks that share a batch train like one device with the full batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, assert_same_training, ddp_trainer, run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples

SETTINGS: dict[str, Any] = {
    "max_steps": 20,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "max_grad_norm": 0.5,
    "shuffle": True,
    "eval_strategy": "steps",
    "eval_steps": 10,
}
GLOBAL_BATCH = 8
NUM_SAMPLES = 52
"""Not a multiple of the global or the per-rank batch size: the last round of an epoch is smaller."""


def adamw() -> dict[str, Any]:
    # The large epsilon prevents updates from rounding noise in gradients that are really zero.
    return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2})}


def train_whole(output_dir: Path, **settings: Any) -> tuple[Result, float]:
    settings = {**SETTINGS, "per_device_train_batch_size": GLOBAL_BATCH, "per_device_eval_batch_size": 4, **settings}
    options = {"eval_dataset": token_samples(11, seed=3), **settings.pop("trainer_options", {})}
    trainer = quiet_trainer(output_dir, tiny_llama(), token_samples(NUM_SAMPLES), trainer_options=options, **settings)
    return run(trainer), trainer.evaluate()["eval_loss"]


def train_in_parts(output_dir: Path, world_size: int, **settings: Any) -> tuple[Result, float, type[Trainer]]:
    settings = {
        **SETTINGS,
        "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "per_device_eval_batch_size": 3,
        **settings,
    }
    options = {"eval_dataset": token_samples(11, seed=3), **settings.pop("trainer_options", {})}
    trainer = ddp_trainer(output_dir, tiny_llama(), token_samples(NUM_SAMPLES), trainer_options=options, **settings)
    return run(trainer), trainer.evaluate()["eval_loss"], type(trainer)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, dispatched": (2, {}),
    "2 ranks, sharded": (2, {"dispatch_batches": False}),
    "2 ranks, dispatched, accumulation": (2, {"gradient_accumulation_steps": 3}),
    "2 ranks, sharded, accumulation, adamw": (
        2,
        {"dispatch_batches": False, "gradient_accumulation_steps": 2, "trainer_options": adamw()},
    ),
    "4 ranks, dispatched, accumulation": (4, {"gradient_accumulation_steps": 2}),
    "4 ranks, sharded": (4, {"dispatch_batches": False}),
    "4 ranks, dispatched, adamw": (4, {"trainer_options": adamw()}),
    "2 ranks, dispatched, incomplete rounds dropped": (
        2,
        {"dataloader_drop_last": True, "per_device_eval_batch_size": 4},
    ),
    "2 ranks, sharded, incomplete rounds dropped": (
        2,
        {"dataloader_drop_last": True, "dispatch_batches": False, "per_device_eval_batch_size": 4},
    ),
    "2 ranks, dispatched, workers": (2, {"dataloader_num_workers": 2}),
    "2 ranks, only evaluation sharded": (2, {"dispatch_eval_batches": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_like_one_device(case: str, tmp_path: Path) -> None:
    world_size, settings = CASES[case]
    results = run_on_ranks(_train_case, world_size, tmp_path / "parts", case)
    whole_settings = {name: value for name, value in settings.items() if not name.startswith("dispatch")}
    whole, whole_eval = train_whole(tmp_path / "whole", **whole_settings)
    for parts, parts_eval, kind in results:
        assert kind is DDPTrainer
        assert_same_training(parts, whole)
        assert parts_eval == pytest.approx(whole_eval, rel=1e-6)
        for name in ("total_tokens", "train_samples", "effective_batch_size", "epoch", "step"):
            assert parts.metrics[name] == whole.metrics[name], name
        assert parts.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=1e-6)


def _train_case(output_dir: Path, case: str) -> tuple[Result, float, type[Trainer]]:
    world_size, settings = CASES[case]
    return train_in_parts(output_dir, world_size, **settings)
