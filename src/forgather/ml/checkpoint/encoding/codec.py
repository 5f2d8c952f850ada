"""Codec of state files: encodes any supported state as plain containers and tensors, and decodes it again.

Plain containers, numbers, text and tensors stay unchanged. Any other supported value becomes a tagged dict, with its
kind under the key "__forgather__" (see `converters`). A user's dict that has this key is stored as a tagged dict too.
Decoding never unpickles code. `snapshot` encodes every component, `state_files` decodes.
"""

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from sys import getsizeof
from typing import Any, TypeVar

import torch

from forgather.ml.checkpoint.encoding.class_values import Converter, Parts, UnsupportedValueError
from forgather.ml.checkpoint.encoding.converters import BYTES, CONVERTERS, INT, find_converter
from forgather.ml.checkpoint.encoding.state_budget import SHELL_BYTES, MemoryBudget, count_hashes
from forgather.ml.checkpoint.errors import StateDecodingError, StateEncodingError
from forgather.ml.checkpoint.sharding.sharded_tensors import is_dtensor, is_sharded, local_part

T = TypeVar("T")

TAG = "__forgather__"

# Integers, bytes and tensors are missing here: the encoder has to check their size or their storage first.
_ATOMS = frozenset({str, float, bool, type(None), torch.Size, torch.dtype, torch.device, torch.layout})
_DECODED_ATOMS = _ATOMS | {int, bytes, torch.Tensor}
_PLAIN_KEYS = frozenset({str, float, bool, type(None)})
_FACTORIES = {
    kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}

# torch.load reads integers of at most 255 bytes. torch.save writes bytes as text of up to twice their length.
_MAX_PLAIN_INT_BITS = 1024
_MAX_PLAIN_BYTES = 1024

# Encoding, torch.save and decoding recurse with several frames per level. This stays well below Python's recursion
# limit. A tagged mapping takes three levels in the encoded form: its parts, the list of items, and the pair.
_MAX_DEPTH = 64
_MAX_ENCODED_DEPTH = 3 * _MAX_DEPTH

# Tagged values have only a few named parts.
_MOST_PARTS = 16
_LONGEST_KEY = 200

# torch.save writes the full storage behind a view. Copying the views pays off when more than a tenth is unused.
_MIN_USED_FRACTION = 0.9


def encode_state(state: object, root: str = "") -> object:
    """Return the state in plain containers that share memory with its tensors and arrays.

    Tensors are detached but not copied. Exceptions: views that use too little of their storage, and tensors that
    share a storage with another dtype. Raises `StateEncodingError` for a value that cannot be stored; the message has
    its dotted path, which starts with `root`.
    """
    encoder = _Encoder(root)
    encoded = encoder.encode(state)
    encoder.tensors.release_unused_storage()
    return encoded


def decode_state(plain: object, budget: MemoryBudget | None = None, consume: bool = False) -> object:
    """Return the state that was passed to `encode_state`, without running code that the encoded form names.

    Raises `StateDecodingError` for content that `encode_state` never writes, or that exceeds the memory `budget`.
    `consume=True` empties the containers of `plain` while decoding, so that two full copies never exist at once.
    """
    return _Decoder(budget or MemoryBudget(), consume).decode(plain)


class _TensorAliases:
    """Detached aliases of tensors, without storages that are much larger than the stored views."""

    def __init__(self) -> None:
        self._dtypes: dict[int, torch.dtype] = {}
        self._whole_storages: set[int] = set()
        self._views: dict[int, list[torch.Tensor]] = defaultdict(list)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # detach() also drops hooks and Python attributes, which torch.save would pickle.
        alias = tensor.detach()
        if alias.layout is torch.strided and not alias.is_nested:
            storage = alias.untyped_storage()
            if self._dtypes.setdefault(storage.data_ptr(), alias.dtype) is not alias.dtype and storage.data_ptr():
                # torch.save raises for two tensors that view the same data with different dtypes.
                return alias.clone()
            if storage.nbytes() == alias.nbytes:
                self._whole_storages.add(storage._cdata)
            else:
                self._views[storage._cdata].append(alias)
        return alias

    def release_unused_storage(self) -> None:
        for storage_id, views in self._views.items():
            if storage_id in self._whole_storages:
                # The full storage is written anyway, so its views cost nothing.
                continue
            # Equal views (tied weights) get one copy, so that they still share memory after loading.
            distinct = {_view_key(view): view for view in views}
            used = sum(_footprint(view) * view.itemsize for view in distinct.values())
            if used < _MIN_USED_FRACTION * views[0].untyped_storage().nbytes():
                copies = {key: _compact_copy(view) for key, view in distinct.items()}
                for view in views:
                    # In place, because the encoded containers hold these view objects already.
                    view.data = copies[_view_key(view)]


def _view_key(view: torch.Tensor) -> tuple[Any, ...]:
    return view.storage_offset(), view.shape, view.stride(), view.dtype, view.is_conj(), view.is_neg()


def _span(view: torch.Tensor) -> int:
    """Return the number of elements from the first to the last element of a view, including skipped elements."""
    if view.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def _footprint(view: torch.Tensor) -> int:
    # An expanded tensor has more elements than memory. A strided tensor has fewer elements than its span.
    return min(view.numel(), _span(view))


def _compact_copy(view: torch.Tensor) -> torch.Tensor:
    span = _span(view)
    if span >= view.numel():
        return view.clone()
    # An expanded tensor stays expanded: clone() would write out every repetition.
    return view.as_strided((span,), (1,)).clone().as_strided(view.shape, view.stride(), 0)


class _Encoder:
    """Single-use encoder of one state.

    The path of the current value is kept as a stack. Only an error formats it as text.
    """

    def __init__(self, root: str) -> None:
        self.tensors = _TensorAliases()
        self._path: list[Any] = [root] if root else []
        self._open: set[int] = set()
        self._containers: dict[type, Callable[[Any], Any]] = {
            dict: self._dict,
            list: self._list,
            tuple: lambda value: tuple(self._list(value)),
            OrderedDict: self._ordered_dict,
            defaultdict: self._default_dict,
            Counter: lambda value: self._tagged_mapping("Counter", value),
        }

    def encode(self, value: Any) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._refuse_special_tensor(value)
            return self.tensors.alias(value)
        if is_dtensor(value):
            # A sharded tensor stays as it is: its content is read when the file is written.
            return value.detach() if is_sharded(value) else self.encode(local_part(value))
        if kind is int:
            return value if value.bit_length() <= _MAX_PLAIN_INT_BITS else self._convert(INT, value)
        if kind is bytes:
            # Pickle protocol 2 writes empty bytes as a call of the global `bytes`, which readers of plain data reject.
            return value if 0 < len(value) <= _MAX_PLAIN_BYTES else self._convert(BYTES, value)
        container = self._containers.get(kind)
        if container is not None:
            return self._nested(value, container)
        converter = find_converter(value)
        if converter is None:
            raise self._refusal(value, *_explain(value))
        return self._nested(value, lambda content: self._convert(converter, content))

    def _refuse_special_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantised"
            raise self._refusal(tensor, f"is a {kind} tensor", "Store the plain tensors that it is made of.")

    def _nested(self, value: object, build: Callable[[Any], Any]) -> object:
        # Only the containers that enclose the current value are open, so a shared container is not taken for a cycle.
        if id(value) in self._open:
            raise self._refusal(value, "contains itself", "Store a state without cycles.")
        if len(self._open) >= _MAX_DEPTH:
            raise self._refusal(value, f"is nested more than {_MAX_DEPTH} levels deep", "Flatten the state.")
        self._open.add(id(value))
        built = build(value)
        self._open.remove(id(value))
        return built

    def _child(self, key: object, value: object) -> object:
        self._path.append(key)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _list(self, value: Iterable[Any]) -> list[Any]:
        return [item if type(item) in _ATOMS else self._child(index, item) for index, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        # As a list of pairs, because a pickled dict may only have plain keys, and TAG would look like a tagged value.
        if TAG in value or not _has_plain_keys(value):
            return self._tagged_mapping("dict", value)
        return {key: self._child(key, item) for key, item in value.items()}

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> dict[Any, Any]:
        # The state_dict of a module has the versions of its layers in the attribute `_metadata`.
        attributes = {name: self._child(name, item) for name, item in vars(value).items()}
        if not _has_plain_keys(value):
            return self._tagged_mapping("OrderedDict", value, attributes=attributes)
        encoded = OrderedDict((key, self._child(key, item)) for key, item in value.items())
        vars(encoded).update(attributes)
        return encoded

    def _default_dict(self, value: defaultdict[Any, Any]) -> Parts:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise self._refusal(
                value, f"has the default factory {factory!r}", f"Use a dict, or one of {', '.join(_FACTORIES)}."
            )
        name = getattr(factory, "__name__", None)
        return self._tagged_mapping("defaultdict", value, factory=name)

    def _tagged_mapping(self, kind: str, value: Mapping[Any, Any], **parts: object) -> Parts:
        items = [(self._child(key, key), self._child(key, item)) for key, item in value.items()]
        return {TAG: "mapping", "kind": kind, "items": items, **parts}

    def _convert(self, converter: Converter, value: object) -> Parts:
        try:
            parts = converter.to_parts(value)
        except UnsupportedValueError as error:
            raise self._refusal(value, str(error), "") from None
        return {TAG: converter.tag, **{name: self.encode(part) for name, part in parts.items()}}

    def _refusal(self, value: object, reason: str, advice: str) -> StateEncodingError:
        kind = type(value)
        text = f"cannot store {_dotted(self._path)}: the value of type {kind.__module__}.{kind.__qualname__} {reason}"
        return StateEncodingError(f"{text}. {advice}".rstrip(". ") + ".")


def _has_plain_keys(mapping: Mapping[Any, Any]) -> bool:
    return all(
        type(key) in _PLAIN_KEYS or (type(key) is int and key.bit_length() <= _MAX_PLAIN_INT_BITS) for key in mapping
    )


def _dotted(path: list[Any]) -> str:
    return ".".join((part if isinstance(part, str) else repr(part))[:_LONGEST_KEY] for part in path) or "the state"


def _explain(value: object) -> tuple[str, str]:
    """Return the reason why a value cannot be stored, and an alternative."""
    reason = "cannot be restored from a checkpoint without running code"
    if isinstance(value, torch.Tensor):
        return "is a tensor subclass", "Store the plain tensors that it is made of."
    if isinstance(value, torch.nn.Module):
        return reason, "Store its state_dict()."
    if isinstance(value, io.IOBase):
        return reason, "Store the path of the file and the position in it."
    # Subclasses of built-in types are rejected rather than silently reduced to the base type.
    for base in (dict, list, tuple, str, int, float, bytes, set, frozenset):
        if isinstance(value, base):
            return f"would come back as a plain {base.__name__}", f"Convert it first, with {base.__name__}(value)."
    if callable(value):
        return reason, "Leave it out of the state, or store a name and look it up when loading."
    return reason, "Leave it out of the state, or store its fields in a dict (its state_dict(), if it has one)."


class _Decoder:
    """Single-use decoder of one encoded state."""

    def __init__(self, budget: MemoryBudget, consume: bool) -> None:
        self._path: list[Any] = []
        self._budget = budget
        self._consume = consume

    def decode(self, plain: Any) -> object:
        kind = type(plain)
        if kind is dict:
            return self._tagged(plain) if TAG in plain else self._values(plain)
        if kind is tuple and not plain:
            return plain
        if kind is list or kind is tuple:
            return self._copied(plain, kind([self._child(index, item) for index, item in enumerate(plain)]))
        if kind is OrderedDict:
            # Attributes hold `_metadata` of a module's state_dict; see the encoder.
            decoded = OrderedDict((key, self._child(key, item)) for key, item in plain.items())
            vars(decoded).update(self._values(vars(plain)))
            return self._copied(plain, decoded)
        if kind not in _DECODED_ATOMS:
            raise StateDecodingError(f"{_dotted(self._path)} is a {kind.__name__}, which a checkpoint never contains")
        return plain

    def _child(self, key: object, plain: object) -> object:
        if type(plain) in _ATOMS:
            return plain
        self._path.append(key)
        if len(self._path) > _MAX_ENCODED_DEPTH:
            raise StateDecodingError("the state in the checkpoint is nested too deeply, or contains itself")
        decoded = self.decode(plain)
        self._path.pop()
        return decoded

    def _values(self, plain: dict[Any, Any]) -> dict[Any, Any]:
        return self._copied(plain, {key: self._child(key, item) for key, item in plain.items()})

    def _copied(self, plain: Any, decoded: T) -> T:
        """Charge the budget for a decoded container, and empty the encoded container if it is consumed."""
        # On every visit, because a pickle can refer to one tuple from many positions. Each visit makes a new copy.
        self._budget.spend(getsizeof(decoded))
        if self._consume and type(plain) is not tuple:
            before = getsizeof(plain)
            plain.clear()
            self._budget.give_back(max(0, before - getsizeof(plain)))
        return decoded

    def _tagged(self, plain: Parts) -> object:
        tag = plain[TAG]
        build = _BUILDERS.get(tag) if isinstance(tag, str) else None
        if build is None or len(plain) > _MOST_PARTS:
            kind = repr(tag[:100]) if isinstance(tag, str) else f"a {type(tag).__name__}"
            raise StateDecodingError(
                f"{_dotted(self._path)} is stored as {kind}, which this version of forgather cannot read"
            )
        parts = {name: self._child(name, part) for name, part in plain.items() if name != TAG}
        self._budget.spend(SHELL_BYTES + sum(map(_memory_of_part, parts.values())))
        try:
            return build(parts)
        except StateDecodingError as error:
            # Keep the subclass: `verification` ignores UnregisteredClassError only.
            raise type(error)(f"cannot read {_dotted(self._path)}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise StateDecodingError(
                f"cannot read {_dotted(self._path)}: its {tag!r} is malformed ({error})"
            ) from error


def _memory_of_part(part: Any) -> int:
    """Return the bytes that a value built from this part copies."""
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    if type(part) in (str, bytes):
        # Python stores a character in up to four bytes.
        return 4 * len(part)
    return SHELL_BYTES * len(part) if type(part) in (list, tuple) else 0


def _build_mapping(parts: Parts) -> object:
    kind, items = parts["kind"], parts["items"]
    if type(items) is not list or not all(type(item) in (tuple, list) and len(item) == 2 for item in items):
        raise StateDecodingError("its items are not a list of pairs")
    count_hashes(key for key, _ in items)
    if kind == "dict":
        return dict(items)
    if kind == "Counter":
        return Counter(dict(items))
    if kind == "defaultdict":
        return defaultdict(None if parts["factory"] is None else _FACTORIES[parts["factory"]], items)
    if kind == "OrderedDict":
        ordered = OrderedDict(items)
        vars(ordered).update(parts["attributes"])
        return ordered
    raise StateDecodingError(f"unknown kind of mapping {kind!r}")


_BUILDERS: dict[str, Callable[[Parts], Any]] = {
    "mapping": _build_mapping,
    **{tag: converter.from_parts for tag, converter in CONVERTERS.items()},
}
