"""Columns, groups of similar length and optimizers by name on two ranks: the same weights as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_arguments import FSDP2TrainingArguments
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama, token_samples, weights

CLASSES: dict[str, tuple[type[Trainer[Any]], int]] = {
    "one": (Trainer, 4),
    "ddp": (DDPTrainer, 2),
    "fsdp2": (FSDP2Trainer, 2),
    "pipeline": (PipelineTrainer, 4),
}
"""Trainer class, and samples per rank of steps with four samples."""


def trained(folder: str, kind: str, optim: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    cls, size = CLASSES[kind]
    settings = {"output_dir": folder, "use_cpu": True, "seed": 0, "save_strategy": "no", "logging_strategy": "no"}
    settings |= {"remove_unused_columns": True, "train_sampling_strategy": "group_by_length", "max_steps": 5}
    settings |= {"per_device_train_batch_size": size, "optim": optim, "learning_rate": 1e-2, "weight_decay": 0.1}
    settings |= {"n_microbatches": 2} if kind == "pipeline" else {}
    data = [{**one, "length": 7 * index % 11, "text": "words"} for index, one in enumerate(token_samples(24))]
    options: dict[str, Any] = {} if kind == "one" else {"distributed_env": environment()}
    trainer = cls(args=settings, model_init=tiny_llama, train_dataset=data, default_callbacks=False, **options)
    trainer.train()
    return weights(trainer.unwrapped_model())


@pytest.mark.parametrize(
    ("kind", "optim"),
    [("ddp", "adafactor"), ("pipeline", "rmsprop"), ("fsdp2", "sgd")],
)
def test_ranks_train_like_one_process(kind: str, optim: str, tmp_path: Path) -> None:
    expected = trained(str(tmp_path / "one"), "one", optim)
    together: dict[str, Tensor] = {}
    for part in run_on_ranks(trained, 2, str(tmp_path / kind), kind, optim):
        together |= part
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_8bit"])
def test_optimizers_of_full_parameters_are_refused_for_shards(optim: str) -> None:
    words = f"optim='{optim}' cannot be combined with .*each rank has a shard"
    with pytest.raises(ValueError, match=words):
        FSDP2TrainingArguments(optim=optim)
    with pytest.raises(ValueError, match=words):
        HybridTrainingArguments(optim=optim, dp_strategy="shard")
