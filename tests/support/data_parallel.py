"""Data-parallel trainers for the ranks of a test, with the results of their runs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import Recorder, quiet_trainer


class Result(NamedTuple):
    """Losses, gradient norms, weights and metrics of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, Any]


def environment() -> StaticDistributedEnvironment:
    """Return the environment of this rank in a test that has initialised torch.distributed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return StaticDistributedEnvironment(rank=rank, local_rank=rank, world_size=size, local_world_size=size)


def ddp_trainer(output_dir: Path, model: nn.Module | None, train: Any, *callbacks: Any, **settings: Any) -> DDPTrainer:
    """Build a `quiet_trainer` of class `DDPTrainer` for the ranks of a test."""
    options = {"distributed_env": environment(), **settings.pop("trainer_options", {})}
    trainer = quiet_trainer(
        output_dir, model, train, *callbacks, trainer_class=DDPTrainer, trainer_options=options, **settings
    )
    assert isinstance(trainer, DDPTrainer)
    return trainer


def fsdp2_trainer(
    output_dir: Path, model: Callable[[], nn.Module] | nn.Module, train: Any, *callbacks: Any, **settings: Any
) -> FSDP2Trainer:
    """Build a `quiet_trainer` of class `FSDP2Trainer` for the ranks of a test, from a model or its `model_init`."""
    given = model if isinstance(model, nn.Module) else None
    options = {"distributed_env": environment(), **settings.pop("trainer_options", {})}
    if given is None:
        options["model_init"] = model
    trainer = quiet_trainer(
        output_dir, given, train, *callbacks, trainer_class=FSDP2Trainer, trainer_options=options, **settings
    )
    assert isinstance(trainer, FSDP2Trainer)
    return trainer


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or the full tensor of a sharded one. Collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def whole_moments(trainer: Trainer) -> dict[str, Tensor]:
    """Return the optimizer state in full tensors, as `<parameter>.<key>`."""
    names = {parameter: name for name, parameter in trainer.unwrapped_model().named_parameters()}
    return {
        f"{names[parameter]}.{key}": whole(value)
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def run(trainer: Trainer) -> Result:
    """Train, log every step, and return the result."""
    recorder = Recorder()
    recorder.changes_control = False  # type: ignore[attr-defined]
    trainer.add_callback(recorder)
    output = trainer.train()
    logs = [record for _, record in recorder.logs]
    return Result(
        [record.get("loss", math.nan) for record in logs],
        [record["grad_norm"] for record in logs],
        whole_weights(trainer.unwrapped_model()),
        {"step": output.global_step, **output.metrics},
    )


def assert_same_training(one: Result, other: Result, tolerance: float = 1e-6) -> None:
    """Assert that losses, norms and weights of two runs agree to a relative tolerance."""
    assert len(one.losses) == len(other.losses) > 0
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(one, name), dtype=torch.float64),
            torch.tensor(getattr(other, name), dtype=torch.float64),
            rtol=tolerance,
            atol=0.0,
        )
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        difference = (tensor.double() - other.weights[name].double()).norm() / tensor.double().norm()
        assert difference <= tolerance, f"{name}: {difference:.2e}"


Build = Callable[..., Trainer]
