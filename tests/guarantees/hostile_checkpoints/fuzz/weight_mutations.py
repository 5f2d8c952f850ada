"""Safetensors mutations: headers that contradict the tensor data."""

import json
from collections.abc import Callable
from typing import Any

from tests.guarantees.hostile_checkpoints.fuzz.json_mutations import RAW_VALUES
from tests.guarantees.hostile_checkpoints.fuzz.place import REMOVED, Place, edited, is_only_other_data

_RAW = "@raw@"


def change_header(place: Place, way: str, tensor: int, number: int) -> bool:
    """Change the header entry of one tensor."""
    header, data = _split(place.read())
    names = sorted(name for name in header if name != "__metadata__")
    changed = HEADERS[way](header, names[tensor % len(names)], number)
    place.write(_joined(json.dumps(changed).encode(), data))
    return way in _ONLY_DATA


def change_header_value(place: Place, route: list[int], value: str) -> bool:
    """Replace or remove any value of the header."""
    header, data = _split(place.read())
    found: list[Any] = []

    def replace(node: Any) -> Any:
        found.append(node)
        return REMOVED if value == "removed" else _RAW

    changed = edited(header, route or [0], replace)
    raw = RAW_VALUES.get(value, "")
    text = json.dumps(changed).replace(json.dumps(_RAW), raw)
    place.write(_joined(text.encode(), data))
    # Another dtype name of the same size is other data.
    return isinstance(found[0], str) and is_only_other_data(found[0], raw)


def change_length(place: Place, way: str, number: int) -> bool:
    """Change the length of the header, or the rest of the file."""
    place.write(LENGTHS[way](place.read(), number))
    return False


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _joined(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def _entry(**values: Any) -> Callable[[dict[str, Any], str, int], Any]:
    """Return a mutation that sets fields of the tensor's entry to one of several values."""

    def change(header: dict[str, Any], name: str, number: int) -> Any:
        fields = {key: choices[number % len(choices)] for key, choices in values.items()}
        return {**header, name: {**header[name], **fields}}

    return change


def _shifted(header: dict[str, Any], name: str, number: int) -> Any:
    start, end = header[name]["data_offsets"]
    by = (1, 4, -4, 10**9, -(10**9), 2**63)[number % 6]
    return {**header, name: {**header[name], "data_offsets": [start + by, end + by]}}


def _overlapping(header: dict[str, Any], name: str, number: int) -> Any:
    """Move all other tensors to the start of this one."""
    start = header[name]["data_offsets"][0]
    changed = dict(header)
    for other, entry in header.items():
        if other not in ("__metadata__", name):
            first, last = entry["data_offsets"]
            changed[other] = {**entry, "data_offsets": [start, start + last - first]}
    return changed


def _swapped_names(header: dict[str, Any], name: str, number: int) -> Any:
    names = [other for other in header if other != "__metadata__"]
    other = names[number % len(names)]
    return {**header, name: header[other], other: header[name]}


def _reshaped(header: dict[str, Any], name: str, number: int) -> Any:
    shape = header[name]["shape"]
    total = 1
    for length in shape:
        total *= length
    shapes = (shape[::-1], [total], [1, *shape], [*shape, 1], [total, 1], [0, *shape], [2**62, 4], [2**32, 2**32])
    return {**header, name: {**header[name], "shape": shapes[number % len(shapes)]}}


def _extra(header: dict[str, Any], name: str, number: int) -> Any:
    extras = (
        {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]},
        header[name],
    )
    return {**header, f"extra.{number % 3}": extras[number % len(extras)]}


def _sharing(header: dict[str, Any], name: str, number: int) -> Any:
    odd = (
        *("not JSON", "7", "null", "{}", '["a"]', "[[1]]", "[[]]", '[["a", "a"]]', "[" * 100_000, '[[["a"]]]', "1e400"),
        *(json.dumps([[name, "extra"]]), json.dumps([list(header)]), json.dumps([[name] * 50_000]), 7, None, ["a"]),
    )
    metadata = {**header.get("__metadata__", {}), "param_sharing": odd[number % len(odd)]}
    return {**header, "__metadata__": metadata}


def _without(header: dict[str, Any], name: str, number: int) -> Any:
    return {key: entry for key, entry in header.items() if key != name}


_ONLY_DATA = {"dtype", "swapped names"}
HEADERS: dict[str, Callable[[dict[str, Any], str, int], Any]] = {
    "shifted": _shifted,
    "overlapping": _overlapping,
    "swapped names": _swapped_names,
    "reshaped": _reshaped,
    "extra": _extra,
    "sharing": _sharing,
    "missing": _without,
    "dtype": _entry(dtype=["I32", "F64", "BF16", "U8", "BOOL", "F128", "", "f32", None, 1, ["F32"], "C64", "F8_E8M0"]),
    "offsets": _entry(data_offsets=[[0, 0], [4, 0], [-4, 0], [0, 2**63], [0], [], [0, 4, 8], "04", None, [0.0, 4.0]]),
    "odd offsets": _entry(data_offsets=[[True, 4], [0, 10**30], [[0], [4]], {"0": 4}, ["0", "4"], [0, -1], 4]),
    "shape": _entry(
        shape=[[], [-1, -1], [2**63], [2**32, 2**32], None, "3", [1.0], [True], {"a": 1}, [[1]], 3, [10**30]]
    ),
    "many dimensions": _entry(shape=[[1] * 65, [1] * 1000, [0] * 100_000, [2] * 62]),
    "all of it": lambda header, name, number: [[], None, 1, "x", {}, {name: []}, {name: {}}, {name: None}][number % 8],
    "more fields": _entry(more=[1, {"a": "b"}]),
    "metadata": lambda header, name, number: {**header, "__metadata__": [1, [], None, "x", {"format": 1}][number % 5]},
}


def _with_length(content: bytes, number: int) -> bytes:
    old = int.from_bytes(content[:8], "little")
    lengths = (0, 1, old - 1, old + 1, len(content) - 8, len(content) - 7, 100 * 2**20, 2**32, 2**63, 2**64 - 1)
    return lengths[number % len(lengths)].to_bytes(8, "little") + content[8:]


def _repeated_name(content: bytes, number: int) -> bytes:
    """Repeat a tensor name in the header text."""
    header, data = _split(content)
    name = sorted(key for key in header if key != "__metadata__")[0]
    other = {**header[name], "shape": [number % 7]} if number % 2 else header[name]
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(other)}}}"
    return _joined(text.encode(), data)


LENGTHS: dict[str, Callable[[bytes, int], bytes]] = {
    "length": _with_length,
    "repeated name": _repeated_name,
    "header only": lambda content, number: content[: 8 + int.from_bytes(content[:8], "little")],
    "data cut": lambda content, number: content[: -1 - number % 64],
    "data longer": lambda content, number: content + bytes(1 + number % 64),
    "few bytes": lambda content, number: content[: number % 9],
    "header in utf-16": lambda content, number: _joined(
        json.dumps(_split(content)[0]).encode("utf-16"), _split(content)[1]
    ),
    "header padded": lambda content, number: _joined(
        json.dumps(_split(content)[0]).encode() + b" " * (number % 1000), _split(content)[1]
    ),
    "header deep": lambda content, number: _joined(b"[" * 10 ** (number % 7), b""),
    "header of 20 MiB": lambda content, number: _joined(b" " * 20 * 2**20, b""),
}
