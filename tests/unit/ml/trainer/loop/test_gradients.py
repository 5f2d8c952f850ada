"""Gradient norm and clearing of gradients."""

import pytest
import torch
from torch import nn

from forgather.ml.trainer.loop.gradients import GradientNorm, clear_gradients


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("shapes", [((3, 4), (5,), ()), ((300, 300), (7,))], ids=["few elements", "many elements"])
def test_gradient_norm_equals_torch(shapes: tuple[tuple[int, ...], ...], norm_type: float) -> None:
    parameters = _parameters(*shapes)
    expected = torch.nn.utils.get_total_norm([one.grad for one in parameters], norm_type)
    torch.testing.assert_close(GradientNorm(parameters)(norm_type), expected)


def test_parameters_of_several_dtypes_and_without_gradient() -> None:
    parameters = [*_parameters((3,)), *_parameters((4,), dtype=torch.bfloat16), nn.Parameter(torch.ones(2))]
    expected = torch.nn.utils.get_total_norm([one.grad.float() for one in parameters[:2] if one.grad is not None])
    torch.testing.assert_close(GradientNorm(parameters)(), expected)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("others", [(), ((2,),)], ids=["one dtype", "and float32"])
@pytest.mark.parametrize("shapes", [((30, 40), (50,)), ((300, 300), (7,))], ids=["few elements", "many elements"])
def test_norm_of_narrow_gradients_is_computed_in_float32(
    shapes: tuple[tuple[int, ...], ...], others: tuple[tuple[int, ...], ...], dtype: torch.dtype, norm_type: float
) -> None:
    parameters = [*_parameters(*shapes, dtype=dtype), *_parameters(*others)]
    whole = torch.cat([one.grad.double().flatten() for one in parameters if one.grad is not None])
    norm = GradientNorm(parameters)(norm_type)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(whole, norm_type), rtol=1e-5, atol=0.0)


def test_no_gradient_at_all_has_norm_zero() -> None:
    assert GradientNorm([nn.Parameter(torch.ones(2))])() == 0


def test_gradients_are_cleared_in_every_group() -> None:
    parameters = _parameters((3,), (2,))
    clear_gradients(torch.optim.SGD([{"params": [one]} for one in parameters], lr=0.1))
    assert [one.grad for one in parameters] == [None, None]


def test_overridden_zero_grad_of_an_optimizer_is_called() -> None:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    (parameter,) = _parameters((3,))
    clear_gradients(Keeping([parameter], lr=0.1))
    assert parameter.grad is not None and not parameter.grad.any()
