"""Stochastic rounding: unbiased, reproducible by key, and without effect on values that bfloat16 can hold."""

import pytest
import torch

from forgather.ml.optim.stochastic_rounding import random_bits, round_stochastically_, rounding_key

CPU = torch.device("cpu")


def rounded(values: torch.Tensor, key: int) -> torch.Tensor:
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    round_stochastically_(target, values.clone(), key)
    return target


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_rounding_is_unbiased(fraction: float) -> None:
    # Numbers of bfloat16 next to 1 are 1/128 apart.
    values = torch.full((100_000,), 1.0 + fraction / 128)
    found = rounded(values, rounding_key(0, "weight", 0)).double()
    assert set(found.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert (found.mean().item() - 1.0) * 128 == pytest.approx(fraction, abs=0.006)
    assert torch.equal(rounded(-values, rounding_key(0, "weight", 0)).double(), -found), "the same draws"


def test_bfloat16_values_are_unchanged() -> None:
    values = torch.randn(1001).bfloat16().float()
    values[:5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    # All bits set is the NaN that CUDA computes.
    values.view(torch.int32)[5] = 0x7FFFFFFF
    for number in range(20):
        found = rounded(values, number)
        torch.testing.assert_close(found.float(), values, rtol=0, atol=0, equal_nan=True)


def test_draws_depend_only_on_the_key_and_the_element() -> None:
    keys = [rounding_key(0, "a", 0), rounding_key(1, "a", 0), rounding_key(0, "b", 0), rounding_key(0, "a", 1)]
    draws = [random_bits(4096, key, CPU) for key in keys]
    for number, one in enumerate(draws):
        for other in draws[:number]:
            assert (one == other).float().mean() < 0.01
    assert torch.equal(random_bits(1001, keys[0], CPU), draws[0][:1001])


def test_draws_are_fixed_by_the_checkpoint_format() -> None:
    """A resumed run must draw the same numbers in every later version."""
    key = rounding_key(42, "model.layers.0.weight", 7)
    assert key == 5040944938875164456
    assert random_bits(6, key, CPU).tolist() == [-24417, 9222, -11992, -23641, 3895, -17277]


def test_bits_are_uniform() -> None:
    bits = random_bits(200_003, rounding_key(0, "a", 0), CPU).int() & 0xFFFF
    for number in range(16):
        assert (bits >> number & 1).double().mean().item() == pytest.approx(0.5, abs=0.005), number
    pairs = torch.stack([bits[:-1], bits[1:]]).double()
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01
