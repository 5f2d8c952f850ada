"""Multiopt: several optimizers as one, with torch's optimizers and schedulers."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.trainer.amp import AMPContext

MakeScheduler = Callable[[Optimizer], LRScheduler]

SCHEDULERS: dict[str, MakeScheduler] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.5, 0.05], total_steps=20, cycle_momentum=False),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def make_parts(model: nn.Sequential) -> list[Optimizer]:
    return [SGD(model[0].parameters(), lr=0.1, momentum=0.9), AdamW(model[1].parameters(), lr=0.01)]


def train(model: nn.Module, optimizers: list[Any], schedulers: list[Any], steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        for one in [*optimizers, *schedulers]:
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(ones: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def test_multiopt_trains_like_its_separate_optimizers() -> None:
    alone, together = make_model(), make_model()
    train(alone, make_parts(alone), [], range(5))
    train(together, [Multiopt(make_parts(together))], [], range(5))
    assert_same(weights(together), weights(alone))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedules_act_on_all_optimizers(kind: str) -> None:
    multiopt = Multiopt(make_parts(make_model()))
    scheduler = SCHEDULERS[kind](multiopt)
    first = [part.param_groups[0]["lr"] for part in multiopt.optimizers]
    multiopt.step()
    scheduler.step()
    now = [part.param_groups[0]["lr"] for part in multiopt.optimizers]
    assert scheduler.get_last_lr() == now
    assert all(one != other for one, other in zip(first, now, strict=True))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_resumed_schedule_continues_bit_for_bit(kind: str) -> None:
    def build() -> tuple[nn.Module, Multiopt, LRScheduler]:
        model = make_model()
        multiopt = Multiopt(make_parts(model))
        return model, multiopt, SCHEDULERS[kind](multiopt)

    model, multiopt, scheduler = build()
    train(model, [multiopt], [scheduler], range(4))
    saved = copy.deepcopy([model.state_dict(), multiopt.state_dict(), scheduler.state_dict()])
    train(model, [multiopt], [scheduler], range(4, 8))

    resumed, resumed_multiopt, resumed_scheduler = build()
    resumed.load_state_dict(saved[0])
    resumed_multiopt.load_state_dict(saved[1])
    resumed_scheduler.load_state_dict(saved[2])
    train(resumed, [resumed_multiopt], [resumed_scheduler], range(4, 8))
    assert_same(weights(resumed), weights(model))


def test_plateau_schedules_act_on_all_optimizers() -> None:
    multiopt = Multiopt(make_parts(make_model()))
    scheduler = ReduceLROnPlateau(multiopt, factor=0.5, patience=0)
    for _ in range(2):
        scheduler.step(1.0)
    assert [part.param_groups[0]["lr"] for part in multiopt.optimizers] == [0.05, 0.005]


def test_momentum_cycles_are_rejected_unless_all_optimizers_support_them() -> None:
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(Multiopt(make_parts(make_model())), max_lr=0.1, total_steps=5)


def test_param_groups_list_stays_live() -> None:
    multiopt = Multiopt(make_parts(make_model()))
    groups = multiopt.param_groups
    multiopt.optimizers[0].load_state_dict(multiopt.optimizers[0].state_dict())
    assert multiopt.param_groups is groups
    groups[0]["lr"] = 7.0
    assert multiopt.optimizers[0].param_groups[0]["lr"] == 7.0


def test_optimizer_state_by_name_resumes_bit_for_bit() -> None:
    model = make_model()
    multiopt = Multiopt(make_parts(model))
    by_name = OptimizerState(multiopt, model.named_parameters())
    scheduler = SCHEDULERS["lambda"](multiopt)
    train(model, [multiopt], [scheduler], range(3))
    saved = copy.deepcopy([model.state_dict(), by_name.state_dict(), scheduler.state_dict()])
    train(model, [multiopt], [scheduler], range(3, 6))

    resumed = make_model()
    # In another order: state is matched by name.
    resumed_multiopt = Multiopt(reversed(make_parts(resumed)))
    resumed_by_name = OptimizerState(resumed_multiopt, resumed.named_parameters())
    resumed_scheduler = SCHEDULERS["lambda"](resumed_multiopt)
    resumed.load_state_dict(saved[0])
    resumed_by_name.load_state_dict(saved[1])
    resumed_scheduler.load_state_dict({**saved[2], "base_lrs": saved[2]["base_lrs"][::-1]})
    train(resumed, [resumed_multiopt], [resumed_scheduler], range(3, 6))
    assert_same(weights(resumed), weights(model))


def test_state_is_routed_to_the_owning_optimizer() -> None:
    model = make_model()
    multiopt = Multiopt(make_parts(model))
    second = model[1].weight
    assert second not in multiopt.state and len(multiopt.state) == 0
    multiopt.state[second]["step"] = torch.tensor(3.0)
    assert list(multiopt.optimizers[1].state) == list(multiopt.state) == [second]
    assert not multiopt.optimizers[0].state
    del multiopt.state[second]
    assert not multiopt.optimizers[1].state
    with pytest.raises(KeyError):
        multiopt.state[nn.Parameter(torch.zeros(1))]


def test_zero_grad_reaches_all_parameters() -> None:
    model = make_model()
    multiopt = Multiopt(make_parts(model))
    model(torch.ones(1, 3)).sum().backward()
    multiopt.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    multiopt.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_closure_is_evaluated_once() -> None:
    calls: list[int] = []
    multiopt = Multiopt(make_parts(make_model()))

    def closure() -> float:
        calls.append(1)
        return 2.5

    assert multiopt.step(closure) == 2.5
    assert calls == [1]


def test_fp16_overflow_skips_the_step_of_all_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    multiopt = Multiopt(make_parts(model))
    before = weights(model)
    amp = AMPContext("fp16", "cpu")
    outputs: Tensor = model(torch.ones(1, 3))
    amp.scale_loss(outputs.sum()).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient[0] = float("inf")
    with caplog.at_level(logging.INFO):
        amp.optimizer_step(multiopt)
    assert_same(weights(model), before)
    assert caplog.messages == ["loss scale dropped from 65536 to 32768"]


def test_copies_are_complete_and_independent() -> None:
    model = make_model()
    multiopt = Multiopt(make_parts(model))
    train(model, [multiopt], [], range(2))
    twin = copy.deepcopy(multiopt)
    twin.param_groups[0]["lr"] = 9.0
    assert multiopt.param_groups[0]["lr"] == 0.1
    assert len(twin.state) == len(multiopt.state) == 4
    twin.step()


def test_step_hooks_run() -> None:
    multiopt = Multiopt(make_parts(make_model()))
    calls: list[str] = []
    multiopt.register_step_post_hook(lambda *_: calls.append("stepped"))
    multiopt.step()
    assert calls == ["stepped"]


def test_invalid_optimizers_and_states_are_rejected() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="at least one"):
        Multiopt([])
    with pytest.raises(ValueError, match=r"in both SGD \(number 0\) and AdamW \(number 1\)"):
        Multiopt([SGD(model.parameters(), lr=0.1), AdamW(model[1].parameters())])
    multiopt = Multiopt(make_parts(model))
    with pytest.raises(ValueError, match="add the group to one of"):
        multiopt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="has 2 optimizers, but the state dict holds the states of 1"):
        multiopt.load_state_dict({"optimizers": [multiopt.optimizers[0].state_dict()]})
    with pytest.raises(ValueError, match=r"\['param_groups', 'state'\]"):
        multiopt.load_state_dict(multiopt.optimizers[0].state_dict())
