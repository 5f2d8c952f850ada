"""Recorder of tensor operations: a TorchDispatchMode that creates large CPU tensors on the meta device.

Operations on these deferred tensors are recorded as steps for `replay`. Random operations also run once on temporary
memory, so the generator advances exactly as without the mode. Whatever cannot be recorded faithfully raises
`CannotDefer`. Used by `deferred_init`.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from forgather.ml.trainer.fsdp2.replay import (
    LARGE,
    GeneratorState,
    Geometry,
    OwnView,
    Snapshot,
    Step,
    release_freed_memory,
    replay,
    replay_for_reading,
)

aten = torch.ops.aten
_META = torch.device("meta")
_CPU = torch.device("cpu")
# `deferred_init` replaces these attributes of `Tensor`. The recorder needs the originals.
is_meta: Callable[[Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
_device_of: Callable[[Tensor], torch.device] = vars(torch._C.TensorBase)["device"].__get__


def _fill_value(call: "_Call") -> Any:
    return call.kwargs["fill_value"] if "fill_value" in call.kwargs else call.args[-1]


def _constructors(name: str, fill: "Callable[[_Call], Any] | None") -> dict[Any, "Callable[[_Call], Any] | None"]:
    return dict.fromkeys((getattr(aten, name), getattr(aten, f"{name}_like"), getattr(aten, f"new_{name}")), fill)


# Operations that create a tensor of one value, and that value; None leaves the memory uninitialised.
_CONSTRUCTORS: dict[Any, "Callable[[_Call], Any] | None"] = {
    **_constructors("empty", None),
    **dict.fromkeys((aten.empty_strided, aten.new_empty_strided), None),
    **_constructors("zeros", lambda call: 0),
    **_constructors("ones", lambda call: 1),
    **_constructors("full", _fill_value),
}
# In-place operations that do not read the tensor they write.
_OVERWRITING = {
    getattr(aten, name)
    for name in (
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"),
        *("cauchy_", "geometric_", "log_normal_"),
    )
}
# Operations that write to inputs although their schema does not say so.
_UNDECLARED_WRITES = {aten.native_batch_norm, aten.batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}


class CannotDefer(RuntimeError):
    """An operation cannot be recorded faithfully; the model must be built without deferral."""


@dataclass
class _Content:
    """Storage of deferred tensors with its latest step; the reference keeps the id of the storage in use."""

    storage: UntypedStorage
    last: Step | None = None


class _Call:
    """One call of an operation, with the generator states before it."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = dict(kwargs)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        leaves = tree_leaves((args, self.kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self._generators = {id(generator): GeneratorState(generator.get_state()) for generator in generators}
        draws_globally = self.is_random and not generators
        self._rng = torch.default_generator.get_state() if draws_globally else None

    @property
    def packet(self) -> Any:
        return self.func.overloadpacket

    def device(self) -> torch.device:
        """Return the device of a new tensor that the operation creates."""
        given = self.kwargs.get("device")
        return given or (_device_of(self.tensors[0]) if self.tensors else _CPU)

    def is_dense(self) -> bool:
        layouts = [self.kwargs.get("layout") or torch.strided, *(tensor.layout for tensor in self.tensors)]
        return all(layout == torch.strided for layout in layouts)

    def written(self) -> list[Tensor]:
        """Return the tensors that the operation writes to, by its schema."""
        found: list[Tensor] = []
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
                found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        return found

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def run_with(self, substitutes: Mapping[int, Any], device: torch.device) -> Any:
        """Run the operation on other tensors, given by the ids of the original ones, on their device."""
        args, kwargs = self._changed_arguments(substitutes, device)
        return self.func(*args, **kwargs)

    def run_on_meta(self) -> Any:
        """Run the operation for the metadata of its result; a deferred tensor that it writes to keeps its values."""
        real = [tensor for tensor in self.tensors if not is_meta(tensor)]
        return self.run_with({id(tensor): tensor.to(_META) for tensor in real}, _META)

    def step(self, arguments: Mapping[int, Any], nbytes: int, previous: Step | None, output: int | None) -> Step:
        args, kwargs = self._changed_arguments({**arguments, **self._generators}, _CPU)
        return Step(self.func, args, kwargs, nbytes, torch.get_default_dtype(), previous, output, self._rng)

    def _changed_arguments(self, substitutes: Mapping[int, Any], device: torch.device) -> Any:
        args, kwargs = tree_map(lambda leaf: substitutes.get(id(leaf), leaf), (self.args, self.kwargs))
        # Deferred tensors stand for CPU tensors.
        if kwargs.get("device") in (_CPU, _META):
            kwargs["device"] = device
        return args, kwargs


class Recorder(TorchDispatchMode):
    """Mode that defers CPU tensors of at least `min_bytes` and records what happens to them."""

    def __init__(self, min_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_bytes = min_bytes
        self._contents: dict[int, _Content] = {}
        # The latest draw, and the latest results of a read: power iterations read one tensor again and again.
        self._drawn: dict[Step, UntypedStorage] = {}
        self._read: dict[Step, UntypedStorage] = {}
        self._is_replaying = False
        self._is_recording = False
        self._has_freed_memory = False

    def is_deferred(self, tensor: Tensor) -> bool:
        """Return whether the tensor has no memory here, but a recorded value."""
        if not is_meta(tensor) or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._contents

    def must_look_real(self, tensor: Tensor) -> bool:
        """Return whether the tensor must appear to be on the CPU: for the model, but not for torch's meta kernels."""
        return not self._is_recording and self.is_deferred(tensor)

    def snapshot(self, tensor: Tensor) -> Snapshot:
        """Return the current value of a deferred tensor in recorded form."""
        if tensor.is_conj() or tensor.is_neg():
            raise CannotDefer("a deferred tensor is a lazy conjugate or negative view")
        content = self._content(tensor)
        return Snapshot(Geometry.of(tensor), content.storage.nbytes(), content.last)

    def value(self, snapshot: Snapshot) -> Tensor:
        """Return the values of a snapshot in new memory; may also be called while recording."""
        was_replaying, self._is_replaying = self._is_replaying, True
        try:
            return replay(snapshot)
        finally:
            self._is_replaying = was_replaying

    def forget_values(self) -> None:
        """Free the values that were kept for further reads."""
        self._drawn, self._read = {}, {}
        release_freed_memory()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._is_replaying:
            return func(*args, **(kwargs or {}))
        self._is_recording = True
        try:
            return self._recorded_call(_Call(func, args, kwargs or {}))
        finally:
            self._is_recording = False

    def _recorded_call(self, call: _Call) -> Any:
        if self._has_freed_memory:
            release_freed_memory()
            self._has_freed_memory = False
        deferred = [tensor for tensor in call.tensors if self.is_deferred(tensor)]
        if not deferred:
            return self._without_deferred(call)
        if any(is_meta(tensor) and not self.is_deferred(tensor) for tensor in call.tensors):
            return _mixed(call, deferred)
        return call.run() if call.func.is_view else self._with_deferred(call, deferred)

    def _without_deferred(self, call: _Call) -> Any:
        device = call.device()
        # Item assignment (`weight[row] = 0`) creates its scalar on the device of the tensor, which is meta here.
        if call.packet is aten.scalar_tensor and device == _META:
            return self._outputs(call, call.run_with({}, _CPU), min_bytes=1)
        if call.packet is aten._to_copy and device == _META and not is_meta(call.tensors[0]):
            # `values.to(deferred)` looks the same, and the values would be lost.
            raise CannotDefer("a tensor with values is moved to the meta device")
        if device != _CPU or not call.is_dense() or call.func._schema.is_mutable:
            return call.run()
        if call.packet in _CONSTRUCTORS:
            return self._constructed(call)
        return call.run() if call.tensors else self._outputs(call, call.run(), self._min_bytes)

    def _with_deferred(self, call: _Call, deferred: list[Tensor]) -> Any:
        if call.packet in _UNDECLARED_WRITES:
            raise CannotDefer(f"{call.func} may write to a deferred tensor")
        if torch.Tag.inplace_view in call.func.tags:
            return self._changed_view(call)
        written = call.written()
        if any(map(self.is_deferred, written)):
            return self._changed(call, written)
        if written:
            return call.run_with(self._values(deferred), _CPU)
        if call.packet in _CONSTRUCTORS and call.device() in (_CPU, _META):
            return self._constructed(call)
        if _only_moves(call):
            return aten.alias.default(deferred[0])
        return self._computed(call, deferred)

    # --- new tensors

    def _constructed(self, call: _Call) -> Tensor:
        """Defer the result of a constructor without ever allocating it."""
        meta: Tensor = call.run_on_meta()
        # Scalars stay real: `Tensor.__deepcopy__` creates one and gives it the storage of the copy.
        if meta.untyped_storage().nbytes() < self._min_bytes or not meta.dim():
            return _like(call, meta) if any(map(is_meta, call.tensors)) else call.run()
        fill = _CONSTRUCTORS[call.packet]
        step = None if fill is None else _filled(meta, fill(call))
        return self._register(meta, step)

    def _computed(self, call: _Call, deferred: list[Tensor]) -> Any:
        """Return a result that is computed from deferred tensors: deferred itself if it is large."""
        constants = [tensor for tensor in call.tensors if not self.is_deferred(tensor)]
        if any(tensor.untyped_storage().nbytes() >= self._min_bytes for tensor in constants if tensor.dim()):
            # A recorded step would hold a copy of the input, which may be as large as the result.
            return call.run_with(self._values(deferred), _CPU)
        # The result of an elementwise operation stays deferred: `Module.to(dtype)` needs old and new data of one kind.
        least = max(tensor.numel() for tensor in deferred)
        return self._outputs(call, self._output_metadata(call, deferred), self._min_bytes, least)

    def _output_metadata(self, call: _Call, deferred: list[Tensor]) -> Any:
        """Return the outputs, on the meta device if the operation is elementwise."""
        is_elementwise = torch.Tag.pointwise in call.func.tags or call.packet is aten._to_copy
        if is_elementwise and not call.is_random and call.device() in (_CPU, _META):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return call.run_on_meta()
        return call.run_with(self._values(deferred), _CPU)

    def _outputs(self, call: _Call, outputs: Any, min_bytes: int, least: int | None = None) -> Any:
        """Defer the outputs of at least `min_bytes` or at least `least` elements."""
        leaves, structure = tree_flatten(outputs)
        large = [index for index, leaf in enumerate(leaves) if _is_large(leaf, min_bytes, least)]
        arguments = self._recorded(call, None) if large else {}
        for index in large:
            nbytes = leaves[index].untyped_storage().nbytes()
            step = call.step(arguments, nbytes, None, index)
            meta = leaves[index] if is_meta(leaves[index]) else _meta_of(leaves[index])
            # The memory of a real output is free once the caller has only the meta tensor.
            self._has_freed_memory |= meta is not leaves[index] and nbytes >= LARGE
            leaves[index] = self._register(meta, step)
        return tree_unflatten(leaves, structure)

    def _register(self, meta: Tensor, step: Step | None) -> Tensor:
        assert is_meta(meta), "a deferred tensor has no memory"
        storage = meta.untyped_storage()
        self._contents[storage._cdata] = _Content(storage, step)
        return meta

    # --- changes of deferred tensors

    def _changed_view(self, call: _Call) -> Any:
        """Run `t_`, `squeeze_` and the like, which change the metadata of a tensor but no values."""
        tensor: Tensor = call.args[0]
        nbytes = tensor.untyped_storage().nbytes()
        result = call.run()
        is_resized = call.packet is not aten.set_ and tensor.untyped_storage().nbytes() != nbytes
        if is_resized or not self.is_deferred(tensor):
            raise CannotDefer(f"{call.func} replaces the memory of a deferred tensor")
        return result

    def _changed(self, call: _Call, written: list[Tensor]) -> Tensor:
        """Record an operation that writes to a deferred tensor."""
        target, returns = written[0], call.func._schema.returns
        if len(written) > 1 or len(returns) != 1 or returns[0].alias_info is None:
            raise CannotDefer(f"{call.func} has more results than one deferred tensor")
        content = self._content(target)
        previous = None if self._overwrites(call, target) else content.last
        step = call.step(self._recorded(call, content), content.storage.nbytes(), previous, None)
        if call.is_random:
            self._draw(call, target, step)
        else:
            self._check(call, target, step)
        content.last = step
        return target

    def _overwrites(self, call: _Call, target: Tensor) -> bool:
        """Return whether the operation replaces the whole storage without reading it."""
        storage = target.untyped_storage()
        others = [tensor for tensor in call.tensors if tensor is not target and self.is_deferred(tensor)]
        return (
            call.packet in _OVERWRITING
            and target.is_contiguous()
            and target.numel() * target.itemsize == storage.nbytes()
            and all(other.untyped_storage()._cdata != storage._cdata for other in others)
        )

    def _draw(self, call: _Call, target: Tensor, step: Step) -> None:
        """Run a random operation on temporary memory, which advances the generator."""
        self._drawn = {}
        release_freed_memory(step.nbytes)
        others = self._values([t for t in call.tensors if t is not target and self.is_deferred(t)])
        if call.packet in _OVERWRITING:
            scratch = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=_CPU)
        else:
            scratch = replay(Snapshot(Geometry.of(target), step.nbytes, step.previous))
        call.run_with({**others, id(target): scratch}, _CPU)
        if step.previous is None:
            self._drawn = {step: scratch.untyped_storage()}

    def _check(self, call: _Call, target: Tensor, step: Step) -> None:
        """Raise now what the replay would raise, such as an error about shapes."""
        geometry = Geometry.of(target)
        try:
            call.run_on_meta()
        except (NotImplementedError, RuntimeError):
            # The operation has no meta kernel, or its meta kernel refuses more than the CPU kernel.
            replay(Snapshot(geometry, step.nbytes, step))
        if Geometry.of(target) != geometry or target.untyped_storage().nbytes() != step.nbytes:
            raise CannotDefer(f"{call.func} resizes a deferred tensor")

    # --- values and arguments

    def _content(self, tensor: Tensor) -> _Content:
        return self._contents[tensor.untyped_storage()._cdata]

    def _values(self, deferred: list[Tensor]) -> dict[int, Tensor]:
        """Return the values of deferred tensors, by the ids of these tensors."""
        values: dict[int, Tensor] = {}
        for tensor in deferred:
            known = {**self._drawn, **self._read}
            values[id(tensor)], self._read = replay_for_reading(self.snapshot(tensor), known)
        return values

    def _recorded(self, call: _Call, own: _Content | None) -> dict[int, Any]:
        """Return the recorded form of the tensors of a call, by their ids."""
        return {id(tensor): self._argument(tensor, own) for tensor in call.tensors}

    def _argument(self, tensor: Tensor, own: _Content | None) -> Any:
        if not self.is_deferred(tensor):
            return _copy_of(tensor)
        snapshot = self.snapshot(tensor)
        return OwnView(snapshot.geometry) if self._content(tensor) is own else snapshot


def _mixed(call: _Call, deferred: list[Tensor]) -> Any:
    """Run an operation on tensors that are on the meta device on purpose, and on a scalar."""
    if any(tensor.dim() for tensor in deferred):
        raise CannotDefer(f"{call.func} combines a deferred tensor with a tensor on the meta device")
    return call.run()


def _only_moves(call: _Call) -> bool:
    """Return whether the call is `deferred.to("cpu")`, which returns the tensor itself if that is on the CPU."""
    if call.packet is not aten._to_copy or call.kwargs.get("device") != _CPU:
        return False
    is_same_format = call.kwargs.get("memory_format") in (None, torch.preserve_format)
    return is_same_format and call.kwargs.get("dtype") in (None, call.tensors[0].dtype)


def _filled(meta: Tensor, value: Any) -> Step:
    flat = Geometry(meta.dtype, (meta.untyped_storage().nbytes() // meta.itemsize,), (1,), 0)
    return Step(
        aten.fill_.Scalar, (OwnView(flat), value), {}, meta.untyped_storage().nbytes(), torch.get_default_dtype()
    )


def _like(call: _Call, meta: Tensor) -> Tensor:
    """Return the real result of a constructor with a deferred model, such as `zeros_like(weight)`."""
    result = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=_CPU)
    fill = _CONSTRUCTORS[call.packet]
    return result if fill is None else result.fill_(fill(call))


def _is_large(leaf: Any, min_bytes: int, least: int | None) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return False
    if _device_of(leaf) not in (_CPU, _META) or type(leaf) not in (Tensor, torch.nn.Parameter):
        return False
    return leaf.untyped_storage().nbytes() >= min_bytes or (least is not None and leaf.numel() >= least)


def _meta_of(tensor: Tensor) -> Tensor:
    return Geometry.of(tensor).view(UntypedStorage(tensor.untyped_storage().nbytes(), device=_META))


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy that later writes to the tensor do not change."""
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize:
        # `clone` would expand a broadcast tensor.
        return Geometry.of(tensor).view(tensor.untyped_storage().clone())
    return tensor.detach().clone()
