"""Digests of state: whole-content ones that prove two copies equal, and a cheap fingerprint from a sample."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.errors import StateEncodingError

_STAGING_BYTES = 16 * 2**20
_NUM_SAMPLES = 64
_MAX_REPR_LENGTH = 80
_INTEGERS_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def iter_leaves(state: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, value) for everything in nested dicts, lists and tuples; an empty container is a leaf."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = state.items()
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
    """Returns the leaves of a state by dotted path; those that would share a path get "#2", "#3", ... appended.

    {"a.b": 1} and {"a": {"b": 1}} have the same path, and so have the keys 1 and "1": none may hide the other.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in iter_leaves(state):
        unique, count = path, 1
        while unique in leaves:
            count += 1
            unique = f"{path}#{count}"
        leaves[unique] = leaf
    return leaves


def iter_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of at most 16 MB that make up a dense tensor in logical order."""
    if tensor.nbytes <= _STAGING_BYTES:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    parts = tensor.unbind(0) if row_bytes > _STAGING_BYTES else torch.split(tensor, _STAGING_BYTES // row_bytes)
    for part in parts:
        yield from iter_chunks(part)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the xxh3_128 of a tensor's bytes in logical order, whatever its strides and device, without a full copy.

    Dtype and shape are not part of it. A tensor without content (on the meta device) has a digest of its own.
    """
    return _TensorHasher().digest(tensor)


def state_digests(state: object) -> dict[str, str]:
    """Returns by dotted path a text that is equal for equal content: kind, dtype and shape, then value or digest."""
    hasher = _TensorHasher()
    return {path: _describe(leaf, hasher.digest) for path, leaf in leaves_by_path(state).items()}


def compute_state_hash(state_dict: object) -> str:
    """Returns a SHA-256 (64 hex characters) of structure, dtypes, shapes and a sample of each tensor's values.

    Cheap, so that it can be taken often: a change outside the sampled elements goes unnoticed. The order of the keys
    of a dict does not matter.
    """
    leaves = leaves_by_path(state_dict)
    return combine_digests({path: _describe(leaf, _sample_digest) for path, leaf in leaves.items()})


def combine_digests(digests: Mapping[str, str]) -> str:
    """Returns one SHA-256 for the digests of a whole state, independent of their order."""
    return hashlib.sha256(repr(sorted(digests.items())).encode("utf-8", "backslashreplace")).hexdigest()


class _TensorHasher:
    """Hashes tensors one after the other through one staging buffer, which is made when first needed."""

    def __init__(self) -> None:
        self._staging: torch.Tensor | None = None

    def digest(self, tensor: torch.Tensor) -> str:
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            tensor = tensor.detach()
        if _is_plain(tensor):
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
            for chunk in iter_chunks(tensor):
                state.update(_byte_view(self._stage(chunk)))

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < tensor.nbytes:
            self._staging = torch.empty(tensor.nbytes, dtype=torch.uint8)
        staged = self._staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return staged.copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor lie in memory in logical order, ready to be read."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _byte_view(tensor: torch.Tensor) -> Any:
    # the shorter way where NumPy has the dtype: with many small tensors this call costs as much as the hash
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy()
    return tensor.view(-1).view(torch.uint8).numpy()


def dense_components(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns the dense tensors that hold the content of a sparse, nested or wrapping tensor; None for a dense one."""
    if tensor.layout is torch.sparse_coo:
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
    """A digest of evenly spaced elements, the first and the last among them."""
    tensor = tensor.detach()
    components = dense_components(tensor)
    if components is not None:
        return " ".join(_sample_digest(component) for component in components)
    if tensor.is_meta or tensor.numel() == 0:
        return "no content"
    return xxhash.xxh3_128_hexdigest(_byte_view(_sample(tensor)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized):
        # as integers, because not every dtype (float8) can be indexed
        tensor = tensor.view(_INTEGERS_BY_SIZE.get(tensor.itemsize, tensor.dtype))
    positions = _sample_positions(tensor.numel()).to(tensor.device)
    if tensor.is_contiguous():
        sample = tensor.view(-1)[positions]
    else:
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
    """The content of an object as a checkpoint would store it, or what it says of itself when it cannot be stored."""
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
