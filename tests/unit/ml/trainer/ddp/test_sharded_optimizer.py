"""ZeRO-1 (`ddp.shard_optimizer`): the same training as DDP bit for bit, with a fraction of the moments per rank."""

import functools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.trainer.ddp import DDPTrainer, DDPTrainingArguments
from forgather.ml.trainer.ddp.parameter_broadcast import ParameterBroadcast
from forgather.ml.trainer.ddp.sharded_optimizer import ShardedOptimizer, assign_owners
from tests.support.data_parallel import ddp_trainer, environment, run
from tests.support.pipelines import joined
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, tiny_llama, token_samples

# Rounds of 2 x 2 samples: the last round of an epoch has one empty batch, and the second epoch begins within the run.
NUM_SAMPLES = 18
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}


def moments_of(trainer: Any) -> dict[str, Tensor]:
    """Tensors in the optimizer state of this rank, by name."""
    states = trainer.optimization.state.state_dict()["state"]
    return {
        f"{name}.{key}": value.detach().clone()
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def trained(output_dir: Path, shards: bool, **settings: Any) -> tuple[DDPTrainer, dict[str, Any]]:
    """Train, and return everything that must not depend on sharding."""
    settings = {**SETTINGS, **settings}
    # Objects such as optimizers belong to one model, so cases make them here.
    model = settings.pop("model", tiny_llama)()
    options = {"optimizer_cls_and_kwargs": None, **settings.pop("objects", adamw(fused=True))(model)}
    ddp = {**settings.pop("ddp", {}), "shard_optimizer": shards}
    trainer = ddp_trainer(
        output_dir, model, token_samples(NUM_SAMPLES), *settings.pop("callbacks", ()), trainer_options=options, ddp=ddp,
        **settings,
    )  # fmt: skip
    result = run(trainer)
    facts = {
        # The norm of a step with NaN gradients is logged as None.
        "losses": torch.tensor([float("nan") if one is None else one for one in result.losses]),
        "norms": torch.tensor([float("nan") if one is None else one for one in result.norms]),
        **result.weights,
        **joined(moments_of(trainer)),
    }
    if trainer.recipes.average is not None:
        facts |= {f"average of {name}": one for name, one in trainer.recipes.average.state_dict()["averages"].items()}
    return trainer, facts


# --- the same training


def adamw(**options: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda _: {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, **options})}


def two_optimizers(_: nn.Module) -> dict[str, Any]:
    return {
        "optimizer_groups": {
            "attention": {"regex": "self_attn", "factory": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)},
            "norms": {"regex": "norm", "config": {"weight_decay": 0.0}},
        }
    }


def own_groups(_: nn.Module) -> dict[str, Any]:
    """Return a factory that makes two groups, one with a single parameter."""

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(named)
        heads = [one for name, one in named if "lm_head" in name]
        rest = [one for name, one in named if "lm_head" not in name]
        return torch.optim.Adagrad([{"params": heads, "lr": 0.02}, {"params": rest}], lr=0.01)

    return {"optimizer_factory": make}


def given(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Spoiling:
    """Loss with NaN at the third call on one rank."""

    def __init__(self) -> None:
        self.calls = 0

    def num_targets(self, labels: Tensor) -> int:
        return labels.numel()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += logits.requires_grad
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten().clamp(min=0))
        return loss * float("nan") if self.calls == 3 and dist.get_rank() == 1 else loss


def spoiled(make: Callable[[nn.Module], dict[str, Any]]) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {**make(model), "compute_loss_func": Spoiling()}


class Unfreezing:
    """Callback that adds parameters to the optimizer in training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["optimizer"].param_groups[0]["params"].extend(added_parameters(kwargs["model"]))


def added_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    return (one for name, one in model.named_parameters() if "layers.1" in name)


def some_parameters(model: nn.Module) -> dict[str, Any]:
    added = {id(one) for one in added_parameters(model)}
    chosen = [one for one in model.parameters() if id(one) not in added]
    return {"optimizer": torch.optim.AdamW(chosen, lr=1e-2)}


CASES: dict[str, dict[str, Any]] = {
    "fused adamw, two groups": {},
    "small buckets of gradients": {"ddp": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": False}},
    "foreach": {"objects": adamw(foreach=True)},
    "one tensor at a time, ema": {"objects": adamw(foreach=False), "ema_decay": 0.9},
    "two optimizers": {"objects": two_optimizers},
    "groups of a factory, state in the constructor": {"objects": own_groups, "max_grad_norm": None},
    "given optimizer and schedule": {"objects": given},
    "added parameters": {"objects": some_parameters, "callbacks": [Unfreezing()]},
    "skipped step, fused": {"objects": spoiled(adamw(fused=True)), "nonfinite_grad": "skip"},
    "skipped step": {"objects": spoiled(adamw(foreach=True)), "nonfinite_grad": "skip"},
    "fp16, fused": {"mixed_precision": "fp16", "objects": spoiled(adamw(fused=True))},
    "fp16": {"mixed_precision": "fp16", "objects": spoiled(adamw(foreach=True))},
    "bf16": {"mixed_precision": "bf16"},
    "master weights": {"param_precision": "bf16_master"},
    "stochastic rounding, ema": {"param_precision": "bf16_stochastic", "ema_decay": 0.9},
}
NUM_RANKS = {"fused adamw, two groups": 3}


def _train_both(output_dir: Path, case: str) -> list[str]:
    """Train without and with sharding, and return the names of different values."""
    _, expected = trained(output_dir / "whole", False, **CASES[case])
    trainer, found = trained(output_dir / "sharded", True, **CASES[case])
    assert isinstance(trainer.optimizer, ShardedOptimizer)
    assert found.keys() == expected.keys() and len(found) > 40
    assert not any(parameter.grad is not None for parameter in trainer.unwrapped_model().parameters())
    own = {name for name, owner in trainer.optimizer.owner_by_name().items() if owner == dist.get_rank()}
    assert {name.rsplit(".", 1)[0] for name in moments_of(trainer)} <= own
    return [name for name, one in expected.items() if not torch.equal(one.nan_to_num(7), found[name].nan_to_num(7))]


@pytest.mark.parametrize("case", sampled(CASES, list(CASES)[::2]))
def test_sharded_training_equals_ddp_bit_for_bit(case: str, tmp_path: Path) -> None:
    for different in run_on_ranks(_train_both, NUM_RANKS.get(case, 2), tmp_path, case):
        assert different == []


def _broadcast_buckets(is_small: bool) -> None:
    sizes = {"bucket_bytes": 64, "large_bytes": 4096} if is_small else {}
    rank = dist.get_rank()
    shapes = [(3,), (40, 40), (5, 2), (), (0,), (16,), (9, 1), (2, 3)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
    values = [torch.full(shape, float(i), dtype=dtypes[i % 4]) for i, shape in enumerate(shapes)]
    values[2] = values[2].t()
    tensors = [one if i % 3 == rank else torch.zeros_like(one) for i, one in enumerate(values)]
    group = dist.new_group()
    ParameterBroadcast([tensors[owner::3] for owner in range(3)], group, **sizes).run()
    assert all(torch.equal(one, value) for one, value in zip(tensors, values, strict=True))


@pytest.mark.parametrize("is_small", [False, True])
def test_broadcast_gives_every_rank_the_values_of_the_owners(is_small: bool) -> None:
    run_on_ranks(_broadcast_buckets, 3, is_small)


# --- the partition and its memory


def test_owners_are_balanced_and_independent_of_order() -> None:
    generator = random.Random(0)
    sizes = {f"layer.{i}": generator.choice([0, 8, 64, 640, 4000]) for i in range(60)}
    shuffled = dict(generator.sample(list(sizes.items()), len(sizes)))
    for num_ranks in (1, 2, 3, 8):
        loads = [0] * num_ranks
        owners = assign_owners(sizes, loads)
        assert owners == assign_owners(shuffled, [0] * num_ranks) and owners.keys() == sizes.keys()
        assert sum(loads) == sum(sizes.values())
        assert max(loads) <= sum(loads) / num_ranks + max(sizes.values())
    assert assign_owners({"b": 4, "a": 4, "c": 1}, [0, 0]) == {"a": 0, "b": 1, "c": 0}


def _state_bytes(output_dir: Path, shards: bool) -> int:
    trainer, _ = trained(output_dir, shards, max_steps=2)
    return sum(one.nbytes for name, one in moments_of(trainer).items() if not name.endswith(".step"))


def test_each_rank_keeps_its_share_of_the_moments(tmp_path: Path) -> None:
    whole = run_on_ranks(_state_bytes, 3, tmp_path / "whole", False)
    parts = run_on_ranks(_state_bytes, 3, tmp_path / "sharded", True)
    largest = 2 * max(one.nbytes for one in tiny_llama().parameters())
    assert len(set(whole)) == 1 and sum(parts) == whole[0]
    assert max(parts) <= whole[0] / 3 + largest and max(parts) < 0.4 * whole[0]


class OneParameter(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight.requires_grad_(False)


def _more_ranks_than_parameters(output_dir: Path, precision: str) -> None:
    settings = {"model": OneParameter, "lr_scheduler_type": "constant_with_warmup", "param_precision": precision}
    trainer, expected = trained(output_dir / "straight", True, **settings)
    assert bool(moments_of(trainer)) == (dist.get_rank() == 0)
    for max_steps in (3, 6):
        saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": max_steps}
        trainer, found = trained(output_dir / "resumed", True, **settings, **saves)
    assert torch.equal(found["losses"], expected["losses"][3:])
    assert all(torch.equal(found[name], expected[name]) for name in expected if name not in ("losses", "norms"))


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_a_rank_without_parameters_trains_and_resumes(precision: str, tmp_path: Path) -> None:
    run_on_ranks(_more_ranks_than_parameters, 2, tmp_path, precision)


# --- one rank, and refused combinations


def test_one_rank_is_not_sharded(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, TokenModel(), token_samples(4), trainer_class=DDPTrainer, max_steps=2, ddp={"shard_optimizer": True}
    )
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD
    patterns = {one.key: one.sharing_pattern for one in trainer.get_state_components()}
    assert patterns["optimizer"] is SharingPattern.REPLICATED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"post_local_sgd": {"enabled": True}}, "post_local_sgd.enabled=True.*needs all moments.*Turn one"),
        ({"ema_decay": 0.9, "param_precision": "bf16_master"}, "lacks the master weights.*'bf16_stochastic'"),
        ({"fuse_optim_with_backward": True, "max_grad_norm": None}, "fuse_optim_with_backward=True.*DDP"),
    ],
)
def test_refused_combinations(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DDPTrainingArguments(output_dir=str(tmp_path), ddp={"shard_optimizer": True}, **settings)


class Referring(torch.optim.SGD):
    """Optimizer that updates a list of parameters instead of its groups."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.members = [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.members:
            one.sub_(one.grad, alpha=0.1)


class Coupling(torch.optim.SGD):
    """Optimizer with an option that depends on all of its parameters, as the distance estimate of Prodigy."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["distance"] = sum(float(one.detach().norm()) for one in group["params"])


def _refused(output_dir: Path, optimizer: type) -> str:
    options = {"objects": lambda _: {"optimizer_cls_and_kwargs": (optimizer, {"lr": 0.1})}}
    with pytest.raises(ValueError) as refusal:
        trained(output_dir, True, save_strategy="steps", save_steps=1, **options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        (Referring, ["Referring", "outside of its param_groups", "ddp.shard_optimizer=False"]),
        (Coupling, ["group 0 differ between ranks", "distance", "each parameter separately"]),
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused(optimizer: type, parts: list[str], tmp_path: Path) -> None:
    for message in run_on_ranks(_refused, 2, tmp_path, optimizer):
        assert all(part in message for part in parts), message


def _different_optimizers(output_dir: Path) -> str:
    def make(model: nn.Module) -> dict[str, Any]:
        return {"optimizer": torch.optim.SGD(list(model.parameters())[dist.get_rank() :], lr=0.1)}

    with pytest.raises(ValueError, match="the same parameters on every rank") as refusal:
        trained(output_dir, True, objects=make)
    return str(refusal.value)


def test_ranks_with_different_optimizers_are_refused(tmp_path: Path) -> None:
    first, second = run_on_ranks(_different_optimizers, 2, tmp_path)
    assert first == second and "embed_tokens" in first


def _step_by_hand(output_dir: Path) -> int:
    """Train with an override of `_train_step` that calls the optimizer itself."""

    class ByHand(DDPTrainer):  # type: ignore[type-arg]
        def _train_step(self, data_iterator: Any) -> Any:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            loss = self._forward_backward_step(input_dict, labels)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss, None, 1

    trainer = quiet_trainer(
        output_dir,
        TokenModel(),
        token_samples(8),
        Recorder(),
        trainer_class=ByHand,
        trainer_options={"distributed_env": environment()},
        momentum=0.9,
        max_steps=3,
        save_strategy="steps",
        ddp={"shard_optimizer": True},
    )
    trainer.train()
    return len(trainer.optimizer.state)


def test_an_overridden_step_is_sharded_too(tmp_path: Path) -> None:
    assert run_on_ranks(_step_by_hand, 2, tmp_path) == [1, 1]
