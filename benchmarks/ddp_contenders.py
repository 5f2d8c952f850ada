"""Training loops that the data-parallel benchmark compares: the loops of the step benchmark on two ranks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from step_contenders import (
    Contenders,
    Task,
    measure_norm,
    train_accelerate,
    train_bare,
    train_fabric,
    train_lightning,
    train_ours,
    train_transformers,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

NUM_RANKS = 2


@dataclass
class RankTask(Task):
    """Task of a contender on each rank. A batch is for one rank, but one rank may make the batches of all ranks."""

    first_input: Tensor | None = field(init=False, default=None)
    """Model input of the first step. Trial passes without gradients do not count."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self.first_input = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                handle.remove()

        handle = self.model.register_forward_pre_hook(keep_input, with_kwargs=True)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        input_ids = torch.stack(samples)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def sharded_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset, self.size.batch_size, sampler=DistributedSampler(self.dataset), collate_fn=self.collate
        )


def _bare(task: RankTask) -> None:
    train_bare(task, DistributedDataParallel(task.model), task.sharded_loader())


def _bare_like_ours(task: RankTask) -> None:
    model = DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    train_bare(task, model, task.sharded_loader(), after_backward=measure_norm)


def _ours(task: RankTask, **settings: Any) -> None:
    from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer, DDPTrainingArguments

    train_ours(task, DDPTrainer, DDPTrainingArguments, **settings)


def _ours_dispatched(task: RankTask) -> None:
    _ours(task, dispatch_batches=True)


def _ours_sharded(task: RankTask) -> None:
    _ours(task, dispatch_batches=False)


def _ours_unwatched(task: RankTask) -> None:
    _ours(task, dispatch_batches=True, watch={"enabled": False})


def _ours_zero(task: RankTask) -> None:
    _ours(task, dispatch_batches=True, ddp={"shard_optimizer": True})


def _ours_checked_each_step(task: RankTask) -> None:
    _ours(task, dispatch_batches=True, replica_check_steps=1)


def _ours_checked(task: RankTask) -> None:
    _ours(task, dispatch_batches=True, replica_check_steps=100)


def _transformers(task: RankTask) -> None:
    # Its default searches for unused parameters at every step. No other contender does.
    train_transformers(task, ddp_backend="gloo", ddp_find_unused_parameters=False)


def _lightning(task: RankTask) -> None:
    train_lightning(task, devices=NUM_RANKS, strategy="ddp")


def _fabric(task: RankTask) -> None:
    train_fabric(task, devices=NUM_RANKS, strategy="ddp")


BARE = "bare DDP loop"
BARE_LIKE_OURS = "bare DDP loop, Forgather settings"
OURS = "Forgather DDPTrainer, dispatched"
OURS_SHARDED = "Forgather DDPTrainer, sharded"
OURS_UNWATCHED = "Forgather DDPTrainer, dispatched, no watch"
OURS_ZERO = "Forgather DDPTrainer, ZeRO-1"
OURS_CHECKED_EACH_STEP = "Forgather DDPTrainer, replica_check_steps=1"
OURS_CHECKED = "Forgather DDPTrainer, replica_check_steps=100"
_OUR_MODULE = "forgather.ml.trainer.ddp.ddp_trainer"
CONTENDERS: Contenders[RankTask] = {
    BARE: (_bare, "torch"),
    BARE_LIKE_OURS: (_bare_like_ours, "torch"),
    OURS: (_ours_dispatched, _OUR_MODULE),
    OURS_SHARDED: (_ours_sharded, _OUR_MODULE),
    OURS_UNWATCHED: (_ours_unwatched, _OUR_MODULE),
    OURS_ZERO: (_ours_zero, _OUR_MODULE),
    OURS_CHECKED_EACH_STEP: (_ours_checked_each_step, _OUR_MODULE),
    OURS_CHECKED: (_ours_checked, _OUR_MODULE),
    "Lightning Fabric": (_fabric, "lightning"),
    "accelerate": (train_accelerate, "accelerate"),
    "transformers.Trainer": (_transformers, "transformers"),
    "Lightning Trainer": (_lightning, "lightning"),
}
