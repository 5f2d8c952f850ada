"""Restricted unpickler: only the pickle opcodes and constructors that `torch.save` uses for containers and tensors.

It replaces `torch.load(weights_only=True)`, which allows constructors that allocate as much memory as a file requests
(`bytearray`, `torch.Tensor`, storages). Here every object is charged to the file's memory budget, and a tensor cannot
reach beyond its storage. `state_files` and `dcp_weights` read with it.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from sys import getsizeof
from typing import Any

import torch

from forgather.ml.checkpoint.encoding.state_budget import (
    POINTER_BYTES,
    SCALAR_BYTES,
    SHELL_BYTES,
    TENSOR_BYTES,
    MemoryBudget,
    count_hashes,
)
from forgather.ml.checkpoint.encoding.storage_sources import StorageSource
from forgather.ml.checkpoint.encoding.torch_archive import TorchArchive
from forgather.ml.checkpoint.errors import CheckpointError, StateDecodingError

_MAX_DIMENSIONS = 64
_LARGEST_SIZE = 2**62
_MARK = object()
_PROTOCOL = 2
_LARGE_BYTES = 2**16
_STOP = b"."
_CONTAINERS = frozenset({list, dict, OrderedDict})
_IDENTITY_FIELDS = 5
_MOST_SPARSE_PARTS = (3, 4)

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_STORAGE_DTYPES: dict[str, torch.dtype] = {
    storage_name: dtype for dtype, storage_name in torch.storage._dtype_to_storage_type_map().items()
}
_LAYOUTS: dict[str, torch.layout] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)
}


class _Constructor(str):
    """Name of a global that the pickle may call or refer to."""


class _Storage:
    """Storage of the archive, with the dtype of its persistent id (the unit of its element count)."""

    def __init__(self, content: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.content = content
        self.dtype = dtype


class PlainUnpickler:
    """Unpickler of one archive; `with_data=False` builds tensors on the meta device without reading their content.

    `storages` supplies the memory of large records: a view of a mapped file, or memory that is filled after `load`.
    """

    def __init__(
        self,
        archive: TorchArchive,
        budget: MemoryBudget,
        with_data: bool = True,
        storages: StorageSource | None = None,
    ) -> None:
        self._source = storages
        self._archive = archive
        self._budget = budget
        self._with_data = with_data
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._memo: list[Any] = []
        self._highest = 0
        self._stack: list[Any] = []
        self._hash_counts: dict[int, Counter[int]] = {}
        self._data = b""
        self._position = 0

    def load(self) -> object:
        """Return the object that the archive's pickle describes; raise `StateDecodingError` if it is malformed."""
        self._data = bytes(self._archive.read("data.pkl"))
        self._budget.allow_objects(len(self._data))
        try:
            return self._run()
        except CheckpointError:
            raise
        # The handlers trust the stack, so a malformed pickle can fail in any of these ways.
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateDecodingError(f"its pickle is malformed ({type(error).__name__}: {error})") from error

    def _run(self) -> object:
        handlers = self._handlers()
        while (opcode := self._take(1)) != _STOP:
            handler = handlers.get(opcode)
            if handler is None:
                raise StateDecodingError(f"its pickle uses the opcode {opcode!r}, which checkpoints never use")
            handler()
        (result,) = self._stack
        return result

    def _handlers(self) -> dict[bytes, Callable[[], None]]:
        """Return the handler of each allowed opcode, by its byte in the pickle protocol (see `pickletools`)."""
        # Small integers, constants and the empty tuple are singletons of CPython and cost nothing.
        push, unsigned, take, pop = self._push, self._unsigned, self._take, self._stack.pop
        return {
            b"\x80": self._protocol,
            b"(": lambda: push(_MARK, 0),
            b"N": lambda: push(None, 0),
            b"\x88": lambda: push(True, 0),
            b"\x89": lambda: push(False, 0),
            b"K": lambda: push(unsigned(1), 0),
            b"M": lambda: push(unsigned(2), SCALAR_BYTES),
            b"J": lambda: push(int.from_bytes(take(4), "little", signed=True), SCALAR_BYTES),
            b"G": lambda: push(struct.unpack(">d", take(8))[0], SCALAR_BYTES),
            b"\x8a": self._long,
            b"X": self._text,
            b"]": lambda: push([], SHELL_BYTES),
            b"}": lambda: push({}, SHELL_BYTES),
            b")": lambda: push((), 0),
            b"t": lambda: self._tuple(self._pop_to_mark()),
            b"\x85": lambda: self._tuple(self._pop(1)),
            b"\x86": lambda: self._tuple(self._pop(2)),
            b"\x87": lambda: self._tuple(self._pop(3)),
            b"a": lambda: self._append_all([pop()]),
            b"e": lambda: self._append_all(self._pop_to_mark()),
            b"s": lambda: self._set_all(self._pop(2)),
            b"u": lambda: self._set_all(self._pop_to_mark()),
            b"q": lambda: self._remember(unsigned(1)),
            b"r": lambda: self._remember(unsigned(4)),
            b"h": lambda: self._refer_to(unsigned(1)),
            b"j": lambda: self._refer_to(unsigned(4)),
            b"c": self._global,
            b"R": self._reduce,
            b"b": self._build,
            b"Q": self._persistent,
        }

    def _take(self, count: int) -> bytes:
        taken = self._data[self._position : self._position + count]
        if len(taken) != count:
            raise StateDecodingError("its pickle is truncated")
        self._position += count
        return taken

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _push(self, value: object, memory: int) -> None:
        self._budget.spend(memory)
        self._stack.append(value)
        # The list of the stack itself is charged only when it reaches a new peak.
        if len(self._stack) > self._highest:
            self._highest = len(self._stack)
            self._budget.spend(POINTER_BYTES)

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise StateDecodingError("its pickle has too few items on its stack")
        del self._stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        # Search from the top: from the bottom, nested marks would take quadratic time.
        number = len(self._stack) - 1
        while self._stack[number] is not _MARK:
            number -= 1
            if number < 0:
                raise StateDecodingError("its pickle lacks a mark")
        items = self._stack[number + 1 :]
        del self._stack[number:]
        return items

    def _remember(self, number: int) -> None:
        """Add the top of the stack to the memo."""
        # Picklers number memo entries in sequence, so a list is enough. A dict with arbitrary keys would cost more.
        if number != len(self._memo):
            raise StateDecodingError("its pickle numbers its memo entries out of order")
        self._budget.spend(POINTER_BYTES)
        self._memo.append(self._stack[-1])

    def _refer_to(self, number: int) -> None:
        """Push a memo entry."""
        value = self._memo[number]
        # Containers that refer to each other repeatedly would grow exponentially when the decoder copies them.
        if type(value) in _CONTAINERS:
            raise StateDecodingError("its pickle refers to one container more than once")
        self._push(value, 0)

    # --- atoms

    def _protocol(self) -> None:
        if self._unsigned(1) != _PROTOCOL:
            raise StateDecodingError("its pickle does not use the protocol of torch.save")

    def _text(self) -> None:
        size = self._unsigned(4)
        # Pickle writes lone surrogates (undecodable bytes of file names) with this error handler.
        text = str(self._take(size), "utf-8", "surrogatepass")
        self._push(text, getsizeof(text))

    def _long(self) -> None:
        size = self._unsigned(1)
        self._push(int.from_bytes(self._take(size), "little", signed=True), SCALAR_BYTES + size)

    def _global(self) -> None:
        # A global is two lines of text: module and name.
        end = self._data.find(b"\n", self._data.find(b"\n", self._position) + 1)
        lines = self._data[self._position : end].decode("ascii").split("\n") if end > 0 else []
        if len(lines) != 2 or end - self._position > 200:
            raise StateDecodingError("its pickle names a malformed global")
        self._position = end + 1
        module, name = lines
        if module == "torch" and name in _DTYPES:
            self._push(_DTYPES[name], 0)
        elif f"{module}.{name}" in _CONSTRUCTORS or (module == "torch" and name in _STORAGE_DTYPES):
            self._push(_Constructor(f"{module}.{name}"), 4 * SCALAR_BYTES)
        else:
            raise StateDecodingError(
                f"its pickle refers to {module}.{name}, but a checkpoint contains data, never code"
            )

    # --- containers

    def _tuple(self, items: list[Any]) -> None:
        self._push(tuple(items), SHELL_BYTES + POINTER_BYTES * len(items))

    def _append_all(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise StateDecodingError(f"its pickle appends to a {type(target).__name__}")
        before = getsizeof(target)
        target.extend(items)
        self._budget.spend(getsizeof(target) - before)

    def _set_all(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise StateDecodingError(f"its pickle sets items of a {type(target).__name__}")
        keys = items[::2]
        if not all(key is None or type(key) in (str, int, float, bool) for key in keys):
            raise StateDecodingError("its pickle has a dict with keys other than text and numbers")
        if not all(type(key) is str for key in keys):
            # Python randomises the hashes of text only. Hashes of numbers can be made to collide.
            count_hashes(keys, self._hash_counts.setdefault(id(target), Counter()))
        before = getsizeof(target)
        target.update(zip(keys, items[1::2], strict=True))
        self._budget.spend(getsizeof(target) - before)

    def _build(self) -> None:
        """Set attributes of an OrderedDict: the state_dict of a module has the versions of its layers there."""
        attributes, target = self._stack.pop(), self._stack[-1]
        if type(target) is not OrderedDict or type(attributes) is not dict or set(attributes) - {"_metadata"}:
            raise StateDecodingError("its pickle sets attributes of an object")
        vars(target).update(attributes)

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        build = _CONSTRUCTORS.get(function) if type(function) is _Constructor else None
        if build is None or type(arguments) is not tuple:
            raise StateDecodingError("its pickle calls something other than a constructor of plain data")
        if build is _sparse_tensor and self._source is not None:
            # The constructor reads the indices.
            self._source.fill()
        made = build(*arguments)
        if isinstance(made, torch.Tensor) and made.layout is torch.strided and not made.is_meta:
            # An expanded tensor repeats its memory. A later copy of it takes its full size, so charge that now.
            self._budget.spend(max(0, made.nbytes - made.untyped_storage().nbytes()))
        self._push(made, len(made) if type(made) is bytes else TENSOR_BYTES)

    # --- storages

    def _persistent(self) -> None:
        identity = self._stack.pop()
        if type(identity) is not tuple or len(identity) != _IDENTITY_FIELDS:
            raise StateDecodingError("its pickle refers to something other than a storage")
        kind, storage_type, key, _, count = identity
        if kind != "storage" or type(storage_type) is not _Constructor or type(key) is not str:
            raise StateDecodingError("its pickle refers to something other than a storage")
        name = storage_type.removeprefix("torch.")
        dtype = torch.uint8 if storage_type == _UNTYPED else _STORAGE_DTYPES[name]
        if key not in self._storages:
            self._storages[key] = self._read_storage(key)
        # On every reference: each persistent id states its own size for the same storage.
        if _sized(count) * dtype.itemsize != self._storages[key].nbytes():
            raise StateDecodingError(f"storage {key[:100]!r} has a different size than in its pickle")
        self._push(_Storage(self._storages[key], dtype), TENSOR_BYTES)

    def _read_storage(self, key: str) -> torch.UntypedStorage:
        # The size comes from the archive's directory, which is bounded by the file, and not from the pickle.
        size = self._archive.size_of(f"data/{key}")
        if not self._with_data:
            return torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        self._budget.spend(size)
        # Small tensors, such as step counters, may stay on the CPU after a load, and must not keep a mapping alive.
        if self._source is not None and size >= _LARGE_BYTES:
            storage = self._source.take(self._archive.offset_of(f"data/{key}"), size)
            if storage is not None:
                return storage
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self._archive.read_into(f"data/{key}", memoryview(content.numpy()))  # type: ignore[arg-type]
        return content.untyped_storage()


def _sized(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_SIZE:
        raise StateDecodingError(f"a size or position is out of range or not an integer ({type(value).__name__})")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list, torch.Size) or len(values) > _MAX_DIMENSIONS:
        raise StateDecodingError("a tensor has a malformed shape")
    return tuple(_sized(value) for value in values)


def _tensor_v2(
    storage: Any,
    offset: object,
    size: object,
    stride: object,
    _requires_grad: object,
    _hooks: object,
    metadata: object = None,
) -> torch.Tensor:
    return _tensor(storage, offset, size, stride, storage.dtype, metadata)


def _tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    _requires_grad: object,
    _hooks: object,
    dtype: object,
    metadata: object = None,
) -> torch.Tensor:
    return _tensor(storage, offset, size, stride, dtype, metadata)


def _tensor(
    storage: object, offset: Any, size: object, stride: object, dtype: object, metadata: object
) -> torch.Tensor:
    shape, strides = _sizes(size), _sizes(stride)
    if type(storage) is not _Storage or type(dtype) is not torch.dtype or len(shape) != len(strides):
        raise StateDecodingError("a tensor is malformed")
    # Check the bounds here, because torch would resize the storage to fit the shape.
    last = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    needed = 0 if 0 in shape else (_sized(offset) + last + 1) * dtype.itemsize
    if needed > storage.content.nbytes() or _sized(offset) * dtype.itemsize > storage.content.nbytes():
        raise StateDecodingError(f"a tensor of shape {shape} and strides {strides} reaches beyond its storage")
    tensor = torch.empty((0,), dtype=dtype, device=storage.content.device)
    tensor.set_(storage.content, offset, shape, strides)
    return _seen_as(tensor, metadata)


def _seen_as(tensor: torch.Tensor, metadata: object) -> torch.Tensor:
    """Restore the conjugate and negative bits of a lazy view."""
    if metadata is None:
        return tensor
    if type(metadata) is not dict or not set(metadata) <= {"conj", "neg"} or set(metadata.values()) - {True}:
        raise StateDecodingError("a tensor has unknown metadata")
    set_metadata: Callable[[torch.Tensor, dict[str, bool]], None] = torch._utils.set_tensor_metadata
    set_metadata(tensor, metadata)
    return tensor


def _meta_tensor(dtype: Any, size: object, stride: object, _requires_grad: object) -> torch.Tensor:
    return torch.empty_strided(_sizes(size), _sizes(stride), dtype=dtype, device="meta")


def _sparse_tensor(layout: object, data: object) -> torch.Tensor:
    """Build a sparse tensor with `check_invariants=True`, because torch operations trust the indices."""
    if type(data) is not tuple or not _MOST_SPARSE_PARTS[0] <= len(data) <= _MOST_SPARSE_PARTS[1]:
        raise StateDecodingError("a sparse tensor is malformed")
    parts: list[Any]
    *parts, size = data[:3] if layout is torch.sparse_coo else data
    is_coalesced = data[3] if layout is torch.sparse_coo and len(data) > 3 else None
    if not all(isinstance(part, torch.Tensor) and part.is_contiguous() for part in parts):
        raise StateDecodingError("a sparse tensor is malformed")
    if any(part.is_meta for part in parts):
        return torch.empty(_sizes(size), dtype=parts[-1].dtype, device="meta")
    make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
    options = {"is_coalesced": is_coalesced} if layout is torch.sparse_coo else {"layout": layout}
    tensor: torch.Tensor = make(*parts, _sizes(size), check_invariants=True, **options)
    return tensor


def _bytes(text: object, encoding: object) -> bytes:
    """Return bytes from the text form of pickle protocol 2."""
    # Only this codec: others could run very long (bz2, idna).
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise StateDecodingError("its pickle encodes text in an unexpected way")
    return text.encode("latin-1")


def _device(kind: Any, index: Any = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


def _ordered_dict(*arguments: object) -> OrderedDict[Any, Any]:
    if arguments:
        raise StateDecodingError("its pickle passes arguments to OrderedDict")
    return OrderedDict()


_UNTYPED = "torch.storage.UntypedStorage"
# Parameters come back as plain tensors. `UntypedStorage` is listed because a persistent id may name it. A call of it
# builds nothing, unlike in torch, where it allocates.
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, _requires_grad, _hooks: data,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch.serialization._get_layout": lambda name: _LAYOUTS[name],
    "torch.Size": lambda values: torch.Size(_sizes(values)),
    "torch.device": _device,
    "_codecs.encode": _bytes,
    _UNTYPED: lambda *_: None,
}
