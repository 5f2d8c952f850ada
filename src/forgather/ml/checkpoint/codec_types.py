"""How the values that `torch.load(weights_only=True)` does not read are taken apart and rebuilt, by type."""

import collections
import datetime
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forgather.ml.checkpoint.codec_classes import (
    DATACLASS,
    ENUM,
    FLAG,
    NAMEDTUPLE,
    Converter,
    Parts,
    UnsupportedValueError,
    find_class_converter,
)
from forgather.ml.checkpoint.errors import StateDecodingError

_ARRAY_KINDS = frozenset("biufcmMSU")
_BIT_GENERATORS: dict[str, Callable[[], np.random.BitGenerator]] = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def _array_parts(array: np.ndarray) -> Parts:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValueError(
            f"has the dtype {array.dtype}; store an array of numbers, dates or fixed-length text, or a list"
        )
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    flat = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()  # torch does not share memory it must not write to
    return {"dtype": array.dtype.str, "shape": array.shape, "order": order, "data": torch.from_numpy(flat)}


def _build_array(parts: Parts) -> np.ndarray:
    dtype = _array_dtype(parts["dtype"])
    shape = tuple(parts["shape"])[:: -1 if parts["order"] == "F" else 1]
    data = parts["data"]
    if data.dtype != torch.uint8 or data.numel() != math.prod(shape) * dtype.itemsize:
        raise StateDecodingError(f"a NumPy array of shape {shape} and dtype {dtype} has the wrong number of bytes")
    array = np.empty(shape, dtype)
    if array.nbytes:
        # A copy: the tensor may be mapped to a checkpoint file that rotation deletes.
        array.reshape(-1).view(np.uint8)[:] = data.cpu().numpy()
    return array.T if parts["order"] == "F" else array


def _array_dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise StateDecodingError(f"a NumPy value has the dtype {name!r}, which a checkpoint never holds")
    return dtype


def _numpy_scalar_parts(value: Any) -> Parts:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValueError(f"has the dtype {value.dtype}; store its fields as plain values")
    # Not as an array element for text: NumPy drops trailing zeros when it reads those back, and in str(value).
    if isinstance(value, np.str_):
        return {"dtype": value.dtype.str, "value": str.__str__(value)}
    return {"dtype": value.dtype.str, "value": bytes(value) if isinstance(value, np.bytes_) else value.tobytes()}


def _build_numpy_scalar(parts: Parts) -> Any:
    dtype = _array_dtype(parts["dtype"])
    if dtype.kind in "US":
        return dtype.type(parts["value"])
    return np.frombuffer(parts["value"], dtype, count=1)[0]


def _numpy_generator_parts(generator: Any) -> Parts:
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise UnsupportedValueError(f"uses the unknown bit generator {state['bit_generator']!r}; store its state")
    return {"state": state}


def _build_numpy_generator(parts: Parts) -> np.random.Generator:
    bit_generator = _BIT_GENERATORS[parts["state"]["bit_generator"]]()
    bit_generator.state = parts["state"]
    return np.random.Generator(bit_generator)


def _build_random_state(parts: Parts) -> np.random.RandomState:
    state = np.random.RandomState(_BIT_GENERATORS[parts["state"]["bit_generator"]]())
    state.set_state(parts["state"])
    return state


_PATH_CLASSES = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _path_parts(path: pathlib.PurePath) -> Parts:
    return {"kind": "Path" if isinstance(path, pathlib.Path) else type(path).__name__, "path": str(path)}


def _ordered(items: set | frozenset) -> list:
    # The order of a set differs from process to process: files and digests of equal sets must not.
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
    generator.setstate(parts["state"])
    return generator


def _build_torch_generator(parts: Parts) -> torch.Generator:
    generator = torch.Generator(device=parts["device"])
    generator.set_state(parts["state"].cpu())
    return generator


def _bytes_parts(data: bytes | bytearray) -> Parts:
    return {"data": torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None}


def _raw_bytes(parts: Parts) -> bytes:
    return b"" if parts["data"] is None else parts["data"].cpu().numpy().tobytes()


_NUMPY_SCALAR = Converter("numpy_scalar", _numpy_scalar_parts, _build_numpy_scalar)
BYTES = Converter("bytes", _bytes_parts, _raw_bytes)
INT = Converter("int", lambda v: {"hex": hex(v)}, lambda p: int(p["hex"], 16))
_PATH = Converter("path", _path_parts, lambda p: _PATH_CLASSES[p["kind"]](p["path"]))

_BY_TYPE: dict[type, Converter] = {
    collections.deque: Converter(
        "deque",
        lambda v: {"items": list(v), "maxlen": v.maxlen},
        lambda p: collections.deque(p["items"], p["maxlen"]),
    ),
    set: Converter("set", lambda v: {"items": _ordered(v)}, lambda p: set(p["items"])),
    frozenset: Converter("frozenset", lambda v: {"items": _ordered(v)}, lambda p: frozenset(p["items"])),
    bytearray: Converter("bytearray", _bytes_parts, lambda p: bytearray(_raw_bytes(p))),
    complex: Converter("complex", lambda v: {"real": v.real, "imag": v.imag}, lambda p: complex(p["real"], p["imag"])),
    range: Converter("range", lambda v: {"bounds": (v.start, v.stop, v.step)}, lambda p: range(*p["bounds"])),
    datetime.datetime: Converter(
        "datetime",
        _datetime_parts,
        lambda p: datetime.datetime(*p["fields"]).replace(tzinfo=p["tzinfo"], fold=p["fold"]),
    ),
    datetime.date: Converter(
        "date", lambda v: {"fields": (v.year, v.month, v.day)}, lambda p: datetime.date(*p["fields"])
    ),
    datetime.time: Converter(
        "time", _time_parts, lambda p: datetime.time(*p["fields"]).replace(tzinfo=p["tzinfo"], fold=p["fold"])
    ),
    datetime.timedelta: Converter(
        "timedelta",
        lambda v: {"fields": (v.days, v.seconds, v.microseconds)},
        lambda p: datetime.timedelta(*p["fields"]),
    ),
    datetime.timezone: Converter("timezone", _timezone_parts, lambda p: datetime.timezone(*p["arguments"])),
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
    """Returns the converter for a value, or None when values of its type cannot be stored."""
    kind = type(value)
    converter = _BY_TYPE.get(kind)
    if converter is not None:
        return converter
    if issubclass(kind, np.generic):
        return _NUMPY_SCALAR if kind is value.dtype.type else None
    if issubclass(kind, torch.nn.Module):
        return None
    return find_class_converter(kind)
