"""JSON mutations: values of other types, extra, missing or repeated keys, and text that is not JSON."""

import json
from collections.abc import Callable
from typing import Any

from tests.guarantees.hostile_checkpoints.fuzz.place import (
    MANIFEST,
    METADATA,
    REMOVED,
    Place,
    edited,
    is_only_other_data,
)

_RAW = "@raw@"
_TWIN = "@twin@"
_HUGE_FILE_BYTES = 70 * 2**20

ODD_STRINGS = (
    *(
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/../b",
        "./a",
        "a//b",
        "a/",
        "\0",
        "a\0b",
        "\ud800",
        "\u202e",
        "%s%n",
        "CON",
    ),
    *("0", "-1", "nan", "true", "null", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999", "2026-13-45"),
    *(
        "9999-12-31T23:59:59.999999-23:59",
        "2026-01-01",
        "pytorch_model.bin",
        "model.safetensors",
        "rng_state_rank_0.pt",
    ),
    *("optimizer_state.pt", "trainer_state.pt", MANIFEST, METADATA, "model", "rng", "external", "none", "per_rank"),
)
TAGGED = (
    {"__forgather__": "range", "bounds": [0, 10**18, 1]},
    {"__forgather__": "deque", "items": [1], "maxlen": 10**18},
    {"__forgather__": "ndarray", "dtype": "S0", "shape": [10**12], "order": "C", "data": []},
    {"__forgather__": "bytes", "data": [1]},
    {"__forgather__": "int", "hex": "f" * 200_000},
    {"__forgather__": "set", "items": [[]]},
    {"__forgather__": "path", "kind": "Path", "path": "/etc/passwd"},
    {"__forgather__": "enum", "class": "signal:Signals", "name": "SIGKILL"},
    {"__forgather__": "dataclass", "class": "torch._inductor.cpu_vec_isa:VecAVX2", "fields": {"_arch_flags": "x"}},
    {"__forgather__": "torch_generator", "device": "cpu", "state": [1]},
    {"__forgather__": ["range"]},
    {"__forgather__": "of the future"},
    {"__forgather__": "mapping", "kind": "dict", "items": [[[], 1]]},
)
RAW_VALUES: dict[str, str] = {
    **{text: text for text in ("null", "true", "false", "0", "1", "-1", "2", "1.0", "0.5", "-0.0", "1e400", "-1e400")},
    **{text: text for text in ("NaN", "-Infinity", "[]", "{}", "[[]]", '{"a": 1}', '[null, "x", -3]', "1e-400")},
    "2**31": str(2**31),
    "2**63": str(2**63),
    "10**30": str(10**30),
    "-10**30": str(-(10**30)),
    "4000 digits": "9" * 4000,
    "5000 digits": "9" * 5000,
    "long text": json.dumps("A" * 200_000),
    "long list": json.dumps(list(range(50_000))),
    "colliding keys": json.dumps({str(number): number for number in range(20_000)}),
    "deep list": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "list of depth 400": "[" * 400 + "]" * 400,
    "object of depth 400": '{"a":' * 400 + "1" + "}" * 400,
    "list of depth 900": "[" * 900 + "]" * 900,
    **{f"text {text!a}": json.dumps(text) for text in ODD_STRINGS},
    **{f"tag {tagged['__forgather__']}": json.dumps(tagged) for tagged in TAGGED},
}
WAY_OUT = "way out"
"""Placeholder for the path of a file outside of the checkpoint, which depends on the scratch directory."""
ODD_KEYS = ("", "a", "__class__", "__forgather__", "../x", "0", "1", "-1", "path", "tensors", "owner", "format_version")


def replace_value(place: Place, route: list[int], value: str) -> bool:
    """Replace a value."""
    return _edit(place, route, lambda _: _RAW, value)


def remove_value(place: Place, route: list[int]) -> bool:
    """Remove a key or an item."""
    return _edit(place, route or [0], lambda _: REMOVED, "null")


def add_value(place: Place, route: list[int], key: str, value: str) -> bool:
    """Add a key or an item to a container, or replace another value with an object."""

    def add(node: Any) -> Any:
        if isinstance(node, list):
            return [*node, _RAW]
        return {**node, key: _RAW} if isinstance(node, dict) else {key: _RAW}

    return _edit(place, route, add, value)


def repeat_key(place: Place, route: list[int], value: str) -> bool:
    """Repeat a key of an object, with another value."""

    def repeat(node: Any) -> Any:
        if not isinstance(node, dict) or not node:
            return _RAW
        key = list(node)[sum(route) % len(node)]
        return {**node, _TWIN + key: _RAW}

    return _edit(place, route, repeat, value)


def swap_values(place: Place, route: list[int], other: list[int]) -> bool:
    """Swap two values."""
    data, seal = _read(place)
    found: list[Any] = []

    def note(node: Any) -> Any:
        found.append(node)
        return node

    edited(data, route, note)
    edited(data, other, note)
    place.write(_text(edited(edited(data, route, lambda _: found[1]), other, lambda _: found[0]), seal).encode())
    return is_only_other_data(*found)


def set_version(place: Place, value: str) -> bool:
    """Set the manifest's format version to another type or number."""
    data = {**json.loads(place.read()), "format_version": _RAW}
    place.write(json.dumps(data).replace(json.dumps(_RAW), RAW_VALUES[value]).encode())
    return False


def change_seal(place: Place, route: list[int], value: str) -> bool:
    """Change the checksum entry of the manifest."""
    data = json.loads(place.read())
    data["manifest_checksum"] = edited(data["manifest_checksum"], route, lambda _: _RAW)
    place.write(json.dumps(data).replace(json.dumps(_RAW), RAW_VALUES[value]).encode())
    return False


def rewrite_text(place: Place, way: str, number: int) -> bool:
    """Change the raw text: truncate it, encode it differently, or replace it."""
    place.write(TEXTS[way](place.read(), number))
    # The flipped bit may belong to a digit.
    return way == "flipped bit"


def _edit(place: Place, route: list[int], edit: Callable[[Any], Any], value: str) -> bool:
    """Edit one node, and return whether only the data changed."""
    raw = json.dumps(place.way_out()) if value == WAY_OUT else RAW_VALUES[value]
    found: list[Any] = []

    def edit_and_note(node: Any) -> Any:
        changed = edit(node)
        found[:] = [node, changed]
        return changed

    data, seal = _read(place)
    text = _text(edited(data, route, edit_and_note), seal)
    place.write(text.replace(json.dumps(_RAW), raw).replace(_TWIN, "").encode())
    return found[1] is _RAW and _is_data(found[0], raw)


def _read(place: Place) -> tuple[Any, Any]:
    """Return the content and the manifest's seal. `_text` writes the seal last, where sealing replaces it."""
    data = json.loads(place.read())
    return data, data.pop("manifest_checksum", None)


def _text(data: Any, seal: Any) -> str:
    if data is REMOVED:
        return "null"
    return json.dumps({**data, "manifest_checksum": seal} if isinstance(data, dict) and seal is not None else data)


def _is_data(old: Any, raw: str) -> bool:
    try:
        new = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    # The list of best checkpoints and the states of callbacks may be empty.
    return is_only_other_data(old, new) or (type(old) is type(new) and new in ({}, []))


def _huge(content: bytes, number: int) -> bytes:
    """Add 70 MiB of whitespace, or one string of 70 MiB."""
    if number % 2:
        return content + b" " * _HUGE_FILE_BYTES
    return content.rstrip().removesuffix(b"}") + b', "x": "' + b"A" * _HUGE_FILE_BYTES + b'"}'


TEXTS: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda content, number: content[: number % len(content)],
    "empty": lambda content, number: b"",
    "zeros": lambda content, number: bytes(len(content)),
    "flipped bit": lambda content, number: _flipped(content, number),
    "appended": lambda content, number: content + [b"\0", b"}", b"{}", b" ", b"\xff", b"//"][number % 6],
    "in front": lambda content, number: [b"\xef\xbb\xbf", b"\0", b"\xff\xfe", b" ", b"[", b"#"][number % 6] + content,
    "utf-16": lambda content, number: content.decode().encode(["utf-16", "utf-16-le", "utf-16-be"][number % 3]),
    "utf-32": lambda content, number: content.decode().encode(["utf-32", "utf-32-le", "utf-32-be"][number % 3]),
    "utf-7": lambda content, number: content.decode().encode("utf-7"),
    "invalid bytes": lambda content, number: content.replace(b"e", b"\xe9", 1 + number % 5),
    "other top level": lambda content, number: [b"[]", b"null", b"1", b'"x"', b"{}", b"true", b"NaN"][number % 7],
    "list of it": lambda content, number: b"[" + content + b"]",
    "twice": lambda content, number: content + content,
    "deep": lambda content, number: b"[" * 10 ** (number % 7),
    "deep object": lambda content, number: b'{"a":' * 10 ** (number % 6),
    "many digits": lambda content, number: b"1" * 10 ** (number % 7),
    "many keys": lambda content, number: json.dumps({f"{n:x}": n for n in range(100_000)}).encode(),
    "huge": _huge,
    "more space": lambda content, number: content.replace(b" ", b"  "),
    "python": lambda content, number: repr(json.loads(content)).encode(),
}


def _flipped(content: bytes, number: int) -> bytes:
    changed = bytearray(content)
    changed[number // 8 % len(changed)] ^= 1 << number % 8
    return bytes(changed)
