"""Per-parameter norms, computed only for logged steps."""

from pathlib import Path

import pytest
import torch
from torch import nn

from forgather.ml.trainer.callbacks import GradLogger, WeightNormLogger
from forgather.ml.trainer.callbacks.parameter_norms import is_logged_next
from tests.unit.ml.trainer.callbacks.run import Run


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 2.0)
    model.bias.grad = torch.tensor([3.0, 4.0])
    return model


def test_gradient_norms_of_a_logged_step(tmp_path: Path) -> None:
    run = Run(tmp_path, GradLogger(), model=model_with_gradients(), global_step=1)
    run.step()
    logs = run.log(loss=1.0)
    assert logs["grad_norm/weight"] == pytest.approx(4.0)
    assert logs["grad_norm/bias"] == pytest.approx(5.0)


def test_nothing_is_computed_for_other_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, GradLogger(), model=model_with_gradients(), global_step=2)
    run.step()
    assert not [name for name in run.log(loss=1.0) if name.startswith("grad_norm/")]


def test_gradient_norms_of_an_earlier_record_are_not_repeated(tmp_path: Path) -> None:
    run = Run(tmp_path, GradLogger(), model=model_with_gradients(), global_step=1)
    run.step()
    run.log(loss=1.0)
    run.step()
    assert "grad_norm/bias" not in run.log(loss=1.0)


def test_parameters_without_gradient_are_skipped(tmp_path: Path) -> None:
    model = model_with_gradients()
    model.bias.grad = None
    run = Run(tmp_path, GradLogger(), model=model, global_step=1)
    run.step()
    logs = run.log(loss=1.0)
    assert "grad_norm/weight" in logs and "grad_norm/bias" not in logs


def test_weight_norms(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    logs = Run(tmp_path, WeightNormLogger("weight"), model=model).log(loss=1.0)
    assert logs["weight_norm/weight"] == pytest.approx(2.0)
    assert "weight_norm/bias" not in logs


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (2, {}, True),
        (3, {}, False),
        (10, {}, True),
        (1, {}, False),
        (1, {"logging_first_step": True}, True),
        (2, {"logging_strategy": "epoch"}, False),
    ],
)
def test_logged_steps_follow_the_logging_settings(tmp_path: Path, step: int, settings: dict, expected: bool) -> None:
    run = Run(tmp_path, global_step=step - 1)
    for name, value in settings.items():
        setattr(run.args, name, value)
    assert is_logged_next(run.args, run.state) is expected
