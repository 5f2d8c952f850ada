"""Converters: every supported type round-trips through a real file."""

import collections
import datetime
import math
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.encoding.codec import TAG
from tests.unit.ml.checkpoint.encoding.codec_samples import (
    Access,
    Color,
    Frozen,
    FrozenSlotted,
    Labelled,
    Level,
    Mode,
    Point,
    Record,
    Slotted,
    Word,
    through_file,
)

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
    random.Random(0).getstate(),
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


def name_of(value: Any) -> str:
    """Return a test id that does not depend on the hash seed: all pytest-xdist workers must collect equal ids."""
    text = str(sorted(map(repr, value))) if isinstance(value, set | frozenset) else repr(value)
    return f"{type(value).__name__}-{text[:20]!a}"


@pytest.mark.parametrize("value", VALUES, ids=name_of)
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


def test_nan_round_trips() -> None:
    restored = through_file([math.nan, np.float32("nan"), complex(math.nan, 0)])
    assert math.isnan(restored[0]) and np.isnan(restored[1]) and math.isnan(restored[2].real)


def test_random_generators_continue_their_sequence() -> None:
    generators: list[Any] = [
        random.Random(3),
        np.random.default_rng(3),
        np.random.RandomState(3),
        torch.Generator().manual_seed(3),
    ]
    generators.append(np.random.Generator(np.random.MT19937(1)))
    generators[1].integers(5, size=3, dtype=np.int32)
    restored: list[Any] = through_file(generators)
    python, numpy, legacy, torch_generator, mersenne = generators
    assert restored[0].random() == python.random()
    assert restored[1].integers(1 << 30) == numpy.integers(1 << 30)
    assert restored[2].normal() == legacy.normal()
    assert torch.equal(torch.rand(3, generator=restored[3]), torch.rand(3, generator=torch_generator))
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
