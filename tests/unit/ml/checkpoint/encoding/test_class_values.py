"""Decoding of registered classes: it runs no code named by the file, and rejects content that fits no class."""

import dataclasses
import enum
import sys
import types
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint import register_state_class
from forgather.ml.checkpoint.encoding.codec import TAG, decode_state, encode_state
from forgather.ml.checkpoint.errors import StateDecodingError, StateEncodingError, UnregisteredClassError
from tests.unit.ml.checkpoint.encoding.codec_samples import (
    Color,
    Slotted,
)

SAMPLES = Color.__module__

calls: list[str] = []


@register_state_class
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


@register_state_class
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
    with pytest.raises(
        StateDecodingError, match=r"add before loading: import this, .*register_state_class\(this\.Color\)$"
    ):
        decode_state({"a": {TAG: "enum", "class": "this:Color", "name": "RED"}})
    assert "this" not in sys.modules


def test_decoding_reads_no_module_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_decoding_rejects_unregistered_and_mismatched_classes(reference: str, tag: str) -> None:
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
def test_malformed_content_raises_decoding_error_with_path(plain: Any) -> None:
    with pytest.raises(StateDecodingError, match=r"outer\.0"):
        decode_state({"outer": [plain]})


# --- the registry


@dataclasses.dataclass
class Unknown:
    value: int = 3


def test_unregistered_class_is_rejected_at_save_with_the_fix() -> None:
    line = f"register_state_class\\({__name__}\\.Unknown\\)"
    with pytest.raises(StateEncodingError, match=rf"cannot store trainer\.outer\.0: .*{__name__}\.Unknown.*{line}"):
        encode_state({"outer": [Unknown()]}, "trainer")


def test_fix_from_the_error_makes_older_checkpoint_readable() -> None:
    older = {"outer": {TAG: "dataclass", "class": f"{__name__}:Unknown2", "fields": {"value": 5}}}
    module = sys.modules[__name__]
    module.Unknown2 = dataclasses.make_dataclass("Unknown2", [("value", int)])  # type: ignore[attr-defined]
    module.Unknown2.__module__ = __name__  # type: ignore[attr-defined]
    with pytest.raises(UnregisteredClassError) as refusal:
        decode_state(older)
    exec(str(refusal.value).partition("add before loading: ")[2])
    assert decode_state(older)["outer"].value == 5


def test_custom_class_name_is_stored_in_files() -> None:
    @register_state_class(name="a-mood")
    class Mood(enum.Enum):
        GOOD = 1

    assert encode_state(Mood.GOOD) == {TAG: "enum", "class": "a-mood", "name": "GOOD"}
    assert decode_state({TAG: "enum", "class": "a-mood", "name": "GOOD"}) is Mood.GOOD
    with pytest.raises(ValueError, match="Two classes cannot both be registered as 'a-mood'"):
        register_state_class(Unknown, name="a-mood")


def test_redefined_class_replaces_the_first() -> None:
    def define() -> Any:
        @register_state_class(name="notebook")
        @dataclasses.dataclass
        class Cell:
            value: int

        return Cell

    define()
    second = define()
    assert type(decode_state(encode_state(second(1)))) is second


@pytest.mark.parametrize("cls", [dict, int, torch.nn.Linear, type("Plain", (), {}), "text", len])
def test_only_enums_named_tuples_and_dataclasses_can_be_registered(cls: Any) -> None:
    with pytest.raises(TypeError, match="only enums, named tuples and dataclasses can be registered"):
        register_state_class(cls)


@pytest.mark.parametrize("name", ["", 5])
def test_class_name_must_be_non_empty_text(name: Any) -> None:
    with pytest.raises(ValueError, match="a name must be a non-empty string"):
        register_state_class(Unknown, name=name)


def test_cyclic_content_raises_decoding_error() -> None:
    plain: list[Any] = []
    plain.append(plain)
    with pytest.raises(StateDecodingError, match="nested"):
        decode_state(plain)


def test_missing_dataclass_field_takes_its_default() -> None:
    stored = encode_state(Slotted(1, 2))
    del stored["fields"]["other"]
    assert decode_state(stored) == Slotted(1)
