"""Digests of state: full-content hashes that prove two copies equal, and a cheap hash of sampled values.

Digests do not depend on device, strides or the order of dict keys. `replicas` compares them between ranks. `snapshot`
and `sharing` combine them into one hash.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.encoding.staging import can_stage, iter_chunks, staged_chunks
from forgather.ml.checkpoint.errors import StateEncodingError

_NUM_SAMPLES = 64
# Longer texts are cut and get a hash instead, because ranks exchange these descriptions.
_MAX_REPR_LENGTH = 80
_INTEGERS_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
# Default reprs contain the memory address, which differs between ranks.
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def iter_leaves(state: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each leaf of nested dicts, lists and tuples; an empty container is a leaf."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = state.items()
    # torch.Size is a tuple, but it is one value.
    elif isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        items = enumerate(state)
    else:
        yield path, state
        return
    if not state:
        yield path, state
        return
    prefix = f"{path}." if path else ""
    for key, value in items:
        yield from iter_leaves(value, f"{prefix}{key}")


def leaves_by_path(state: object) -> dict[str, Any]:
    """Return the leaves of a state by dotted path; repeated paths get "#2", "#3", ... appended.

    {"a.b": 1} and {"a": {"b": 1}} have the same path, and so do the keys 1 and "1". No leaf may hide another.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in iter_leaves(state):
        unique, count = path, 1
        while unique in leaves:
            count += 1
            unique = f"{path}#{count}"
        leaves[unique] = leaf
    return leaves


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 hash of a tensor's bytes in logical order, without a full copy.

    Strides, device, dtype and shape do not change the hash. Tensors on the meta device have no content and share one
    fixed hash.
    """
    return _TensorHasher().digest(tensor)


def state_digests(state: object) -> dict[str, str]:
    """Return a text per dotted path that is equal for equal content: kind, dtype and shape, then value or digest."""
    leaves = leaves_by_path(state)
    hasher = _TensorHasher()
    if torch.accelerator.is_available():
        hasher.read_ahead(leaves.values())
    return {path: _describe(leaf, hasher.digest) for path, leaf in leaves.items()}


def compute_state_hash(state_dict: object) -> str:
    """Return a SHA-256 hash (64 hex characters) of structure, dtypes, shapes and a sample of each tensor's values.

    The hash is cheap, but does not detect a change outside the sampled elements. The order of dict keys does not
    matter.
    """
    leaves = leaves_by_path(state_dict)
    return combine_digests({path: _describe(leaf, _sample_digest) for path, leaf in leaves.items()})


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 hash for the digests of a state, independent of their order."""
    return hashlib.sha256(repr(sorted(digests.items())).encode("utf-8", "backslashreplace")).hexdigest()


class _TensorHasher:
    """Hasher of tensors with one reused staging buffer, which is allocated on first use."""

    def __init__(self) -> None:
        self._staging: torch.Tensor | None = None
        self._known: dict[int, str] = {}

    def read_ahead(self, leaves: Iterable[object]) -> None:
        """Compute the digests of all tensors on accelerators, so that copies overlap across tensors."""
        tensors = list({id(leaf): leaf for leaf in leaves if can_stage(leaf)}.values())
        states = [xxhash.xxh3_128() for _ in tensors]
        for index, chunk in staged_chunks(tensors):
            states[index].update(_byte_view(chunk))
        self._known = {id(tensor): one.hexdigest() for tensor, one in zip(tensors, states, strict=True)}

    def digest(self, tensor: torch.Tensor) -> str:
        if self._known and id(tensor) in self._known:
            return self._known[id(tensor)]
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            tensor = tensor.detach()
        if _is_plain(tensor):
            # One call for the usual case. It returns the same digest as the streaming hash below.
            return xxhash.xxh3_128_hexdigest(_byte_view(tensor))
        state = xxhash.xxh3_128()
        self._update(state, tensor)
        return state.hexdigest()

    def _update(self, state: Any, tensor: torch.Tensor) -> None:
        components = dense_components(tensor)
        if components is not None:
            for component in components:
                self._update(state, component)
        elif tensor.is_meta:
            state.update(b"meta")
        elif _is_plain(tensor):
            state.update(_byte_view(tensor))
        else:
            # Tensors on an accelerator or with strides pass through CPU memory in chunks, to bound the copy.
            for chunk in iter_chunks(tensor):
                state.update(_byte_view(self._stage(chunk)))

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        # The buffer has the size of the largest chunk so far: many states have only small tensors.
        if self._staging is None or self._staging.numel() < tensor.nbytes:
            self._staging = torch.empty(tensor.nbytes, dtype=torch.uint8)
        staged = self._staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return staged.copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor lie in CPU memory in logical order."""
    # Conjugated and negated views are lazy: their memory holds other values than the tensor shows.
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _byte_view(tensor: torch.Tensor) -> Any:
    # The shorter path where NumPy has the dtype: for many small tensors this call costs as much as the hash.
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy()
    return tensor.view(-1).view(torch.uint8).numpy()


def dense_components(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the dense tensors that hold the content of a sparse, nested or wrapper tensor; None for a dense tensor."""
    if tensor.layout is torch.sparse_coo:
        # Equal sparse tensors can have their entries in any order, and repeated. Coalescing sorts and sums them.
        coalesced = tensor.coalesce()
        return [coalesced.indices(), coalesced.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name).detach() for name in names]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return None


def _sample_digest(tensor: torch.Tensor) -> str:
    """Return a digest of evenly spaced elements, including the first and the last."""
    tensor = tensor.detach()
    components = dense_components(tensor)
    if components is not None:
        return " ".join(_sample_digest(component) for component in components)
    if tensor.is_meta or tensor.numel() == 0:
        return "no content"
    return xxhash.xxh3_128_hexdigest(_byte_view(_sample(tensor)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized):
        # View as integers, because some dtypes (float8) do not support indexing.
        tensor = tensor.view(_INTEGERS_BY_SIZE.get(tensor.itemsize, tensor.dtype))
    positions = _sample_positions(tensor.numel()).to(tensor.device)
    if tensor.is_contiguous():
        sample = tensor.view(-1)[positions]
    else:
        # Flattening a strided tensor would copy all of it.
        sample = tensor[torch.unravel_index(positions, tensor.shape)]
    return sample.cpu().resolve_conj().resolve_neg()


@lru_cache(maxsize=1024)
def _sample_positions(numel: int) -> torch.Tensor:
    count = min(numel, _NUM_SAMPLES)
    return torch.tensor([index * (numel - 1) // max(count - 1, 1) for index in range(count)])


def _describe(leaf: Any, digest: Callable[[torch.Tensor], str]) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"tensor {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)} {digest(leaf)}"
    kind = type(leaf)
    if kind in (int, bool, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size):
        return f"{kind.__name__} {_shortened(repr(leaf))}"
    if kind is np.ndarray:
        return f"ndarray {leaf.dtype.str} {list(leaf.shape)} {_array_digest(leaf)}"
    if isinstance(leaf, Mapping | list | tuple):
        return f"empty {kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__} {_object_text(leaf)}"


def _array_digest(array: np.ndarray) -> str:
    if array.dtype.hasobject:
        return _text_digest(_stable_repr(array.tolist()))
    content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else b""
    return xxhash.xxh3_128_hexdigest(content)


def _object_text(leaf: object) -> str:
    """Return the digest of an object's encoded state, or its repr if it cannot be encoded."""
    try:
        encoded = encode_state(leaf)
    except StateEncodingError:
        return _shortened(_stable_repr(leaf))
    return combine_digests(state_digests(encoded))


def _stable_repr(value: object) -> str:
    return _MEMORY_ADDRESS.sub("", repr(value))


def _shortened(text: str) -> str:
    if len(text) <= _MAX_REPR_LENGTH:
        return text
    return f"{text[:_MAX_REPR_LENGTH]}... {_text_digest(text)}"


def _text_digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "backslashreplace"))
