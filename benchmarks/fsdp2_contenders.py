"""Training loops that the FSDP2 benchmark compares, all with the same shards, batches, fused AdamW and clipping."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from ddp_contenders import NUM_RANKS, RankTask
from step_contenders import Contenders, train_bare, train_ours
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

MAX_GRAD_NORM = 1.0
LAYERS = {"transformer_layers_path": "blocks"}
_NUM_BATCHES = 64


class _Indices(Dataset[int]):
    """Samples that are only numbers: the collator looks up the ready batch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class ShardedTask(RankTask):
    """Task with batches that each rank has in memory, in the order of dispatched batches."""

    batches: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches = [self._batch(number * NUM_RANKS + dist.get_rank()) for number in range(_NUM_BATCHES)]

    def _batch(self, number: int) -> dict[str, Tensor]:
        start = number * self.size.batch_size
        return self.collate([self.dataset[index] for index in range(start, start + self.size.batch_size)])

    def ready_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of this rank that begins with a sample, from memory."""
        return self.batches[indices[0] // (self.size.batch_size * NUM_RANKS) % _NUM_BATCHES]


def clip_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Clip sharded gradients as torchtitan does: one norm over all DTensors, reduced once."""
    norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, MAX_GRAD_NORM, norm)


def _bare(task: ShardedTask) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in task.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(task.model, mesh=mesh, reshard_after_forward=False)
    train_bare(task, task.model, itertools.cycle(task.batches), after_backward=clip_gradients)


def _train(task: ShardedTask, given: Mapping[str, Any], **settings: Any) -> None:
    from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer, FSDP2TrainingArguments

    train_ours(
        task,
        lambda **usual: FSDP2Trainer(**{**usual, **given}),
        FSDP2TrainingArguments,
        max_grad_norm=MAX_GRAD_NORM,
        shuffle=False,
        fsdp2=LAYERS,
        **settings,
    )


def _ours(task: ShardedTask) -> None:
    given = {"train_dataset": _Indices(len(task.dataset)), "data_collator": task.ready_batch}
    _train(task, given, dispatch_batches=False)


def _ours_dispatched(task: ShardedTask) -> None:
    _train(task, {})


BARE = "bare fully_shard loop"
OURS = "Forgather"
OURS_DISPATCHED = "Forgather, dispatched"
_OUR_MODULE = "forgather.ml.trainer.fsdp2.fsdp2_trainer"
CONTENDERS: Contenders[ShardedTask] = {
    BARE: (_bare, "torch"),
    OURS: (_ours, _OUR_MODULE),
    OURS_DISPATCHED: (_ours_dispatched, _OUR_MODULE),
}
