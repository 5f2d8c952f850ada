"""Deferred model initialisation for FSDP2: builds a model on the meta device and computes its initial values later.

Every value is bit-identical to a plain build on the CPU from the same random state, and the generator ends in the same
state, but only one tensor is in memory at a time. The set-up of `FSDP2Trainer` builds its model here, shards it, and
then fills the shards.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.trainer.fsdp2.recorder import Recorder, is_meta
from forgather.ml.trainer.fsdp2.replay import Geometry

logger = logging.getLogger(__name__)

# Smaller tensors are created as usual: recording them would cost more memory than it saves.
DEFAULT_MIN_BYTES = 256 * 1024


class DeferredInit:
    """Context manager that creates large CPU tensors on the meta device and records how to compute their values.

    It records the current thread only. A write to a deferred tensor in another thread is lost.
    """

    def __init__(self, min_bytes: int = DEFAULT_MIN_BYTES) -> None:
        self._recorder = Recorder(min_bytes)
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as context:
            context.callback(self._recorder.forget_values)
            context.enter_context(_looks_like_cpu(self._recorder))
            context.enter_context(self._recorder)
            self._context = context.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.close()

    def is_deferred(self, tensor: Tensor) -> bool:
        """Return whether the tensor is on the meta device with a recorded value."""
        return self._recorder.is_deferred(tensor)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor of the model as a new CPU tensor."""
        return self._handle(tensor)()

    def initial_values(self, model: nn.Module) -> dict[str, Callable[[], Tensor]]:
        """Return a function for each parameter and buffer, by FQN, that computes its current value.

        Call this before `fully_shard`, which replaces the tensors. Names of one tied tensor have the same function.
        """
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        handles = {id(tensor): self._handle(tensor) for _, tensor in named}
        return {name: handles[id(tensor)] for name, tensor in named}

    def _handle(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.is_deferred(tensor):
            return partial(self._recorder.value, self._recorder.snapshot(tensor))
        return partial(_copy, tensor)


def build_deferred(
    model_init: Callable[[], nn.Module], min_bytes: int = DEFAULT_MIN_BYTES
) -> tuple[nn.Module, DeferredInit | None]:
    """Build a model under `DeferredInit`; if that fails, build it plainly from the same random state, with None."""
    generators = RNGState()
    before = generators.state_dict()
    deferred = DeferredInit(min_bytes)
    try:
        with deferred:
            return model_init(), deferred
    except Exception as error:  # noqa: BLE001 - the plain build raises the user's own errors again
        reason = f"{type(error).__name__}: {error}"
    logger.info("Building the full model on every rank: its initialisation cannot be deferred (%s).", reason)
    generators.load_state_dict(before)
    return model_init(), None


def _copy(tensor: Tensor) -> Tensor:
    if is_meta(tensor):
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} was built on the meta device and has no initial value. Build the "
            "model without torch.device('meta'), or load a checkpoint."
        )
    return tensor.detach().clone()


@contextlib.contextmanager
def _looks_like_cpu(recorder: Recorder) -> Iterator[None]:
    """Let deferred tensors report the CPU as their device.

    `nn.init.trunc_normal_` skips meta tensors, and `torch.zeros(n, device=weight.device)` would lose its values there.
    """
    # The modes of torch import dynamo on first use, which registers functions of torch: the originals, not ours.
    import torch._dynamo

    # Attributes of the class, because torch disables function modes inside its own Python functions.
    replacements = {**_device_properties(recorder), **_tensor_methods(recorder)}
    originals = {name: vars(Tensor)[name] for name in replacements if name in vars(Tensor)}
    compatible = torch._has_compatible_shallow_copy_type

    def has_compatible_type(input: Tensor, from_: Tensor) -> bool:
        # `Module.to_empty` replaces meta parameters by new ones on the CPU, which unties them.
        return recorder.must_look_real(input) == recorder.must_look_real(from_) and compatible(input, from_)

    for name, attribute in replacements.items():
        setattr(Tensor, name, attribute)
    torch._has_compatible_shallow_copy_type = has_compatible_type
    try:
        yield
    finally:
        torch._has_compatible_shallow_copy_type = compatible
        for name in replacements:
            # The other originals belong to the base class.
            delattr(Tensor, name)
        for name, attribute in originals.items():
            setattr(Tensor, name, attribute)


def _device_properties(recorder: Recorder) -> dict[str, property]:
    def as_on_cpu(name: str, value: Any) -> property:
        original = vars(torch._C.TensorBase)[name].__get__
        return property(lambda tensor: value if recorder.must_look_real(tensor) else original(tensor))

    flags = {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True}
    return {name: as_on_cpu(name, value) for name, value in flags.items()}


def _tensor_methods(recorder: Recorder) -> dict[str, Callable[..., Tensor]]:
    """Return methods that would use the real device of a deferred tensor without an operation to record."""
    base = torch._C.TensorBase
    original_deepcopy: Callable[..., Tensor] = vars(Tensor)["__deepcopy__"]

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = base.to(tensor, *args, **kwargs)
        # The recorder cannot tell `to("cpu", copy=True)` from `to("cpu")`, which must not copy.
        is_same = kwargs.get("copy") and recorder.must_look_real(tensor) and result.is_set_to(tensor)
        return result.clone() if is_same else result

    def new_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if recorder.must_look_real(tensor):
            kwargs.setdefault("device", "cpu")
        result: Tensor = base.new_tensor(tensor, *args, **kwargs)
        return result

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not recorder.must_look_real(tensor) or not tensor.is_leaf or id(tensor) in memo:
            return original_deepcopy(tensor, memo)
        return _deep_copy(tensor, memo)

    return {"to": to, "new_tensor": new_tensor, "__deepcopy__": deepcopy}


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a deferred tensor as `Tensor.__deepcopy__` does: tensors that share memory still share it afterwards."""
    storage = tensor.untyped_storage()
    if storage._cdata not in memo:
        memo[storage._cdata] = Geometry(torch.uint8, (storage.nbytes(),), (1,), 0).view(storage).clone()
    result = Geometry.of(tensor).view(memo[storage._cdata].untyped_storage())
    result.requires_grad_(tensor.requires_grad)
    vars(result).update(copy.deepcopy(vars(tensor), memo))
    memo[id(tensor)] = result
    return result
