"""Runs of trainers on the rehearsal device, with the host waits of each step."""

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.trainer import Trainer
from tests.support.rehearsal import watching
from tests.support.tiny_models import quiet_trainer, token_samples

MAX_STEPS = 6
LENGTH = 6


class Rehearsed(NamedTuple):
    """Host waits of the steps after the first two, hazards, and the counts of all copies."""

    waits: list[int]
    hazards: int
    table: dict[tuple[str, str, str], int]
    """Number of events by kind, name and line."""
    where: list[tuple[str, str]]
    """Name and line of each host wait in these steps."""

    def copies(self, kind: str, how: str, file: str = "") -> int:
        return sum(n for (one, name, where), n in self.table.items() if one == kind and how in name and file in where)


class _Waits:
    """Callback that notes the number of host waits at the end of each step."""

    changes_control = False

    def __init__(self, record: Any) -> None:
        self._record = record
        self.counts: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append(self._record.count("sync"))


def environment() -> StaticDistributedEnvironment:
    """Return the environment of this rank, with a separate device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.accelerator.set_device_index(rank)
    return StaticDistributedEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=size,
        local_world_size=size,
        device=f"cuda:{rank}",
        device_type="cuda",
    )


def samples(mask: str | None = None, positions: str | None = None, number: int = 96) -> list[dict[str, Tensor]]:
    """Token sequences; `mask` "ones" or "padded", `positions` "plain" or "packed" add these columns."""
    data = token_samples(number, LENGTH)
    for index, sample in enumerate(data):
        if mask is not None:
            sample["attention_mask"] = torch.ones(LENGTH, dtype=torch.int64)
            sample["attention_mask"][LENGTH - index % 3 if mask == "padded" else LENGTH :] = 0
        if positions is not None:
            sample["position_ids"] = torch.arange(LENGTH) % (3 if positions == "packed" else LENGTH)
    return data


def rehearse(
    output_dir: str | Path, trainer_class: type[Trainer], options: dict[str, Any], *callbacks: Any, **settings: Any
) -> Rehearsed:
    """Train a few steps on the device, with a log at the end."""
    if dist.is_initialized():
        options = {"distributed_env": environment(), **options}
    defaults: dict[str, Any] = {"use_cpu": False, "max_steps": MAX_STEPS, "max_grad_norm": 1.0}
    data = settings.pop("data", None) or samples()
    with watching() as record:
        waits = _Waits(record)
        trainer = quiet_trainer(
            Path(output_dir),
            None,
            data,
            waits,
            *callbacks,
            trainer_class=trainer_class,
            trainer_options={"optimizer_cls_and_kwargs": None, **options},
            per_device_train_batch_size=settings.pop("batch_size", 4),
            **{**defaults, **settings},
        )
        trainer.train()
    assert trainer.device.type == "cuda"
    # The first step resolves the loss, and DDP arranges its buckets in the second.
    first, last = waits.counts[1], waits.counts[-1]
    events = [event for event in record.events if event.kind == "sync"][first:last]
    later = waits.counts[1:]
    steps = [after - before for before, after in itertools.pairwise(later)]
    assert math.isfinite(trainer.state.log_history[-1].get("train_loss", 0.0))
    return Rehearsed(
        steps, record.count("hazard"), dict(record.summary()), [(event.name, event.where) for event in events]
    )


def assert_no_waits(run: Rehearsed) -> None:
    assert run.waits == [0] * (MAX_STEPS - 2), run.where
    assert run.hazards == 0
