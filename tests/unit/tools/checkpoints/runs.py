"""Short runs of every trainer on the same model and data, for the tests of the checkpoint tools."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import token_samples

ADAMW = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1})}
BATCH = {"per_device_train_batch_size": 8}
HALF = {"per_device_train_batch_size": 4}
SAVED = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 0}


class Kind(NamedTuple):
    """Trainer class, its settings, and its number of ranks."""

    trainer_class: type[Trainer]
    settings: dict[str, Any]
    num_ranks: int


KINDS = {
    "single": Kind(Trainer, BATCH, 1),
    "ddp": Kind(DDPTrainer, HALF, 2),
    "fsdp2": Kind(FSDP2Trainer, HALF, 2),
    "pipeline": Kind(PipelineTrainer, BATCH, 2),
    "hybrid": Kind(HybridTrainer, {**HALF, "pp_size": 2, "n_microbatches": 2}, 4),
}


def model() -> Any:
    """Build the model of all runs: tied embeddings, whose state a pipeline has on two ranks."""
    torch.manual_seed(0)
    return tied_gpt2(2)


def trainer(name: str, output_dir: str, **settings: Any) -> Trainer:
    kind = KINDS[name]
    samples = token_samples(16)
    return trainer_of(
        kind.trainer_class,
        Path(output_dir),
        model,
        samples,
        trainer_options=ADAMW,
        **{**SAVED, **kind.settings, **settings},
    )


def train(name: str, output_dir: str) -> None:
    trainer(name, output_dir).train()


def trained(name: str, output_dir: Path) -> Path:
    """Train two steps on the ranks of a kind, and return the output directory."""
    kind = KINDS[name]
    if kind.num_ranks == 1:
        train(name, str(output_dir))
    else:
        run_on_ranks(train, kind.num_ranks, name, str(output_dir))
    return output_dir
