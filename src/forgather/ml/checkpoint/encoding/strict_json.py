"""Strict JSON for manifests, metadata and weight indices: duplicate keys, deep nesting and memory bombs are damage.

NaN and the infinities, which JSON does not have, are written as `{"__float__": "nan"}`; files of before, which have them
as bare words, are read too.
"""

import json
import math
from collections import Counter
from typing import Any

from forgather.ml.checkpoint.encoding.state_budget import FACTOR, budget_of
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from forgather.ml.checkpoint.files.regular_files import SMALL_FILE_BYTES

_FLOAT_TAG = "__float__"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# What CPython takes for an empty list or dict, for one more value, and for its key in a dict.
_CONTAINER_BYTES = 64
_VALUE_BYTES = 40
_KEY_BYTES = 80


def loads(data: bytes, path: str, file_bytes: int | None = None) -> Any:
    """Parse JSON text of the file `path`; whatever is wrong with it is a `CheckpointCorruptError` naming the file.

    The memory it takes is within the budget of the file, which has `file_bytes` if the text is only a part of it.
    """
    estimate, budget = _memory_of(data), budget_of(len(data) if file_bytes is None else file_bytes)
    if estimate > budget:
        raise CheckpointCorruptError(
            f"{path} is damaged: its {len(data):,} bytes of JSON would take about {estimate:,} bytes of memory"
        )
    try:
        return json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointCorruptError(f"{path} is damaged: it is not readable as JSON ({reason})") from error


def dumps(data: object, what: str, sort_keys: bool = False) -> bytes:
    """JSON text that `loads` takes back: padded with spaces where its memory would be over the budget of its size."""
    text = (json.dumps(with_tagged_floats(data), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n").encode()
    missing = _memory_of(text) - budget_of(len(text))
    if missing > 0:
        # A space takes two bytes of the estimate and adds four to the budget.
        text += b" " * -(-missing // (FACTOR - 2))
    if len(text) > SMALL_FILE_BYTES:
        raise CheckpointSaveError(
            f"{what} would have {len(text):,} bytes, and at most {SMALL_FILE_BYTES:,} are read back. Keep large state in a "
            "component of its own."
        )
    return text


def with_tagged_floats(value: object) -> object:
    """The same with floats that are not finite as JSON can hold them, and tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT_TAG: str(float(value))}
    if isinstance(value, dict):
        return {key: with_tagged_floats(inner) for key, inner in value.items()}
    return [with_tagged_floats(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _memory_of(data: bytes) -> int:
    """Estimate the memory of the parsed text from its punctuation, which takes no time, before anything is parsed."""
    containers = data.count(b"[") + data.count(b"{")
    return (
        2 * len(data) + _CONTAINER_BYTES * containers + _VALUE_BYTES * data.count(b",") + _KEY_BYTES * data.count(b":")
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> object:
    if len(pairs) == 1 and pairs[0][0] == _FLOAT_TAG and isinstance(pairs[0][1], str) and pairs[0][1] in _NOT_FINITE:
        return _NOT_FINITE[pairs[0][1]]
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} occurs twice")
    return content
