"""Stochastic rounding of optimizer updates from float32 to bfloat16, with counter-based random numbers.

A value is rounded to one of its two bfloat16 neighbours, to the nearer one more often: the expected result is the value
itself. The random bits of an element are a hash of a key and its index (SplitMix64), so they need no generator state and
are the same on every device and rank. `StochasticRounding` in `trainer/recipes/precise_optimizer.py` calls it.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_DRAWS_PER_HASH = 4
"""Number of 16-bit draws in one 64-bit hash."""


def rounding_key(seed: int, name: str, count: int) -> int:
    """Return the key of one rounding of one tensor: a signed 64-bit integer."""
    text = f"{seed}/{count}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def random_bits(num_elements: int, key: int, device: torch.device) -> Tensor:
    """Return 16 random bits per element, as int16."""
    hashes = torch.arange(-(-num_elements // _DRAWS_PER_HASH), dtype=torch.int64, device=device)
    hashes.mul_(_signed(_GOLDEN)).add_(key)
    for factor, shift in zip((*_FACTORS, None), _SHIFTS, strict=True):
        # The shift of signed integers repeats the sign bit, so the mask removes the repeated bits.
        hashes.bitwise_xor_((hashes >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            hashes.mul_(_signed(factor))
    return hashes.view(torch.int16)[:num_elements]


def round_stochastically_(target: Tensor, values: Tensor, key: int) -> None:
    """Write float32 `values` to the bfloat16 tensor `target`, rounded stochastically."""
    draws = random_bits(values.numel(), key, values.device).to(torch.int32).bitwise_and_(0xFFFF)
    # A bfloat16 number is the upper half of a float32 number. The lower half, as a fraction of its range, is the
    # probability that the sum carries over.
    rounded = draws.view(values.shape).add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    # The sum could turn a NaN into a number, and so hide it.
    target.copy_(torch.where(torch.isnan(values), values, rounded))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
