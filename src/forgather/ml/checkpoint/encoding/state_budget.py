"""Memory budget of decoding: what a file of n bytes may become, whatever it says.

Tensors, texts and bytes: at most 4 n + 64 MiB. Python objects have a price of their own, since a list of a million numbers
takes more memory than its file: at most 24 bytes for each byte of the pickle that describes them, which no state that
was saved exceeds. Readers of state files, JSON and codec values spend from one budget before they allocate.
"""

from collections import Counter
from collections.abc import Hashable, Iterable

from forgather.ml.checkpoint.errors import StateDecodingError

FACTOR = 4
OBJECT_FACTOR = 24
FREE_BYTES = 64 * 2**20
READER_BYTES = 32 * 2**20
"""What of it the buffers of a `HashingReader` and its thread take."""

POINTER_BYTES = 9
"""A reference in a list that grows."""
SCALAR_BYTES = 32
SHELL_BYTES = 72
"""A list or dict without its entries."""
TENSOR_BYTES = 512
"""A tensor and its storage as Python objects, without the content."""

# Sets and dicts take quadratic time when many keys have one hash.
_MOST_COLLISIONS = 64


def budget_of(num_bytes: int) -> int:
    """The memory that decoding a file of `num_bytes` may take."""
    return FACTOR * num_bytes + FREE_BYTES


def count_hashes(keys: Iterable[Hashable], counts: Counter[int] | None = None) -> None:
    """Raise `StateDecodingError` for keys that collide in a dict or set; `counts` has those that are there already."""
    counts = Counter() if counts is None else counts
    for key in keys:
        hashed = hash(key)
        counts[hashed] += 1
        if counts[hashed] > _MOST_COLLISIONS:
            raise StateDecodingError(f"more than {_MOST_COLLISIONS} keys of a set or dict have the same hash")


class MemoryBudget:
    """Bytes that decoding one file may still allocate."""

    def __init__(self, file_bytes: int = 2**60) -> None:
        self._file_bytes = file_bytes
        self._left = budget_of(file_bytes) - READER_BYTES

    def allow_objects(self, pickle_bytes: int) -> None:
        """Add what the objects of a pickle may take."""
        self._left += OBJECT_FACTOR * pickle_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return what was spent on something that is gone."""
        self._left += num_bytes

    def spend(self, num_bytes: int) -> None:
        """Take from the budget, or raise `StateDecodingError` when the content is too large for its file."""
        self._left -= num_bytes
        if self._left < 0:
            raise StateDecodingError(
                f"its {self._file_bytes:,} bytes would take more memory than any state that was saved in so many: it "
                "repeats or inflates its content"
            )
