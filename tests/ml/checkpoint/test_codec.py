"""What a state may hold, that it comes back equal through a real file, and that reading one runs no code."""

import collections
import dataclasses
import datetime
import enum
import io
import math
import pathlib
import random
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.ml.checkpoint.codec import TAG, decode_state, encode_state
from forgather.ml.checkpoint.errors import StateDecodingError, StateEncodingError


def through_file(state: Any) -> Any:
    """The state after a real save and a load that accepts no code."""
    buffer = io.BytesIO()
    torch.save(encode_state(state), buffer)
    buffer.seek(0)
    return decode_state(torch.load(buffer, weights_only=True))


class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


class Labelled(collections.namedtuple("Labelled", ["name", "value"])):
    __slots__ = ()


class HasExtra(collections.namedtuple("HasExtra", ["name"])):
    pass


@dataclasses.dataclass
class Record:
    count: int
    items: list[Any] = dataclasses.field(default_factory=list)

    class Kind(enum.Enum):
        NESTED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    other: int = 5


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: Any


post_init_calls: list[str] = []


@dataclasses.dataclass
class Loud:
    value: int

    def __post_init__(self) -> None:
        post_init_calls.append("called")

    @property
    def trap(self) -> int:
        return 0

    @trap.setter
    def trap(self, value: int) -> None:
        post_init_calls.append("setter called")


class Unruly(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        post_init_calls.append("missing called")
        return super()._missing_(value)


@dataclasses.dataclass
class BuiltIn(dict):  # type: ignore[type-arg]
    value: int = 0


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyList(list):  # type: ignore[type-arg]
    pass


class MyStr(str):
    __slots__ = ()


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyTuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray):
    pass


class MyScalar(np.float64):
    pass


def make_default() -> int:
    return 0


HOUR = datetime.timezone(datetime.timedelta(hours=1), "local")

VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**63),
    2**64 + 1,
    -(2**1024),
    2**3000,
    -(2**2040) - 1,
    1.5,
    -0.0,
    math.inf,
    "",
    "text \ud800 ä",
    b"",
    b"abc",
    b"\xff" * 5000,
    bytearray(b""),
    bytearray(b"\x00\x01"),
    1 - 2j,
    range(3, 100, 7),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.strided,
    (),
    (1, (2, [3])),
    [],
    {},
    {1: "int", "1": "str", None: 0, 2.5: 1},
    {(1, "a"): 1, Color.RED: 2, b"k": 3, frozenset({1}): 4, b"": 5, 2**4000: 6},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.OrderedDict([((1, 2), 1), ("a", 2)]),
    collections.OrderedDict([(TAG, "deque")]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {(1, 2): 1}),
    collections.Counter("abca"),
    collections.Counter({(1, 2): 3}),
    collections.deque([1, {"a": {2}}], maxlen=5),
    collections.deque(),
    {1, "a", (2, 3), None},
    frozenset({Color.RED, Level.LOW}),
    set(),
    pathlib.Path("some/dir"),
    pathlib.PurePosixPath("/a"),
    pathlib.PureWindowsPath("c:\\a"),
    datetime.datetime(2024, 2, 29, 12, 30, 1, 7, fold=1),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    datetime.datetime(2024, 2, 29, tzinfo=HOUR),
    datetime.date(2024, 1, 1),
    datetime.time(1, 2, 3, 4, tzinfo=HOUR),
    datetime.timedelta(days=-3, microseconds=1),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    Word.YES,
    Record.Kind.NESTED,
    Access.READ,
    Access.READ | Access.WRITE,
    Access(0),
    Mode.A | Mode.B,
    Mode(8),
    Point(1, [2]),
    Labelled("n", (1,)),
    Record(1, [Frozen({"a": {1}}), Slotted(None, 7)]),
    Frozen(pathlib.Path("x")),
    Slotted([Color.RED]),
    FrozenSlotted((1, 2)),
    np.float64(1.5),
    np.float32(0.1),
    np.float16(2),
    np.int8(-1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.longdouble("1.1"),
    np.str_("a\x00"),
    np.str_(""),
    np.bytes_(b"a\x00"),
    np.datetime64("2024-01-01T00:00", "ns"),
    np.timedelta64(5, "D"),
    random.getstate(),
]

ARRAYS = [
    *(np.arange(6, dtype=name).reshape(2, 3) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", ">i4")),
    *(np.linspace(-1, 1, 6, dtype=name).reshape(3, 2) for name in ("f2", "f4", "f8", "c8", "c16", ">f8", "g")),
    np.array([True, False]),
    np.array(["a", "longer", ""]),
    np.array([b"a", b"bc"]),
    np.array(["2024-01-01", "NaT"], dtype="datetime64[s]"),
    np.array([1, 2], dtype="timedelta64[ms]"),
    np.zeros((0, 3), np.float32),
    np.zeros((2, 0), "U4"),
    np.array(3.5),
    np.arange(12).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.float32(1), (2, 2)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{repr(value)[:20]!a}")
def test_value_round_trips_with_its_type(value: Any) -> None:
    restored = through_file({"key": [value]})["key"][0]
    assert restored == value
    assert type(restored) is type(value)
    assert repr(restored) == repr(value) or isinstance(value, set | frozenset)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_array_round_trips_with_dtype_and_layout(array: np.ndarray) -> None:
    restored = through_file([array])[0]
    assert restored.dtype == array.dtype
    assert restored.dtype.byteorder == array.dtype.byteorder
    assert restored.shape == array.shape
    np.testing.assert_array_equal(restored, array)
    assert restored.flags.writeable
    if array.flags.c_contiguous or array.flags.f_contiguous:
        assert restored.flags.f_contiguous == array.flags.f_contiguous


def test_nan_keeps_its_kind() -> None:
    restored = through_file([math.nan, np.float32("nan"), complex(math.nan, 0)])
    assert math.isnan(restored[0]) and np.isnan(restored[1]) and math.isnan(restored[2].real)


def test_containers_keep_what_equality_does_not_show() -> None:
    restored = through_file([collections.deque([1], maxlen=3), collections.defaultdict(int, a=1)])
    assert restored[0].maxlen == 3
    assert restored[1]["new"] == 0


def test_state_dict_keeps_its_layer_versions() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    restored = through_file(state)
    assert restored._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(restored) == list(state)


@pytest.mark.parametrize("value", [{TAG: "deque"}, {TAG: {TAG: 1}, "a": 2}, {"x": {TAG: None}}])
def test_a_dict_that_looks_encoded_stays_what_it_is(value: Any) -> None:
    assert through_file(value) == value
    assert through_file(encode_state(encode_state(value))) == encode_state(encode_state(value))


PLAIN_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2200), 2**2200)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([Color.RED, Level.LOW, Access(3), np.float32(1.5), pathlib.Path("p"), range(3), TAG])
    | st.datetimes()
    | st.timedeltas()
)
KEYS = st.text(max_size=3) | st.integers(-5, 5) | st.just(TAG) | st.tuples(st.integers(0, 2)) | st.sampled_from(Color)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(KEYS, children, max_size=4)
        | st.dictionaries(KEYS, children, max_size=4).map(collections.OrderedDict)
        | st.lists(children, max_size=4).map(lambda items: collections.deque(items, 4))
        | st.frozensets(st.text(max_size=3) | st.integers(), max_size=4)
        | children.map(Frozen)
        | children.map(Slotted)
        | st.tuples(st.integers(), children).map(lambda pair: Point(*pair))
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(PLAIN_LEAVES, containers, max_leaves=15))
def test_any_nesting_round_trips(state: Any) -> None:
    restored = through_file(state)
    assert restored == state
    assert type(restored) is type(state)


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.uint16,
    torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_round_trip(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3).t()
    restored = through_file({"a": tensor, "empty": tensor[:0], "scalar": tensor[0, 0]})
    assert restored["a"].dtype is dtype
    assert restored["a"].stride() == tensor.stride()
    assert torch.equal(restored["a"].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert restored["empty"].shape == (0, 2)
    assert restored["scalar"].shape == ()


def test_conjugate_and_sparse_tensors_round_trip() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 1j, 0j]).conj()
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    restored = through_file([conjugate, conjugate[:1], conjugate.imag, sparse])
    assert torch.equal(restored[0], conjugate)
    assert torch.equal(restored[1], conjugate[:1])
    assert torch.equal(restored[2], conjugate.imag)
    assert torch.equal(restored[3].to_dense(), sparse.to_dense())


def test_large_tensors_and_arrays_are_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, 1000))
    array = np.zeros(1000, np.float32)
    encoded = encode_state({"p": parameter, "halves": list(parameter.data.chunk(2)), "array": array})
    assert encoded["p"].data_ptr() == parameter.data_ptr()
    assert type(encoded["p"]) is torch.Tensor and not encoded["p"].requires_grad
    assert encoded["halves"][1].data_ptr() == parameter.data.chunk(2)[1].data_ptr()
    assert encoded["array"]["data"].data_ptr() == array.__array_interface__["data"][0]


def test_views_that_together_use_their_storage_are_not_copied() -> None:
    flat = torch.zeros(3000)
    views = flat.split(1000)
    encoded = encode_state(list(views))
    assert [view.data_ptr() for view in encoded] == [view.data_ptr() for view in views]


def test_a_small_view_does_not_take_its_whole_storage_along() -> None:
    large = torch.arange(1_000_000)
    view = large[10:20]
    encoded = encode_state(
        {"a": view, "same": view, "column": large.view(1000, 1000)[:, 3], "wide": view[:1].expand(9)}
    )
    assert torch.equal(encoded["a"], view)
    assert encoded["a"].untyped_storage().nbytes() == view.nbytes
    assert encoded["same"].data_ptr() == encoded["a"].data_ptr()
    assert torch.equal(encoded["column"], large.view(1000, 1000)[:, 3])
    assert encoded["column"].untyped_storage().nbytes() == 8000
    assert encoded["wide"].untyped_storage().nbytes() == 8
    assert view.untyped_storage().nbytes() == large.nbytes, "the live tensor was changed"


def test_a_storage_seen_through_two_dtypes_is_stored() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    restored = through_file({"a": tensor, "bits": tensor.view(torch.uint8), "shared": tensor.numpy()})
    assert torch.equal(restored["a"], tensor)
    assert torch.equal(restored["bits"], tensor.view(torch.uint8))
    assert restored["shared"].tolist() == tensor.tolist()


def test_tied_tensors_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    restored = through_file({"embedding": weight, "head": weight})
    restored["embedding"][0] = 7
    assert restored["head"][0] == 7


def test_generators_continue_where_they_were() -> None:
    generators = [
        random.Random(3),
        np.random.default_rng(3),
        np.random.RandomState(3),
        torch.Generator().manual_seed(3),
    ]
    generators.append(np.random.Generator(np.random.MT19937(1)))
    generators[1].integers(5, size=3, dtype=np.int32)  # type: ignore[union-attr]
    restored: list[Any] = through_file(generators)
    python, numpy, legacy, torch_generator, mersenne = generators
    assert restored[0].random() == python.random()  # type: ignore[union-attr]
    assert restored[1].integers(1 << 30) == numpy.integers(1 << 30)  # type: ignore[union-attr]
    assert restored[2].normal() == legacy.normal()  # type: ignore[union-attr]
    assert torch.equal(torch.rand(3, generator=restored[3]), torch.rand(3, generator=torch_generator))  # type: ignore[call-overload]
    assert restored[4].random() == mersenne.random()


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_bit_generator_states_round_trip(name: str) -> None:
    bit_generator = getattr(np.random, name)(5)
    expected = np.random.Generator(bit_generator)
    state = through_file(bit_generator.state)
    other = getattr(np.random, name)(6)
    other.state = state
    assert np.random.Generator(other).random() == expected.random()


def test_numpy_legacy_state_round_trips() -> None:
    state = through_file(np.random.RandomState(7).get_state())
    other = np.random.RandomState(8)
    other.set_state(state)
    assert other.random() == np.random.RandomState(7).random()


def local_enum() -> Any:
    return enum.Enum("Local", ["A"])["A"]  # type: ignore[misc]


REFUSED: dict[str, Any] = {
    "lambda": lambda: 0,
    "function": make_default,
    "object": object(),
    "class": int,
    "module": sys,
    "layer": torch.nn.Linear(1, 1),
    "dict subclass": MyDict(a=1),
    "list subclass": MyList([1]),
    "tuple subclass": MyTuple((1,)),
    "str subclass": MyStr("a"),
    "int subclass": MyInt(1),
    "float subclass": MyFloat(1),
    "tensor subclass": torch.zeros(2).as_subclass(MyTensor),
    "array subclass": np.zeros(2).view(MyArray),
    "scalar subclass": MyScalar(1),
    "object array": np.array([object()]),
    "structured array": np.zeros(2, dtype=[("a", "i4")]),
    "default factory": collections.defaultdict(make_default),
    "local enum": local_enum(),
    "dataclass of a built-in": BuiltIn(),
    "generator": (n for n in range(3)),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused_by_path_and_type(value: Any) -> None:
    with pytest.raises(StateEncodingError) as caught:
        encode_state({"sampler": [0, {"hook": value}]}, root="dataset")
    message = str(caught.value)
    assert "dataset.sampler.1.hook" in message
    assert type(value).__qualname__ in message
    assert re.search(r"(\. [A-Z]|; )[^.]+.*\.$", message), "says what to do"


def test_refusals_name_the_path_through_every_container() -> None:
    cases: dict[str, Any] = {
        "state.0": [make_default],
        "state.value": Frozen(make_default),
        "state.y": Point(1, make_default),
        "state.1": collections.deque([0, make_default]),
        "state.(1, 2)": {(1, 2): make_default},
        "state.None": {None: make_default},
        "state": make_default,
    }
    for path, value in cases.items():
        with pytest.raises(StateEncodingError, match="cannot store") as caught:
            encode_state(value, root="state")
        assert f"cannot store {path}:" in str(caught.value)


def test_open_file_is_refused(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "file", "w") as file, pytest.raises(StateEncodingError, match="path of the file"):
        encode_state({"log": file})


def test_namedtuple_with_further_attributes_is_refused() -> None:
    value = HasExtra("a")
    value.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(StateEncodingError, match="attributes"):
        encode_state(value)


def cyclic_states() -> list[Any]:
    cyclic_list: list[Any] = []
    cyclic_list.append(cyclic_list)
    cyclic_dict: dict[str, Any] = {}
    cyclic_dict["inner"] = [cyclic_dict]
    record = Record(1)
    record.items.append(record)
    return [cyclic_list, cyclic_dict, record]


@pytest.mark.parametrize("state", cyclic_states(), ids=["list", "dict", "dataclass"])
def test_a_container_inside_itself_is_refused(state: Any) -> None:
    with pytest.raises(StateEncodingError, match="contains itself"):
        encode_state(state)


def nested(wrap: Callable[[Any], Any], depth: int) -> Any:
    state: Any = 1
    for _ in range(depth):
        state = wrap(state)
    return state


def test_depth_is_limited_before_torch_fails() -> None:
    cases: list[tuple[Callable[[Any], Any], int]] = [
        (lambda inner: {"a": inner}, 64),
        (lambda inner: {(1,): inner}, 63),
        (lambda inner: collections.deque([inner]), 32),
        (Frozen, 32),
    ]
    for wrap, depth in cases:
        state = nested(wrap, depth)
        assert through_file(state) == state
        with pytest.raises(StateEncodingError, match="levels deep"):
            encode_state(wrap(state))


def test_a_shared_container_is_not_a_cycle() -> None:
    shared = [1]
    assert through_file({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_decoding_calls_no_method_of_the_class() -> None:
    stored = encode_state([Loud(3), Unruly.A | Unruly.B])
    stored[0]["fields"]["trap"] = 1
    post_init_calls.clear()
    Unruly._value2member_map_.pop(3, None)
    record, flags = decode_state(stored)
    assert post_init_calls == []
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
        (f"{__name__}:Color", "flag"),
        (f"{__name__}:Frozen", "namedtuple"),
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
    {TAG: "flag", "class": f"{__name__}:Access", "value": 64},
    {TAG: "flag", "class": f"{__name__}:Access", "value": "x"},
    {TAG: "enum", "class": f"{__name__}:Color", "name": "GREEN"},
    {TAG: "enum", "class": f"{__name__}:Color", "name": "__class__"},
    {TAG: "enum", "class": 5, "name": "RED"},
    {TAG: "namedtuple", "class": f"{__name__}:Point", "fields": {"x": 1}},
    {TAG: "dataclass", "class": f"{__name__}:Record", "fields": {}},
    {TAG: "dataclass", "class": f"{__name__}:Slotted", "fields": {"value": 1, "gone": 2}},
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


def test_equal_sets_encode_in_one_order() -> None:
    words = [f"word {n}" for n in range(50)]
    assert encode_state(set(words))["items"] == sorted(words)
