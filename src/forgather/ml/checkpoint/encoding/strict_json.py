"""Strict JSON for manifests, metadata and weight indices: rejects duplicate keys, deep nesting and memory bombs.

JSON has no NaN or infinity: they are written as `{"__float__": "nan"}`. Older files have them as bare words and are
still read. Every JSON file of a checkpoint goes through `loads` and `dumps`.
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

# Memory of CPython for an empty list or dict, for one more value, and for its key in a dict.
_CONTAINER_BYTES = 64
_VALUE_BYTES = 40
_KEY_BYTES = 80


def loads(data: bytes, path: str, file_bytes: int | None = None) -> Any:
    """Parse JSON text of the file `path`; raise `CheckpointCorruptError` with the path if anything is wrong.

    The result must fit the memory budget of the file. Pass `file_bytes` if the text is only a part of the file.
    """
    # Before parsing, because json.loads cannot be stopped when it takes too much memory.
    estimate, budget = _memory_of(data), budget_of(len(data) if file_bytes is None else file_bytes)
    if estimate > budget:
        raise CheckpointCorruptError(
            f"{path} is damaged: its {len(data):,} bytes of JSON would take about {estimate:,} bytes of memory"
        )
    try:
        return json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointCorruptError(f"{path} is damaged: it is not valid JSON ({reason})") from error


def dumps(data: object, what: str, sort_keys: bool = False) -> bytes:
    """Return JSON text that `loads` accepts, padded with spaces if it would exceed the memory budget of its size."""
    text = (json.dumps(with_tagged_floats(data), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n").encode()
    missing = _memory_of(text) - budget_of(len(text))
    if missing > 0:
        # Each space adds two bytes to the estimate and FACTOR (four) bytes to the budget.
        text += b" " * -(-missing // (FACTOR - 2))
    if len(text) > SMALL_FILE_BYTES:
        raise CheckpointSaveError(
            f"{what} would have {len(text):,} bytes, but at most {SMALL_FILE_BYTES:,} can be read back. Move large state "
            "into a separate component."
        )
    return text


def with_tagged_floats(value: object) -> object:
    """Return a copy with non-finite floats as tagged dicts and tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT_TAG: str(float(value))}
    if isinstance(value, dict):
        return {key: with_tagged_floats(inner) for key, inner in value.items()}
    return [with_tagged_floats(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _memory_of(data: bytes) -> int:
    """Estimate the memory of the parsed text by counting its punctuation, which is cheap."""
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
