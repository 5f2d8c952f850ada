"""Permutations of sample indices: a Feistel network in O(1) memory, and `torch.randperm` for older runs.

`data_order` uses them as the shuffled order of an epoch. Their values are part of the checkpoint format: a change needs
a new version of the order.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.uint64]
Permutation = Callable[[Indices], Indices]
"""Function from positions to the indices of samples."""

_ROUNDS = 12
# Small datasets need more rounds until all permutations are equally likely, and are quick to shuffle anyway.
_ROUNDS_IF_SMALL = 24
_SMALL = 2**16
_HALF = np.uint64(32)
# Odd multipliers without a bit pattern: the fractional parts of the golden ratio and of the square root of 3.
_FIRST_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SECOND_FACTOR = np.uint64(0xBB67AE8584CAA73B)


class KeyedPermutation:
    """Permutation of [0, `num_samples`) that depends on the numbers of `key` only.

    An index is a pair (row, column) of a table with about sqrt(n) rows. Each round rotates every row, or every column,
    by a hash of its number, which is a bijection of the table. The table has up to about sqrt(n) cells too many. A
    position that ends in one of them is permuted again until it leaves them (cycle walking).
    """

    def __init__(self, num_samples: int, *key: int) -> None:
        self._num_samples = np.uint64(num_samples)
        # Even: with an odd number of rows and of columns, every round is an even permutation, so half of all permutations
        # could not occur.
        num_rows = math.isqrt(max(num_samples - 1, 0)) // 2 * 2 + 2
        self._num_rows = np.uint64(num_rows)
        self._num_columns = np.uint64(max(-(-num_samples // num_rows), 1))
        num_rounds = _ROUNDS_IF_SMALL if num_samples < _SMALL else _ROUNDS
        text = " ".join(map(str, key)).encode()
        self._round_keys = np.frombuffer(hashlib.shake_256(text).digest(8 * num_rounds), "<u8").astype(np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at some positions, all below `num_samples`."""
        indices = self._permuted(positions)
        # This ends: a permutation moves in cycles, so a walk from a valid position meets a valid one again, at the
        # latest where it began.
        while (outside := np.flatnonzero(indices >= self._num_samples)).size:
            indices[outside] = self._permuted(indices[outside])
        return indices

    def _permuted(self, cells: Indices) -> Indices:
        rows, columns = np.divmod(cells, self._num_columns)
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                _move(rows, self._num_rows, columns, key)
            else:
                _move(columns, self._num_columns, rows, key)
        return rows * self._num_columns + columns


def _move(moved: Indices, size: np.uint64, other: Indices, key: np.uint64) -> None:
    """Add a hash of `other` and the key to `moved`, modulo `size`, in place."""
    offset = other ^ key
    offset *= _FIRST_FACTOR
    offset ^= offset >> _HALF
    offset *= _SECOND_FACTOR
    # The upper half is a fraction of 2**32, and the product scales it to [0, size). This is faster than a division.
    offset >>= _HALF
    offset *= size
    offset >>= _HALF
    moved += offset
    # `moved % size`, without a division. A negative difference wraps around to a huge number, so the minimum is right.
    np.minimum(moved, moved - size, out=moved)


class DrawnPermutation:
    """Permutation from `torch.randperm`, for runs that began with it; 8 bytes per sample."""

    def __init__(self, num_samples: int, seed: int) -> None:
        # A separate generator: the permutation must not depend on the global random state, nor change it.
        generator = torch.Generator().manual_seed(seed)
        self._indices: Indices = torch.randperm(num_samples, generator=generator, device="cpu").numpy().view(np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at some positions."""
        return self._indices[positions]
