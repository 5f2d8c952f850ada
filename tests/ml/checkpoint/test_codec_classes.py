"""Reading a state runs no code that it names, and content that fits no class is an error."""

import dataclasses
import enum
import sys
import types
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint.codec import TAG, decode_state, encode_state
from forgather.ml.checkpoint.errors import StateDecodingError
from tests.ml.checkpoint.codec_samples import (
    Color,
    Slotted,
)

SAMPLES = Color.__module__

calls: list[str] = []


@dataclasses.dataclass
class Loud:
    value: int

    def __post_init__(self) -> None:
        calls.append("called")

    @property
    def trap(self) -> int:
        return 0

    @trap.setter
    def trap(self, value: int) -> None:
        calls.append("setter called")


class Unruly(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        calls.append("missing called")
        return super()._missing_(value)


def test_decoding_calls_no_method_of_the_class() -> None:
    stored = encode_state([Loud(3), Unruly.A | Unruly.B])
    stored[0]["fields"]["trap"] = 1
    calls.clear()
    Unruly._value2member_map_.pop(3, None)
    record, flags = decode_state(stored)
    assert calls == []
    assert record.value == 3 and type(record) is Loud
    assert flags.value == 3 and type(flags) is Unruly


def test_decoding_imports_nothing() -> None:
    assert "this" not in sys.modules
    with pytest.raises(StateDecodingError, match="import this"):
        decode_state({"a": {TAG: "enum", "class": "this:Color", "name": "RED"}})
    assert "this" not in sys.modules


def test_decoding_does_not_ask_a_module_for_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    module = Lazy("lazy_module")
    object.__getattribute__(module, "__dict__")["__getattr__"] = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    asked.clear()
    with pytest.raises(StateDecodingError, match="lazy_module"):
        decode_state({TAG: "dataclass", "class": "lazy_module:Thing", "fields": {}})
    assert asked == []


@pytest.mark.parametrize(
    ("reference", "tag"),
    [
        ("os:system", "enum"),
        ("builtins:eval", "dataclass"),
        ("builtins:dict", "dataclass"),
        ("builtins:dict", "namedtuple"),
        ("subprocess:Popen", "dataclass"),
        ("subprocess:Popen", "enum"),
        ("subprocess:Popen.__init__", "dataclass"),
        (f"{SAMPLES}:Color", "flag"),
        (f"{SAMPLES}:Frozen", "namedtuple"),
    ],
)
def test_decoding_refuses_names_of_other_things(reference: str, tag: str) -> None:
    with pytest.raises(StateDecodingError):
        decode_state({TAG: tag, "class": reference, "name": "RED", "value": 1, "fields": {}})


MALFORMED = [
    {TAG: "no such tag"},
    {TAG: ["unhashable"]},
    {TAG: "deque"},
    {TAG: "ndarray", "dtype": "O", "shape": (1,), "order": "C", "data": torch.zeros(8, dtype=torch.uint8)},
    {TAG: "ndarray", "dtype": "<f4", "shape": (10**12,), "order": "C", "data": torch.zeros(8, dtype=torch.uint8)},
    {TAG: "numpy_scalar", "dtype": "O", "value": b"12345678"},
    {TAG: "numpy_generator", "state": {"bit_generator": "eval"}},
    {TAG: "mapping", "kind": "defaultdict", "factory": "eval", "items": []},
    {TAG: "mapping", "kind": "other", "items": []},
    {TAG: "path", "kind": "eval", "path": "x"},
    {TAG: "set", "items": [[1]]},
    {TAG: "flag", "class": f"{SAMPLES}:Access", "value": 64},
    {TAG: "flag", "class": f"{SAMPLES}:Access", "value": "x"},
    {TAG: "enum", "class": f"{SAMPLES}:Color", "name": "GREEN"},
    {TAG: "enum", "class": f"{SAMPLES}:Color", "name": "__class__"},
    {TAG: "enum", "class": 5, "name": "RED"},
    {TAG: "namedtuple", "class": f"{SAMPLES}:Point", "fields": {"x": 1}},
    {TAG: "dataclass", "class": f"{SAMPLES}:Record", "fields": {}},
    {TAG: "dataclass", "class": f"{SAMPLES}:Slotted", "fields": {"value": 1, "gone": 2}},
]


@pytest.mark.parametrize("plain", MALFORMED, ids=lambda plain: f"{plain[TAG]}")
def test_malformed_content_is_a_decoding_error_that_names_the_place(plain: Any) -> None:
    with pytest.raises(StateDecodingError, match=r"outer\.0"):
        decode_state({"outer": [plain]})


def test_cyclic_content_is_a_decoding_error() -> None:
    plain: list[Any] = []
    plain.append(plain)
    with pytest.raises(StateDecodingError, match="nested"):
        decode_state(plain)


def test_a_field_that_the_class_gained_takes_its_default() -> None:
    stored = encode_state(Slotted(1, 2))
    del stored["fields"]["other"]
    assert decode_state(stored) == Slotted(1)
