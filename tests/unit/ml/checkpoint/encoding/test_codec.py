"""State codec: supported values, tensors that share memory, and rejection of everything else."""

import collections
import dataclasses
import enum
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.ml.checkpoint.encoding.codec import TAG, encode_state
from forgather.ml.checkpoint.errors import StateEncodingError
from tests.unit.ml.checkpoint.encoding.codec_samples import (
    Access,
    Color,
    Frozen,
    Level,
    Point,
    Record,
    Slotted,
    through_file,
)


class HasExtra(collections.namedtuple("HasExtra", ["name"])):
    pass


@dataclasses.dataclass
class BuiltIn(dict):
    value: int = 0


class MyDict(dict):
    pass


class MyList(list):
    pass


class MyStr(str):
    __slots__ = ()


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyTuple(tuple):
    __slots__ = ()


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray):
    pass


class MyScalar(np.float64):
    pass


def make_default() -> int:
    return 0


def test_containers_keep_maxlen_and_default_factory() -> None:
    restored = through_file([collections.deque([1], maxlen=3), collections.defaultdict(int, a=1)])
    assert restored[0].maxlen == 3
    assert restored[1]["new"] == 0


def test_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    restored = through_file(state)
    assert restored._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(restored) == list(state)


@pytest.mark.parametrize("value", [{TAG: "deque"}, {TAG: {TAG: 1}, "a": 2}, {"x": {TAG: None}}])
def test_dict_with_the_tag_key_round_trips(value: Any) -> None:
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


def test_views_that_cover_their_storage_are_not_copied() -> None:
    flat = torch.zeros(3000)
    views = flat.split(1000)
    encoded = encode_state(list(views))
    assert [view.data_ptr() for view in encoded] == [view.data_ptr() for view in views]


def test_small_view_is_stored_without_its_full_storage() -> None:
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


def test_storage_viewed_as_two_dtypes_round_trips() -> None:
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


def local_enum() -> Any:
    class Local(enum.Enum):
        A = 1

    return Local.A


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
def test_unsupported_value_error_names_path_and_type(value: Any) -> None:
    with pytest.raises(StateEncodingError) as caught:
        encode_state({"sampler": [0, {"hook": value}]}, root="dataset")
    message = str(caught.value)
    assert "dataset.sampler.1.hook" in message
    assert type(value).__qualname__ in message
    assert re.search(r"(\. [A-Z]|; )[^.]+.*\.$", message), "says what to do"


def test_encoding_error_names_the_path_through_every_container() -> None:
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


def test_open_file_is_rejected(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "file", "w") as file, pytest.raises(StateEncodingError, match="path of the file"):
        encode_state({"log": file})


def test_namedtuple_with_extra_attributes_is_rejected() -> None:
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
def test_cyclic_container_is_rejected(state: Any) -> None:
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


def test_shared_container_is_not_a_cycle() -> None:
    shared = [1]
    assert through_file({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_equal_sets_encode_in_the_same_order() -> None:
    words = [f"word {n}" for n in range(50)]
    assert encode_state(set(words))["items"] == sorted(words)
