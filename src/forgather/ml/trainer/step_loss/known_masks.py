"""Known masks: facts about attention masks and positions, found on the host before a batch goes to the device.

transformers skips the attention mask if a batch has no padding and no packed sequences. To find out, it reads a value
from the device in every forward pass, and the host waits. `to_device` notes these facts on the tensors while they are
still on the CPU, and the functions of transformers that would read the device use the notes. Results do not change:
without a note, transformers reads the device. Used on accelerators only, by the trainers and the pipeline stages.
"""

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgather.ml.trainer.setup.devices import moved
from forgather.ml.utils import unwrap_model

_NOTE = "_forgather_known_rows"
_HAS_OWN_POSITIONS: ContextVar[bool] = ContextVar("model makes its own positions", default=False)
# Models checked by `counts_positions`. Weak keys, so that the table keeps no model alive.
_trusted: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class _Note(NamedTuple):
    version: int
    """Version of the tensor; a change in place makes the note invalid."""
    rows: tuple[bool, ...]
    """For each row of a mask: whether it has no padding. For each row of positions: whether it is one sequence."""


# --- notes on tensors


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move a batch to the device, and note on its mask and positions what transformers would read from the device."""
    result = moved(batch, device)
    for name, known in (("attention_mask", _has_no_padding), ("position_ids", _is_one_sequence)):
        source, target = batch.get(name), result.get(name)
        if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source is target:
            continue
        if source.device.type == "cpu" and source.ndim == 2:
            _answer_from_notes()
            _write(target, known(source).tolist())
    return dict(result)


def _has_no_padding(mask: Tensor) -> Tensor:
    return (mask != 0).all(-1)


def _is_one_sequence(positions: Tensor) -> Tensor:
    return (positions.diff(dim=-1) == 1).all(-1)


def _write(tensor: Tensor, rows: list[bool]) -> None:
    setattr(tensor, _NOTE, _Note(tensor._version, tuple(rows)))


def _read(tensor: Tensor) -> list[bool] | None:
    """Return the noted facts about the rows of a tensor, or of these rows of a larger tensor; None if unknown."""
    base = tensor if hasattr(tensor, _NOTE) else tensor._base
    note: _Note | None = getattr(base, _NOTE, None)
    if base is None or note is None or note.version != base._version or tensor.ndim != 2:
        return None
    if tensor.shape[1] != base.shape[1] or tensor.stride(1) != base.stride(1):
        return None
    if tensor.shape[0] > 1 and tensor.stride(0) == 0 and base.shape[0] == 1:
        # One row, expanded to all samples of a batch.
        return list(note.rows)
    # Micro-batches are slices of rows. The offset of a slice in the memory of its base gives its first row.
    first, column = divmod(int(tensor.storage_offset() - base.storage_offset()), max(base.stride(0), 1))
    if column or (tensor.shape[0] > 1 and tensor.stride(0) != base.stride(0)):
        return None
    return list(note.rows[first : first + tensor.shape[0]])


# --- positions that the model makes


@contextlib.contextmanager
def own_positions() -> Iterator[None]:
    """Declare that the model gets no positions and counts them itself, so that no sequences are packed."""
    token = _HAS_OWN_POSITIONS.set(True)
    try:
        yield
    finally:
        _HAS_OWN_POSITIONS.reset(token)


def positions_of(model: nn.Module, inputs: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return the context of a forward pass with these inputs, on an accelerator."""
    if inputs.get("position_ids") is not None or torch.compiler.is_compiling() or not counts_positions(model):
        return contextlib.nullcontext()
    return own_positions()


def counts_positions(model: nn.Module) -> bool:
    """Return whether the model runs only code of transformers, which counts positions from 0 in each row."""
    # Other code may compute positions that restart within a row, for packed sequences, so transformers must check.
    known = _trusted.get(model)
    if known is None:
        known = _trusted[model] = _is_of_transformers(unwrap_model(model))
        if known:
            _answer_from_notes()
    return known


def _is_of_transformers(model: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return False
    models = [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]
    return all(type(module).forward.__module__.startswith("transformers.") for module in models)


# --- functions of transformers

Wrapper = Callable[..., Any]


_wrapped: set[str] = set()
"""Names of the modules of transformers with wrapped functions."""


def _answer_from_notes() -> None:
    """Wrap the functions of transformers that read masks and positions from the device, once."""
    for name, wrap in (("masking_utils", _wrap_masks), ("modeling_utils", _wrap_warning)):
        library = sys.modules.get(f"transformers.{name}")
        if library is not None and name not in _wrapped:
            _wrapped.add(name)
            wrap(library)


def _wrap_warning(library: ModuleType) -> None:
    _wrap(library.PreTrainedModel, "warn_if_padding_and_no_attention_mask", _looking_once)


def _wrap_masks(library: ModuleType) -> None:
    _wrap(library, "find_packed_sequence_indices", _answered_packing)
    _wrap(library, "_preprocess_mask_arguments", _carrying_notes)
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        _wrap(library, name, _answered_padding)
    interface = getattr(library, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    functions: dict[str, Wrapper] = getattr(interface, "_global_mapping", {})
    for name, function in functions.items():
        if name.startswith(("flash", "flex")):
            functions[name] = _unless_compiling(function, _without_full_mask)


def _wrap(owner: object, name: str, answered: Callable[[Wrapper], Wrapper]) -> None:
    # A version of transformers without this private function reads the device as usual.
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, _unless_compiling(original, answered))


def _unless_compiling(original: Wrapper, answered: Callable[[Wrapper], Wrapper]) -> Wrapper:
    with_answers = answered(original)

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        # In a compiled forward pass transformers does not read the device: it always builds the mask.
        return (original if torch.compiler.is_compiling() else with_answers)(*args, **kwargs)

    return choose


def _answered_packing(original: Wrapper) -> Wrapper:
    def find(position_ids: Tensor) -> Tensor | None:
        rows = _read(position_ids)
        if rows is None:
            return None if _HAS_OWN_POSITIONS.get() else original(position_ids)
        if all(rows):
            return None
        # A new sequence starts wherever a position is not the successor of the position before it.
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 0] = False
        starts[:, 1:] = position_ids.diff(dim=-1) != 1
        return starts.cumsum(-1)

    return find


def _carrying_notes(original: Wrapper) -> Wrapper:
    """Keep the note of a mask that the function converts to booleans."""
    parameters = inspect.signature(original)

    def convert(*args: Any, **kwargs: Any) -> Any:
        mask = parameters.bind(*args, **kwargs).arguments.get("attention_mask")
        result = original(*args, **kwargs)
        converted = result[1]
        if isinstance(mask, Tensor) and isinstance(converted, Tensor) and converted is not mask:
            rows = _read(mask)
            if rows is not None and converted.shape == mask.shape:
                _write(converted, rows)
        return result

    return convert


def _answered_padding(original: Wrapper) -> Wrapper:
    """Decide by the note of the padding mask whether the mask can be omitted, if it covers exactly the queries."""
    parameters = inspect.signature(original)

    def ignore(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        padding = call.arguments.get("padding_mask")
        length = call.arguments.get("q_length", call.arguments.get("kv_length"))
        rows = _read(padding) if isinstance(padding, Tensor) and padding.shape[-1] == length else None
        if rows is None:
            return original(*args, **kwargs)
        if not all(rows):
            return False
        # Without a padding mask, transformers decides by shapes only and reads nothing from the device.
        call.arguments["padding_mask"] = None
        return original(*call.args, **call.kwargs)

    return ignore


def _without_full_mask(original: Wrapper) -> Wrapper:
    """Omit a mask without padding, for kernels that get their mask as lengths or blocks."""

    def create(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape[-1] == kwargs.get("kv_length"):
            rows = _read(mask)
            if rows is not None and all(rows):
                kwargs = {**kwargs, "attention_mask": None}
        return original(*args, **kwargs)

    return create


def _looking_once(original: Wrapper) -> Wrapper:
    """Check for padding without a mask in the first batch of a model only: it leads to no more than a warning."""
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def warn(model: nn.Module, input_ids: Any, attention_mask: Any) -> None:
        if model not in seen or not isinstance(input_ids, Tensor) or input_ids.device.type == "cpu":
            seen.add(model)
            original(model, input_ids, attention_mask)

    return warn
