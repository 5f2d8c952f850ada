"""ZeRO-1 checkpoints: moments move by name between sharded DDP, DDP, one device and pipelines, bit for bit."""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import run
from tests.support.pipelines import joined, llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, token_samples

GLOBAL_BATCH = 12
ADAMW = (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1})
TOLERANCE = 1e-6


class Leg(NamedTuple):
    """Section of a run with one trainer class and world size."""

    trainer_class: type[Trainer]
    num_ranks: int
    shards: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        if self.trainer_class is PipelineTrainer:
            return {"per_device_train_batch_size": GLOBAL_BATCH, "n_microbatches": 2}
        ddp = {"ddp": {"shard_optimizer": self.shards}} if self.trainer_class is DDPTrainer else {}
        return {"per_device_train_batch_size": GLOBAL_BATCH // self.num_ranks, **ddp}


SINGLE = Leg(Trainer, 1)
LEGS = [
    Leg(DDPTrainer, 2, True),
    Leg(DDPTrainer, 3, True),
    SINGLE,
    Leg(DDPTrainer, 4, True),
    Leg(DDPTrainer, 2),
    Leg(DDPTrainer, 2, True),
    Leg(PipelineTrainer, 2),
    Leg(DDPTrainer, 3, True),
    Leg(DDPTrainer, 2),
    SINGLE,
]


class Journal(NamedTuple):
    """State at the first and the last step of a leg, of all ranks together, and the losses between."""

    began: dict[str, Tensor]
    ended: dict[str, Tensor]
    losses: list[float]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and moments of all ranks, by name."""
    assert trainer.optimization is not None
    own = {name: one.detach().clone() for name, one in trainer._named_parameters()}
    for name, state in trainer.optimization.state.state_dict()["state"].items():
        own |= {f"{name}.{key}": value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    return joined(own) if dist.is_initialized() else own


def travel(leg: Leg, output_dir: Path, max_steps: int, resume: Path | None = None, **settings: Any) -> Journal:
    began: dict[str, Tensor] = {}
    recorder = Recorder(on_train_begin=lambda trainer, **_: began.update(state_of(trainer)))
    trainer = trainer_of(
        leg.trainer_class,
        output_dir,
        functools.partial(llama, 2),
        token_samples(60),
        recorder,
        trainer_options={"optimizer_cls_and_kwargs": ADAMW},
        **{
            "max_steps": max_steps,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "logging_strategy": "steps",
            "logging_steps": 1,
            "save_strategy": "steps",
            "resume_from_checkpoint": False if resume is None else str(resume),
            **leg.settings,
            **settings,
        },
    )
    losses = run(trainer).losses
    return Journal(began, state_of(trainer), losses)


def _travel(
    leg: Leg, output_dir: Path, max_steps: int, resume: Path | None, settings: dict[str, Any] | None = None
) -> Journal:
    return travel(leg, output_dir, max_steps, resume, **(settings or {}))


def checkpoint_in(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"checkpoint-{step}"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 60
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_moments_move_between_topologies_bit_for_bit(tmp_path: Path) -> None:
    journals: list[Journal] = []
    resume = None
    for step, leg in enumerate(LEGS, start=1):
        output_dir = tmp_path / str(step)
        if leg.num_ranks == 1:
            journals.append(travel(leg, output_dir, step, resume))
        else:
            journals.append(run_on_ranks(_travel, leg.num_ranks, leg, output_dir, step, resume)[0])
        resume = checkpoint_in(output_dir, step)
    for before, after in itertools.pairwise(journals):
        assert_equal(after.began, before.ended)
    stayed = travel(SINGLE, tmp_path / "stayed", len(LEGS))
    losses = [loss for journal in journals for loss in journal.losses]
    assert losses == pytest.approx(stayed.losses, rel=TOLERANCE)
    for name, tensor in stayed.ended.items():
        difference = (journals[-1].ended[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert difference <= TOLERANCE, name


@pytest.mark.parametrize("precision", sampled(["fp32", "bf16_master"], ["bf16_master"]))
def test_sharding_can_be_switched_at_a_resume(precision: str, tmp_path: Path) -> None:
    """All four continuations have the same result, also from bfloat16 master weights to float32 weights."""
    ends = []
    for before in (False, True):
        first = tmp_path / f"{before}"
        start = Leg(DDPTrainer, 2, before)
        run_on_ranks(_travel, 2, start, first, 3, None, {"param_precision": precision})
        files = sorted(path.name for path in checkpoint_in(first, 3).glob("optimizer_state*"))
        ranks = [f"optimizer_state_rank_{rank}.pt" for rank in range(2)]
        assert files == (ranks if before else ["optimizer_state.pt"])
        pattern = read_manifest(str(checkpoint_in(first, 3))).components["optimizer"].sharing_pattern
        assert pattern == ("per_rank" if before else "replicated")
        for after in (False, True):
            second = tmp_path / f"{before} {after}"
            # The save at the end compares the replicas.
            ends.append(run_on_ranks(_travel, 2, Leg(DDPTrainer, 2, after), second, 5, checkpoint_in(first, 3))[0])
    for end in ends[1:]:
        assert_equal(end.began, ends[0].began)
        assert_equal(end.ended, ends[0].ended)
        assert end.losses == ends[0].losses and len(end.losses) == 2
