"""A small model, torch optimizers and saved states, for tests of optimizer state."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.state.optimizer_state import OptimizerState

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01, foreach=False),
    "adamw_foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "adamw_amsgrad": lambda params: AdamW(params, lr=0.01, amsgrad=True),
    "adafactor": lambda params: Adafactor(params, lr=0.01),
}


class Model(nn.Module):
    """Model with parameters registered in either order; its output does not depend on the order."""

    first: nn.Linear
    second: nn.Linear
    third: nn.Linear

    def __init__(self, reverse: bool = False, width: int = 4) -> None:
        super().__init__()
        layers = {"first": (3, width), "second": (width, width), "third": (width, 2)}
        for name in reversed(layers) if reverse else layers:
            self.add_module(name, nn.Linear(*layers[name]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return x


def make_model(**options: Any) -> Model:
    model = Model(**options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range, scheduler: LambdaLR | None = None) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def by_decay(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def saved_state(optimizer: Optimizer, model: nn.Module, steps: int = 2) -> dict[str, Any]:
    wrapper = OptimizerState(optimizer, model.named_parameters())
    train(model, optimizer, range(steps))
    return through_file(wrapper.state_dict())
