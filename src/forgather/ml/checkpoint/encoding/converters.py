"""Converters by type for values that `torch.load(weights_only=True)` cannot read: NumPy, dates, paths, generators, ...

Each converter splits a value into plain parts and checks the parts before it rebuilds the value. The content of a
file is untrusted. The codec looks converters up with `find_converter` (to encode) and `CONVERTERS` (to decode).
"""

import collections
import datetime
import math
import pathlib
import random
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch

from forgather.ml.checkpoint.encoding.class_values import (
    DATACLASS,
    ENUM,
    FLAG,
    NAMEDTUPLE,
    Converter,
    Parts,
    UnsupportedValueError,
    find_class_converter,
)
from forgather.ml.checkpoint.encoding.state_budget import count_hashes
from forgather.ml.checkpoint.errors import CheckpointLoadError, StateDecodingError
from forgather.ml.checkpoint.state.rng import check_python_state, check_torch_state
from forgather.ml.checkpoint.state.tensor_checks import Where

# Not "O" (objects, which would be pickled) and not "V" (structured dtypes).
_ARRAY_KINDS = frozenset("biufcmMSU")
_MAX_DIMENSIONS = 64
# np.dtype() parses any text, so its length is limited.
_LONGEST_DTYPE = 32
_LARGEST_POSITIONS = {"MT19937": 624, "Philox": 4}
_BIT_GENERATORS: dict[str, Callable[[], np.random.BitGenerator]] = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def _array_parts(array: np.ndarray) -> Parts:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValueError(
            f"has the dtype {array.dtype}; store an array of numbers, dates or fixed-length text, or a list"
        )
    # An array in Fortran order is stored transposed, so that its memory order survives.
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    flat = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    if not flat.flags.writeable:
        # torch.from_numpy warns about read-only memory, because tensors are always writable.
        flat = flat.copy()
    return {"dtype": array.dtype.str, "shape": array.shape, "order": order, "data": torch.from_numpy(flat)}


def _build_array(parts: Parts) -> np.ndarray:
    dtype = _array_dtype(parts["dtype"])
    if not dtype.itemsize:
        # NumPy allocates at least one character for each zero-length text, which the budget does not cover.
        raise StateDecodingError("a NumPy array has elements of size zero")
    shape = _shape(parts["shape"])[:: -1 if parts["order"] == "F" else 1]
    data = _flat_bytes(parts["data"])
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise StateDecodingError(f"a NumPy array of shape {shape} and dtype {dtype} has the wrong number of bytes")
    array = np.empty(shape, dtype)
    if array.nbytes:
        # A copy, so that the array owns its memory and does not share the storage of the decoded tensor.
        array.reshape(-1).view(np.uint8)[:] = data
    return array.T if parts["order"] == "F" else array


def _flat_bytes(data: object) -> np.ndarray:
    """Return the bytes of a contiguous 1-D uint8 tensor."""
    # An expanded tensor repeats its bytes: copying it could take any amount of memory.
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.layout is not torch.strided:
        raise StateDecodingError("its bytes are not a uint8 tensor")
    if data.is_meta or data.ndim != 1 or not data.is_contiguous():
        raise StateDecodingError("its bytes are not contiguous")
    return data.cpu().numpy()


def _shape(shape: Any) -> tuple[int, ...]:
    lengths = tuple(shape) if type(shape) in (tuple, list) and len(shape) <= _MAX_DIMENSIONS else None
    if lengths is None or not all(type(length) is int and 0 <= length < 2**63 for length in lengths):
        raise StateDecodingError("the shape of a NumPy array is malformed")
    return lengths


def _exactly(value: object, kind: type | tuple[type, ...], what: str) -> Any:
    """Return `value` if its type is one of `kind`, else raise `StateDecodingError`."""
    # Exact types, because builders iterate and convert their arguments: a huge range or a tensor could take forever.
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise StateDecodingError(f"{what} is a {type(value).__name__}, not a {kinds[0].__name__}")
    return value


def _numbers(values: Any, most: int) -> tuple[int, ...]:
    """Return at most `most` integers as a tuple; state that was stored as JSON has a list here."""
    _exactly(values, (tuple, list), "a field for integers")
    if len(values) > most or not all(type(value) is int for value in values):
        raise StateDecodingError("a field for integers has too many values, or values of other types")
    return tuple(values)


def _items(parts: Parts) -> list[Any]:
    items: list[Any] = _exactly(parts["items"], list, "the items")
    return items


def _distinct(parts: Parts) -> list[Any]:
    items = _items(parts)
    # Equal hashes would make building the set take quadratic time.
    count_hashes(items)
    return items


def _array_dtype(name: object) -> np.dtype:
    if type(name) is not str or len(name) > _LONGEST_DTYPE:
        raise StateDecodingError("the dtype of a NumPy value is malformed")
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise StateDecodingError(f"a NumPy value has the dtype {name!r}, which a checkpoint never contains")
    return dtype


def _numpy_scalar_parts(value: Any) -> Parts:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValueError(f"has the dtype {value.dtype}; store its fields as plain values")
    # Text is not stored as an array element: NumPy drops trailing zeros when it reads one back, and in str(value).
    if isinstance(value, np.str_):
        return {"dtype": value.dtype.str, "value": str.__str__(value)}
    return {"dtype": value.dtype.str, "value": bytes(value) if isinstance(value, np.bytes_) else value.tobytes()}


def _build_numpy_scalar(parts: Parts) -> object:
    dtype = _array_dtype(parts["dtype"])
    if dtype.kind in "US":
        return dtype.type(_exactly(parts["value"], str if dtype.kind == "U" else bytes, "a NumPy text"))
    return np.frombuffer(_exactly(parts["value"], bytes, "a NumPy number"), dtype, count=1)[0]


def _numpy_generator_parts(generator: Any) -> Parts:
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise UnsupportedValueError(f"uses the unknown bit generator {state['bit_generator']!r}; store its state")
    return {"state": state}


def _build_numpy_generator(parts: Parts) -> np.random.Generator:
    bit_generator = _bit_generator_for(parts["state"])
    bit_generator.state = parts["state"]
    return np.random.Generator(bit_generator)


def _build_random_state(parts: Parts) -> np.random.RandomState:
    state = np.random.RandomState(_bit_generator_for(parts["state"]))
    state.set_state(parts["state"])
    return state


def _bit_generator_for(state: Any) -> np.random.BitGenerator:
    """Return a new bit generator that can load `state`, or raise `StateDecodingError`."""
    # NumPy does not check the position: a bad one makes it read past the end of its buffer.
    _exactly(state, dict, "the state of a NumPy generator")
    bit_generator = _BIT_GENERATORS[state["bit_generator"]]()
    expected = bit_generator.state
    positions = [inner["pos"] for inner in (state.get("state"),) if type(inner) is dict and "pos" in inner]
    positions += [state["buffer_pos"]] if "buffer_pos" in expected else []
    largest = _LARGEST_POSITIONS.get(state["bit_generator"], 0)
    if not all(type(position) is int and 0 <= position <= largest for position in positions):
        raise StateDecodingError("the position of a NumPy generator in its buffer is out of range")
    if not _is_like(state, expected) or not any(map(np.any, _words_of(state))):
        # From an all-zero state a generator only returns zeros, and drawing normal numbers never ends.
        raise StateDecodingError("the state of a NumPy generator is malformed")
    return bit_generator


def _words_of(state: dict[str, Any]) -> list[Any]:
    inner = state["state"]
    return list(inner.values()) if isinstance(inner, dict) else [inner]


def _is_like(value: object, expected: object) -> bool:
    """Return whether a state has the entries, types and array shapes of a new generator's state."""
    if isinstance(expected, dict):
        # Extra entries are fine: RandomState adds the entries of its Gaussian numbers.
        return type(value) is dict and all(key in value and _is_like(value[key], expected[key]) for key in expected)
    if isinstance(expected, np.ndarray):
        return isinstance(value, np.ndarray) and value.shape == expected.shape and value.dtype == expected.dtype
    return type(value) is type(expected) and (type(value) is not int or 0 <= value < 2**128)


_PATH_CLASSES = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _path_parts(path: pathlib.PurePath) -> Parts:
    # A concrete path is stored as "Path", so that it becomes the class of the system that loads it.
    return {"kind": "Path" if isinstance(path, pathlib.Path) else type(path).__name__, "path": str(path)}


def _ordered(items: Set[object]) -> list[object]:
    # The iteration order of a set differs between processes. Files and digests of equal sets must not differ.
    return sorted(items, key=lambda item: (type(item).__qualname__, repr(item)))


def _datetime_parts(moment: datetime.datetime) -> Parts:
    date = (moment.year, moment.month, moment.day)
    return {"fields": (*date, *_clock(moment)), "tzinfo": moment.tzinfo, "fold": moment.fold}


def _time_parts(moment: datetime.time) -> Parts:
    return {"fields": _clock(moment), "tzinfo": moment.tzinfo, "fold": moment.fold}


def _clock(moment: datetime.datetime | datetime.time) -> tuple[int, int, int, int]:
    return (moment.hour, moment.minute, moment.second, moment.microsecond)


def _timezone_parts(zone: datetime.timezone) -> Parts:
    return {"arguments": zone.__getinitargs__()}  # type: ignore[attr-defined]


def _build_random(parts: Parts) -> random.Random:
    generator = random.Random(0)
    state = _exactly(parts["state"], tuple, "the state of a random generator")
    try:
        check_python_state(state, Where("its state", ""))
    except CheckpointLoadError as error:
        raise StateDecodingError("the state of a random generator is malformed") from error
    generator.setstate(state)
    return generator


def _build_torch_generator(parts: Parts) -> torch.Generator:
    # set_state() does not check everything: a bad position would read beyond the state. See `check_torch_state`.
    generator = torch.Generator(device=_exactly(parts["device"], torch.device, "the device of a generator"))
    state = parts["state"]
    if generator.device.type == "cpu":
        try:
            check_torch_state(state, Where("its state", ""))
        except CheckpointLoadError as error:
            raise StateDecodingError("the state of a torch generator is malformed") from error
    elif len(_flat_bytes(state)) != generator.get_state().numel():
        raise StateDecodingError("the state of a torch generator has a different length than in this version of torch")
    generator.set_state(state.cpu())
    return generator


def _bytes_parts(data: bytes | bytearray) -> Parts:
    return {"data": torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None}


def _raw_bytes(parts: Parts) -> bytes:
    return b"" if parts["data"] is None else _flat_bytes(parts["data"]).tobytes()


def _build_deque(parts: Parts) -> collections.deque[Any]:
    _exactly(parts["maxlen"], (type(None), int), "the maxlen of a deque")
    return collections.deque(_items(parts), parts["maxlen"])


def _build_path(parts: Parts) -> pathlib.PurePath:
    path: pathlib.PurePath = _PATH_CLASSES[parts["kind"]](_exactly(parts["path"], str, "a path"))
    return path


def _build_complex(parts: Parts) -> complex:
    return complex(*(_exactly(parts[name], float, "a part of a complex number") for name in ("real", "imag")))


def _build_datetime(parts: Parts) -> datetime.datetime:
    return datetime.datetime(*_numbers(parts["fields"], 7)).replace(  # type: ignore[arg-type]
        tzinfo=_zone(parts), fold=_fold(parts)
    )


def _build_time(parts: Parts) -> datetime.time:
    return datetime.time(*_numbers(parts["fields"], 4)).replace(  # type: ignore[arg-type]
        tzinfo=_zone(parts), fold=_fold(parts)
    )


def _zone(parts: Parts) -> datetime.timezone | None:
    zone: datetime.timezone | None = _exactly(parts["tzinfo"], (type(None), datetime.timezone), "a time zone")
    return zone


def _fold(parts: Parts) -> int:
    fold: int = _exactly(parts["fold"], int, "the fold of a time")
    return fold


def _build_timezone(parts: Parts) -> datetime.timezone:
    offset, *name = _exactly(parts["arguments"], (tuple, list), "a time zone")
    return datetime.timezone(
        _exactly(offset, datetime.timedelta, "a time zone"), *(_exactly(one, str, "its name") for one in name)
    )


_NUMPY_SCALAR = Converter("numpy_scalar", _numpy_scalar_parts, _build_numpy_scalar)
BYTES = Converter("bytes", _bytes_parts, _raw_bytes)
INT = Converter("int", lambda v: {"hex": hex(v)}, lambda p: int(_exactly(p["hex"], str, "an integer"), 16))
_PATH = Converter("path", _path_parts, _build_path)

_BY_TYPE: dict[type, Converter] = {
    collections.deque: Converter("deque", lambda v: {"items": list(v), "maxlen": v.maxlen}, _build_deque),
    set: Converter("set", lambda v: {"items": _ordered(v)}, lambda p: set(_distinct(p))),
    frozenset: Converter("frozenset", lambda v: {"items": _ordered(v)}, lambda p: frozenset(_distinct(p))),
    bytearray: Converter("bytearray", _bytes_parts, lambda p: bytearray(_raw_bytes(p))),
    complex: Converter("complex", lambda v: {"real": v.real, "imag": v.imag}, _build_complex),
    range: Converter(
        "range", lambda v: {"bounds": (v.start, v.stop, v.step)}, lambda p: range(*_numbers(p["bounds"], 3))
    ),
    datetime.datetime: Converter("datetime", _datetime_parts, _build_datetime),
    datetime.date: Converter(
        "date", lambda v: {"fields": (v.year, v.month, v.day)}, lambda p: datetime.date(*_numbers(p["fields"], 3))
    ),
    datetime.time: Converter("time", _time_parts, _build_time),
    datetime.timedelta: Converter(
        "timedelta",
        lambda v: {"fields": (v.days, v.seconds, v.microseconds)},
        lambda p: datetime.timedelta(*_numbers(p["fields"], 3)),
    ),
    datetime.timezone: Converter("timezone", _timezone_parts, _build_timezone),
    np.ndarray: Converter("ndarray", _array_parts, _build_array),
    np.random.Generator: Converter("numpy_generator", _numpy_generator_parts, _build_numpy_generator),
    np.random.RandomState: Converter("numpy_random_state", _numpy_generator_parts, _build_random_state),
    random.Random: Converter("random", lambda v: {"state": v.getstate()}, _build_random),
    torch.Generator: Converter(
        "torch_generator", lambda v: {"device": v.device, "state": v.get_state()}, _build_torch_generator
    ),
    **dict.fromkeys((pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath), _PATH),
}

CONVERTERS: dict[str, Converter] = {
    converter.tag: converter
    for converter in (*_BY_TYPE.values(), ENUM, FLAG, NAMEDTUPLE, DATACLASS, _NUMPY_SCALAR, BYTES, INT)
}


def find_converter(value: Any) -> Converter | None:
    """Return the converter for a value, or None if values of its type cannot be stored."""
    kind = type(value)
    converter = _BY_TYPE.get(kind)
    if converter is not None:
        return converter
    if issubclass(kind, np.generic):
        # A subclass of a NumPy scalar type would come back as the base type.
        return _NUMPY_SCALAR if kind is value.dtype.type else None
    if issubclass(kind, torch.nn.Module):
        # A module may be a dataclass too, but its fields are not its state_dict().
        return None
    return find_class_converter(kind)
