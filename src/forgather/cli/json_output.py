"""JSON documents of the commands, with a versioned schema. Imports no third-party package."""

import json
import math
from collections.abc import Mapping

# JSON escapes control characters below 32 only. Terminals obey those from 127 to 159 too, and surrogates are no UTF-8.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *range(0xD800, 0xE000))}


def print_json(schema: str, content: Mapping[str, object]) -> None:
    """Print one JSON object whose key "schema" is `forgather.<schema>`, such as "forgather.checkpoint.ls/1".

    The number after the slash changes only when a key is removed or changes its meaning; keys may be added.
    Numbers that JSON cannot express become the strings "NaN", "Infinity" and "-Infinity".
    """
    document = {"schema": f"forgather.{schema}", **content}
    text = json.dumps(_expressible(document), indent=2, ensure_ascii=False, allow_nan=False)
    print(text.translate(_ESCAPED))


def _expressible(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _expressible(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_expressible(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
