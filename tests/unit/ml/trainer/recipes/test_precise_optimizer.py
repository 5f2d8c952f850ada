"""`PreciseOptimizer`: float32 updates of bfloat16 parameters, for all portions, optimizers and layouts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.state.update_precision import MASTER, ROUNDING
from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.trainer.recipes import precise_optimizer
from forgather.ml.trainer.recipes.param_precision import with_precise_updates
from forgather.ml.trainer.recipes.precise_optimizer import PreciseOptimizer

PRECISIONS = ["bf16_master", "bf16_stochastic"]
Named = list[tuple[str, nn.Parameter]]


def parameters() -> Named:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (16, 4), "conv": (4, 2, 3, 3), "norm": (4,), "head": (5, 4), "scale": ()}
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    made["conv"] = made["conv"].to(memory_format=torch.channels_last)
    # A parameter in full precision among the others.
    return [*((name, nn.Parameter(one)) for name, one in made.items()), ("exact", nn.Parameter(torch.ones(3)))]


def precise(named: Named, precision: str, optimizer: Any = None, names: Sequence[str] | None = None) -> Any:
    chosen = [one for name, one in named if names is None or name in names]
    return with_precise_updates(optimizer or torch.optim.AdamW(chosen, lr=1e-3), precision, named, 7)


def train(named: Named, optimizers: Sequence[Any], num_steps: int = 3) -> dict[str, Tensor]:
    for step in range(num_steps):
        for number, (_, one) in enumerate(named):
            generator = torch.Generator().manual_seed(100 * step + number)
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return {name: one.detach().clone() for name, one in named}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_master_weights_are_updated_as_float32_parameters() -> None:
    named = parameters()
    twins: Named = [(name, nn.Parameter(one.detach().float())) for name, one in named]
    optimizer, plain = precise(named, "bf16_master"), torch.optim.AdamW([one for _, one in twins], lr=1e-3)
    for _ in range(3):
        for (_, one), (_, twin) in zip(named, twins, strict=True):
            one.grad = torch.randn_like(one)
            twin.grad = one.grad.float()
        optimizer.step()
        plain.step()
    for (name, one), (_, twin) in zip(named, twins, strict=True):
        if name != "exact":
            assert torch.equal(optimizer.state[one][MASTER], twin), name
        assert torch.equal(one, twin.to(one.dtype)), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_portions_do_not_change_the_result(precision: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (2**24, 1):
        monkeypatch.setattr(precise_optimizer, "_AT_ONCE", limit)
        named = parameters()
        inner = torch.optim.AdamW([one for _, one in named], lr=1e-3, fused=fused)
        results.append(train(named, [precise(named, precision, inner)]))
    assert_equal(*results)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_divided_over_optimizers_get_the_same_weights(precision: str) -> None:
    """As on the ranks of a pipeline, or with a composed optimizer."""
    whole, stages, composed = parameters(), parameters(), parameters()
    expected = train(whole, [precise(whole, precision)])
    halves = (("embed", "norm"), ("conv", "head", "scale", "exact"))
    assert_equal(expected, train(stages, [precise(stages, precision, names=names) for names in halves]))
    parts = [torch.optim.AdamW([one for name, one in composed if name in names], lr=1e-3) for names in halves]
    assert_equal(expected, train(composed, [precise(composed, precision, Multiopt(parts))]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.NAdam])
def test_optimizers_of_torch_keep_float32_state(cls: Any, precision: str) -> None:
    named = [pair for pair in parameters() if pair[0] != "exact"]
    optimizer = precise(named, precision, cls([one for _, one in named], lr=1e-2))
    before = {name: one.detach().clone() for name, one in named}
    after = train(named, [optimizer])
    assert {one.dtype for one in after.values()} == {torch.bfloat16}
    assert not any(torch.equal(after[name], before[name]) for name in ("embed", "head"))
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in values} <= {torch.float32}
    assert all(set(state) >= {optimizer.state_key} for state in optimizer.state.values())


def test_failed_step_leaves_groups_and_state_as_they_were() -> None:
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            if self.fails:
                raise ArithmeticError("no step")

    named = parameters()
    inner = Failing([one for _, one in named], lr=1e-3)
    optimizer = precise(named, "bf16_stochastic", inner)
    train(named, [optimizer])
    before = {name: one.detach().clone() for name, one in named if name != "exact"}
    inner.fails = True
    with pytest.raises(ArithmeticError):
        train(named, [optimizer], 1)
    assert [one for group in optimizer.param_groups for one in group["params"]] == [one for _, one in named]
    assert set(optimizer.state) == {one for _, one in named}
    assert optimizer.state[named[0][1]][ROUNDING] == {"seed": 7, "count": 3}
    assert_equal(before, {name: one.detach() for name, one in named})


@pytest.mark.parametrize(
    ("precision", "entry", "message"),
    [
        ("bf16_master", torch.zeros(3), "has shape"),
        ("bf16_master", torch.zeros(16, 4, dtype=torch.int64), "floating"),
        ("bf16_stochastic", {"seed": 0, "count": -1}, "count"),
        ("bf16_stochastic", {"seed": "0", "count": 1}, "seed"),
    ],
)
def test_invalid_entries_are_rejected(precision: str, entry: object, message: str) -> None:
    named = parameters()
    optimizer = precise(named, precision)
    train(named, [optimizer])
    state = OptimizerState(optimizer, named)
    saved = state.state_dict()
    saved["state"]["embed"][optimizer.state_key] = entry
    with pytest.raises(CheckpointLoadError, match=message):
        state.load_state_dict(saved)


def test_schedules_accept_the_wrapper() -> None:
    named = parameters()
    optimizer = precise(named, "bf16_master")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(named, [optimizer], 1)
    schedule.step()
    assert isinstance(optimizer, PreciseOptimizer)
    assert optimizer.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-4
