"""Comparison of two tensors: bits, values, NaN, dtypes."""

import math

import pytest
import torch

from forgather.tools.checkpoints.tensor_comparison import compare_tensors

QUIET, OTHER = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


def test_equal_bits_are_equal_also_for_nan() -> None:
    tensor = torch.tensor([1.0, math.nan, -math.inf])
    assert compare_tensors(tensor, tensor.clone()) is None


@pytest.mark.parametrize(("a", "b"), [(torch.tensor([0.0]), torch.tensor([-0.0])), (QUIET, OTHER)])
def test_tensors_with_equal_values_may_differ_only_in_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    change = compare_tensors(a, b)
    assert change is not None and change.only_bits and change.change == 0


def test_largest_differences_are_absolute_and_relative() -> None:
    change = compare_tensors(torch.tensor([3.0, 4.0, 0.5]), torch.tensor([3.0, 5.0, 0.25]))
    assert change is not None
    assert (change.num_different, change.max_abs, change.max_rel) == (2, 1.0, 0.5)
    larger = math.sqrt(9 + 25 + 0.0625)
    assert change.change == pytest.approx(math.sqrt(1 + 0.0625) / larger)


def test_a_new_nan_is_an_infinite_change() -> None:
    change = compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))
    assert change is not None and change.num_different == 1 and change.max_abs == math.inf


def test_large_integers_are_compared_exactly() -> None:
    change = compare_tensors(torch.tensor([2**60]), torch.tensor([2**60 + 1]))
    assert change is not None and change.num_different == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_every_dtype_of_a_checkpoint_can_be_compared(dtype: torch.dtype) -> None:
    change = compare_tensors(torch.tensor([0.0, 1.0]).to(dtype), torch.tensor([1.0, 1.0]).to(dtype))
    assert change is not None and change.num_different == 1 and change.max_abs == 1


def test_values_of_different_dtypes_are_compared() -> None:
    change = compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert change is not None and change.only_bits
