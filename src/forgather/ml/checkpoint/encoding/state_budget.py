"""Memory budget of decoding: limits how much memory an untrusted file of n bytes can make its reader allocate.

Decoding may take 4 n + 64 MiB, plus 24 bytes for each byte of a pickle, because Python objects are larger than
their pickled form. No saved state exceeds these limits. The archive reader, the unpicklers and the decoder charge one
`MemoryBudget` per file. `strict_json` compares an estimate with `budget_of`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable

from forgather.ml.checkpoint.errors import StateDecodingError

FACTOR = 4
OBJECT_FACTOR = 24
FREE_BYTES = 64 * 2**20
READER_BYTES = 32 * 2**20
"""Part of `FREE_BYTES` that the buffers of the reading threads take."""

POINTER_BYTES = 9
"""Bytes of one reference in a growing list."""
SCALAR_BYTES = 32
SHELL_BYTES = 72
"""Bytes of a list or dict without its entries."""
TENSOR_BYTES = 512
"""Bytes of the Python objects of a tensor and its storage, without the content."""

# Sets and dicts take quadratic time when many keys have the same hash.
_MOST_COLLISIONS = 64


def budget_of(num_bytes: int) -> int:
    """Return the bytes of memory that decoding a file of `num_bytes` may take."""
    return FACTOR * num_bytes + FREE_BYTES


def count_hashes(keys: Iterable[Hashable], counts: Counter[int] | None = None) -> None:
    """Raise `StateDecodingError` if too many keys of a dict or set have the same hash.

    `counts` has the hashes of keys that the container already holds, and is updated.
    """
    counts = Counter() if counts is None else counts
    for key in keys:
        hashed = hash(key)
        counts[hashed] += 1
        if counts[hashed] > _MOST_COLLISIONS:
            raise StateDecodingError(f"more than {_MOST_COLLISIONS} keys of a set or dict have the same hash")


class MemoryBudget:
    """Number of bytes that decoding one file may still allocate."""

    # The default is practically unlimited, for callers of `decode_state` that pass no budget.
    def __init__(self, file_bytes: int = 2**60) -> None:
        self._file_bytes = file_bytes
        self._left = budget_of(file_bytes) - READER_BYTES

    def allow_objects(self, pickle_bytes: int) -> None:
        """Add the allowance for the Python objects of a pickle."""
        self._left += OBJECT_FACTOR * pickle_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes to the budget after an object was freed."""
        self._left += num_bytes

    def spend(self, num_bytes: int) -> None:
        """Take bytes from the budget; raise `StateDecodingError` if the content is too large for its file."""
        self._left -= num_bytes
        if self._left < 0:
            raise StateDecodingError(
                f"decoding its {self._file_bytes:,} bytes would take more memory than any saved state of this size: its "
                "content is repeated or inflated"
            )
