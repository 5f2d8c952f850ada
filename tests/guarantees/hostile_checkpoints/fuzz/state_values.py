"""Hostile state values: malformed tensors, tagged dicts with odd fields, and memory and hash bombs."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.encoding.converters import CONVERTERS

NUM_COLLIDING = 60_000


@dataclass(frozen=True)
class Old:
    """Replaced value, with other material to build a new value from."""

    value: Any
    others: list[Tensor]
    """The tensors of the state."""
    marker: str

    @property
    def tensor(self) -> Tensor:
        return self.value if isinstance(self.value, Tensor) else torch.arange(6.0).reshape(2, 3)


class Call:
    """Object that is pickled as a function call, like tensors."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


ValueT = Callable[[Old], Any]


def _deep(make: Callable[[Any], Any], depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = make(value)
    return value


def _cycle(make: Callable[[], Any], close: Callable[[Any], None]) -> Any:
    value = make()
    close(value)
    return value


class _Ordered:
    """Object that is pickled as an `OrderedDict` with attributes that shadow its methods."""

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ([("a", 1)],), {"keys": 1, "items": "x", "__class__": 2}


def colliding() -> list[int]:
    """Return integers with one hash: a set or dict compares each with all others."""
    return [number * (2**61 - 1) for number in range(1, NUM_COLLIDING + 1)]


PLAIN: dict[str, ValueT] = {
    "none": lambda old: None,
    "true": lambda old: True,
    "zero": lambda old: 0,
    "minus one": lambda old: -1,
    "2**31": lambda old: 2**31,
    "2**63": lambda old: 2**63,
    "10**30": lambda old: 10**30,
    "2**2000": lambda old: 2**2000,
    "half": lambda old: 0.5,
    "nan": lambda old: float("nan"),
    "infinity": lambda old: float("-inf"),
    "text": lambda old: "abc",
    "empty text": lambda old: "",
    "long text": lambda old: "A" * 1_000_000,
    "surrogate": lambda old: "\ud800",
    "bytes": lambda old: b"abc",
    "empty list": lambda old: [],
    "empty dict": lambda old: {},
    "empty tuple": lambda old: (),
    "list of it": lambda old: [old.value],
    "tuple of it": lambda old: (old.value, old.value),
    "dict of it": lambda old: {"a": old.value},
    "list": lambda old: [1, "a", None, 2.0],
    "long list": lambda old: list(range(100_000)),
    "odd keys": lambda old: {None: 1, 2.5: 2, (1, 2): 3, True: 4, "": 5},
    "set": lambda old: {1, 2, 3},
    "counter": lambda old: collections.Counter("abca"),
    "deep list": lambda old: _deep(lambda inner: [inner], 180),
    "deeper list": lambda old: _deep(lambda inner: [inner], 300),
    "deep dict": lambda old: _deep(lambda inner: {"a": inner}, 250),
    "deep tuple": lambda old: _deep(lambda inner: (inner,), 250),
    "doubling lists": lambda old: _deep(lambda inner: [inner, inner], 40),
    "doubling dicts": lambda old: _deep(lambda inner: {"a": inner, "b": inner}, 40),
    "doubling tuples": lambda old: _deep(lambda inner: (inner, inner), 40),
    "lists of one list": lambda old: _deep(lambda inner: [inner] * 1000, 4),
    "cyclic list": lambda old: _cycle(list, lambda value: value.append(value)),
    "cyclic dict": lambda old: _cycle(dict, lambda value: value.update(a=value)),
    "device": lambda old: torch.device("cuda:99"),
    "meta device": lambda old: torch.device("meta"),
    "dtype": lambda old: torch.float16,
    "layout": lambda old: torch.sparse_coo,
    "size": lambda old: torch.Size([10**12, 2]),
    "ordered": lambda old: collections.OrderedDict(a=1),
    "ordered with attributes": lambda old: _Ordered(),
}


def _filled(old: Old, value: float) -> Tensor:
    return torch.full_like(old.tensor, value) if old.tensor.dtype != torch.bool else torch.ones_like(old.tensor)


def _view_of_other(old: Old) -> Tensor:
    """Return a view of the largest other tensor, in the shape of this tensor if it fits."""
    other = max(old.others, key=lambda tensor: tensor.numel(), default=old.tensor)
    if other.layout is not torch.strided or other.numel() < old.tensor.numel():
        return other
    return other.as_strided(old.tensor.shape, old.tensor.stride())


def _rebuilt(old: Old, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Call:
    """Return a tensor with any shape and strides, even beyond its storage."""
    storage = old.tensor.detach().clone().contiguous().reshape(-1)._typed_storage()
    hooks: Any = collections.OrderedDict()
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, False, hooks)


def _sparse(indices: Tensor, size: tuple[int, ...]) -> Call:
    content = (indices, torch.ones(indices.shape[1]), torch.Size(size), False)
    return Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, content)


def _compressed(crow: list[int], columns: list[int]) -> Call:
    parts = (torch.tensor(crow), torch.tensor(columns), torch.ones(len(columns)), torch.Size([2, 3]))
    return Call(torch._utils._rebuild_sparse_tensor, torch.sparse_csr, parts)


TENSORS: dict[str, ValueT] = {
    "other values": lambda old: _filled(old, 3),
    "all ones bits": lambda old: (
        torch.full((old.tensor.nbytes,), 255, dtype=torch.uint8).view(old.tensor.dtype)
        if old.tensor.dim() == 1 and old.tensor.dtype == torch.uint8
        else _filled(old, -1)
    ),
    "nans": lambda old: _filled(old, float("nan")) if old.tensor.is_floating_point() else _filled(old, 0),
    "other shape": lambda old: torch.zeros(*old.tensor.shape, 2, dtype=old.tensor.dtype),
    "flat": lambda old: old.tensor.reshape(-1),
    "one more": lambda old: torch.zeros(old.tensor.numel() + 1, dtype=old.tensor.dtype),
    "no elements": lambda old: torch.zeros(0, dtype=old.tensor.dtype),
    "scalar": lambda old: torch.tensor(1, dtype=old.tensor.dtype),
    "ones in front": lambda old: old.tensor[None, None],
    **{
        f"as {dtype}": lambda old, dtype=dtype: torch.ones(old.tensor.shape).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    },
    "complex": lambda old: torch.ones(old.tensor.shape, dtype=torch.complex64),
    "conjugated": lambda old: torch.ones(old.tensor.shape, dtype=torch.complex64).conj(),
    "negated": lambda old: torch.ones(old.tensor.shape, dtype=torch.complex64).conj().imag,
    "stride 0": lambda old: torch.ones(1, dtype=old.tensor.dtype).expand(max(1, old.tensor.numel())),
    "stride 0 in shape": lambda old: torch.ones((), dtype=old.tensor.dtype).expand(old.tensor.shape),
    "huge stride 0": lambda old: torch.ones(1, dtype=old.tensor.dtype).expand(10**9),
    "vast stride 0": lambda old: torch.ones(1, 1, dtype=old.tensor.dtype).expand(10**9, 10**9),
    "transposed": lambda old: old.tensor.detach().clone().mT.contiguous().mT if old.tensor.dim() > 1 else old.tensor,
    "view of another": _view_of_other,
    "another": lambda old: old.others[-1] if old.others else torch.ones(2),
    "parameter": lambda old: torch.nn.Parameter(torch.ones(old.tensor.shape)),
    "meta": lambda old: torch.empty(old.tensor.shape, device="meta"),
    "huge meta": lambda old: torch.empty(10**6, 10**6, device="meta"),
    "sparse": lambda old: torch.eye(3).to_sparse(),
    "sparse in shape": lambda old: torch.ones(old.tensor.shape).to_sparse(),
    "huge sparse": lambda old: _sparse(torch.tensor([[0], [0]]), (10**9, 10**9)),
    "sparse outside": lambda old: _sparse(torch.tensor([[10**6], [-5]]), (3, 3)),
    "compressed": lambda old: torch.eye(3).to_sparse_csr(),
    "compressed outside": lambda old: _compressed([0, 1, 10**9], [10**6, -7]),
    "quantized": lambda old: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda old: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "outside its storage": lambda old: _rebuilt(old, 0, (10**6, 10**3), (10**3, 1)),
    "offset outside": lambda old: _rebuilt(old, 10**9, (1,), (1,)),
    "negative offset": lambda old: _rebuilt(old, -(10**6), (1,), (1,)),
    "negative stride": lambda old: _rebuilt(old, 0, (2,), (-(10**6),)),
    "negative size": lambda old: _rebuilt(old, 0, (-1,), (1,)),
    "overflowing size": lambda old: _rebuilt(old, 0, (2**32, 2**32, 2**32), (0, 0, 1)),
    "strides missing": lambda old: _rebuilt(old, 0, (2, 3), (1,)),
}


def tagged(tag: Any, **parts: Any) -> dict[str, Any]:
    return {"__forgather__": tag, **parts}


def _expanded(length: int) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8).expand(length)


def _array(dtype: Any, shape: Any, data: Any, order: str = "C") -> dict[str, Any]:
    return tagged("ndarray", dtype=dtype, shape=shape, order=order, data=data)


def _twister(name: str, key: Any, position: Any) -> dict[str, Any]:
    return {"bit_generator": name, "state": {"key": key, "pos": position}, "has_gauss": 0, "gauss": 0.0}


def _keys(length: int) -> dict[str, Any]:
    return _array("<u4", (length,), torch.ones(4 * length, dtype=torch.uint8))


def vector_extensions(old: Old) -> dict[str, Any]:
    """Encode a VecAVX2 object; its truth test would run the compiler with the flags given here."""
    flags = f"mavx2 -wrapper touch,{old.marker} ; touch {old.marker}"
    fields = {"_bit_width": 256, "_macro": ["A"], "_arch_flags": flags, "_dtype_nelements": {}, "_is_avx2": True}
    return tagged("dataclass", **{"class": "torch._inductor.cpu_vec_isa:VecAVX2", "fields": fields})


def _named(tag: str, reference: Any, **parts: Any) -> ValueT:
    return lambda old: tagged(tag, **{"class": reference}, **parts)


_UNAME = dict.fromkeys(("system", "node", "release", "version", "machine"), "a")
TAGGED: dict[str, ValueT] = {
    "range 10**18": lambda old: tagged("range", bounds=(0, 10**18, 1)),
    "range 10**30": lambda old: tagged("range", bounds=(-(10**30), 10**30)),
    "range step 0": lambda old: tagged("range", bounds=(0, 1, 0)),
    "deque 10**18": lambda old: tagged("deque", items=[1], maxlen=10**18),
    "deque 10**30": lambda old: tagged("deque", items=[1], maxlen=10**30),
    "deque of a range": lambda old: tagged("deque", items=tagged("range", bounds=(0, 10**9, 1)), maxlen=None),
    "deque of a tensor": lambda old: tagged("deque", items=_expanded(10**8), maxlen=None),
    "set of a range": lambda old: tagged("set", items=tagged("range", bounds=(0, 10**9, 1))),
    "set of lists": lambda old: tagged("set", items=[[]]),
    "set that collides": lambda old: tagged("frozenset", items=colliding()),
    "set of bombs": lambda old: tagged("set", items=[vector_extensions(old)]),
    "large array": lambda old: _array("<f4", (10**9,), _expanded(4 * 10**9)),
    "vast array": lambda old: _array("<f4", (10**9, 10**9), _expanded(4 * 10**18)),
    "array of empty text": lambda old: _array("S0", (10**12,), torch.zeros(0, dtype=torch.uint8)),
    "array of long text": lambda old: _array("<U500000000", (1,), _expanded(2 * 10**9)),
    "array of negative shape": lambda old: _array("<f4", (-1, -3), torch.zeros(12, dtype=torch.uint8)),
    "array without elements": lambda old: _array("<f4", (0, 10**18), torch.zeros(0, dtype=torch.uint8)),
    "array of objects": lambda old: _array("O", (1,), torch.zeros(8, dtype=torch.uint8)),
    "array of records": lambda old: _array([("a", "O")], (1,), torch.zeros(8, dtype=torch.uint8)),
    "array of dates": lambda old: _array("<M8[25s]", (1,), torch.ones(8, dtype=torch.uint8)),
    "array of a sparse tensor": lambda old: _array("|u1", (3,), torch.ones(3).to_sparse()),
    "array with a number as its shape": lambda old: _array("|u1", 3, torch.zeros(3, dtype=torch.uint8), "F"),
    "array of many dimensions": lambda old: _array("|u1", (1,) * 100, torch.zeros(1, dtype=torch.uint8)),
    "array of long ranges": lambda old: _array("|u1", tagged("range", bounds=(0, 10**9, 1)), _expanded(0)),
    "bytes 10**9": lambda old: tagged("bytes", data=_expanded(10**9)),
    "bytes 10**15": lambda old: tagged("bytearray", data=_expanded(10**15)),
    "bytes of floats": lambda old: tagged("bytes", data=torch.ones(3, 2)),
    "bytes of a sparse tensor": lambda old: tagged("bytearray", data=torch.eye(3).to_sparse()),
    "bytes of a meta tensor": lambda old: tagged("bytes", data=torch.empty(9, device="meta")),
    "bytes of a number": lambda old: tagged("bytearray", data=10**12),
    "generator far out": lambda old: tagged("numpy_generator", state=_twister("MT19937", _keys(624), 10**6)),
    "generator before": lambda old: tagged("numpy_random_state", state=_twister("MT19937", _keys(624), -(10**6))),
    "generator of few keys": lambda old: tagged("numpy_generator", state=_twister("MT19937", _keys(3), 1)),
    "generator of another kind": lambda old: tagged("numpy_random_state", state=_twister("PCG64", _keys(624), 1)),
    "generator unknown": lambda old: tagged("numpy_generator", state=_twister("Evil", [], [])),
    "generator of large state": lambda old: tagged(
        "numpy_generator",
        state={"bit_generator": "PCG64", "state": {"state": 10**60, "inc": -1}, "has_uint32": 7, "uinteger": 2**70},
    ),
    "philox far out": lambda old: tagged(
        "numpy_generator",
        state={
            "bit_generator": "Philox",
            "state": {"counter": _array("<u8", (4,), _expanded(32)), "key": _array("<u8", (2,), _expanded(16))},
            "buffer": _array("<u8", (4,), _expanded(32)),
            "buffer_pos": 10**6,
            "has_uint32": 0,
            "uinteger": 0,
        },
    ),
    "random of odd state": lambda old: tagged("random", state=(3, (2**40,) * 624 + (10**6,), None)),
    "random of a range": lambda old: tagged("random", state=(3, tagged("range", bounds=(0, 10**9, 1)), None)),
    "torch generator odd": lambda old: tagged(
        "torch_generator", device=torch.device("cpu"), state=torch.full((5056,), 255, dtype=torch.uint8)
    ),
    "torch generator short": lambda old: tagged("torch_generator", device="cpu", state=torch.ones(3).byte()),
    "torch generator wide": lambda old: tagged("torch_generator", device="cpu", state=_expanded(10**12)),
    "torch generator elsewhere": lambda old: tagged("torch_generator", device="cuda:9", state=torch.ones(16).byte()),
    "vector extensions": vector_extensions,
    "vector extensions as key": lambda old: tagged("mapping", kind="dict", items=[(vector_extensions(old), 1)]),
    "vector extensions as size": lambda old: tagged("deque", items=[], maxlen=vector_extensions(old)),
    "vector extensions as data": lambda old: tagged("bytes", data=vector_extensions(old)),
    "dataclass of torch": _named("dataclass", "torch.nn:Module", fields={}),
    "dataclass of os": _named("dataclass", "os:system", fields={"a": 1}),
    "dataclass by number": _named("dataclass", 7, fields=[]),
    "dataclass of ours": _named("dataclass", "forgather.ml.checkpoint.manifest:FileRecord", fields={"path": 1}),
    "enum": _named("enum", "signal:Signals", name="SIGKILL"),
    "enum of a list": _named("enum", "signal:Signals", name=[]),
    "flag": _named("flag", "re:RegexFlag", value=10**30),
    "flag below 0": _named("flag", "re:RegexFlag", value=-(10**30)),
    "flag of text": _named("flag", "re:RegexFlag", value="a"),
    "named tuple": _named("namedtuple", "platform:uname_result", fields=_UNAME),
    "named tuple of a list": _named("namedtuple", "platform:uname_result", fields=[1]),
    "scalar of long text": lambda old: tagged("numpy_scalar", dtype="<U1000000000", value="a"),
    "scalar cut short": lambda old: tagged("numpy_scalar", dtype="<f8", value=b"abc"),
    "scalar of objects": lambda old: tagged("numpy_scalar", dtype="O", value=b"abcdefgh"),
    "int of a million digits": lambda old: tagged("int", hex="0x" + "f" * 1_000_000),
    "int of words": lambda old: tagged("int", hex="words"),
    "int of a list": lambda old: tagged("int", hex=[]),
    "complex of text": lambda old: tagged("complex", real="1", imag=2),
    "datetime far out": lambda old: tagged("datetime", fields=(10**9, 1, 1), tzinfo="abc", fold=7),
    "datetime of a range": lambda old: tagged(
        "datetime", fields=tagged("range", bounds=(1, 10**9, 1)), tzinfo=None, fold=0
    ),
    "date of nothing": lambda old: tagged("date", fields=()),
    "time of floats": lambda old: tagged("time", fields=(1.5, 2.5), tzinfo=None, fold=0),
    "timedelta far out": lambda old: tagged("timedelta", fields=(10**30, 0, 0)),
    "timezone far out": lambda old: tagged("timezone", arguments=(tagged("timedelta", fields=(9, 0, 0)),)),
    "path with a zero": lambda old: tagged("path", kind="Path", path="a\0b"),
    "path of no kind": lambda old: tagged("path", kind="Evil", path="a"),
    "mapping of lists": lambda old: tagged("mapping", kind="dict", items=[([], 1)]),
    "mapping of a range": lambda old: tagged("mapping", kind="Counter", items=tagged("range", bounds=(0, 9, 1))),
    "mapping that calls": lambda old: tagged("mapping", kind="defaultdict", factory="eval", items=[]),
    "mapping of attributes": lambda old: tagged("mapping", kind="OrderedDict", items=[], attributes={1: 2, "keys": 3}),
    "mapping that collides": lambda old: tagged("mapping", kind="dict", items=[(one, 0) for one in colliding()]),
    "tag of a list": lambda old: tagged([1]),
    "tag unknown": lambda old: tagged("of the future", a=1),
    **{f"{tag} without parts": lambda old, tag=tag: tagged(tag) for tag in CONVERTERS},
    **{
        f"{tag} of itself": lambda old, tag=tag: _deep(lambda inner: tagged(tag, items=[inner]), 60)
        for tag in CONVERTERS
    },
}
VALUES: dict[str, ValueT] = {**PLAIN, **TENSORS, **TAGGED}
