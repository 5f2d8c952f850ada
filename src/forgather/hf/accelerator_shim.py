"""AcceleratorShim: the part of `accelerate.Accelerator` that subclasses of the trainer use, on the engine.

`backward` weights a loss as the engine does. `prepare` returns its arguments, because the engine divides batches between
ranks and wraps the model itself.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.distributed import Peers
from forgather.ml.utils import unwrap_model

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer


class AcceleratorShim:
    """Object behind `trainer.accelerator`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self.num_reads = 0
        """How often `num_processes` was read, since a loss multiplied by it is larger than the mean."""
        self.has_repeated_batch = False
        """Whether the evaluation loader of this rank repeats a batch, because only other ranks have one left."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self._trainer.args.device
        return device

    @property
    def num_processes(self) -> int:
        self.num_reads += 1
        step = self._trainer.engine_step
        if step is not None:
            # A loss multiplied by this number is prepared for the average of gradients over ranks.
            step.reads_processes = True
        return int(self._trainer.args.world_size)

    @property
    def distributed_type(self) -> Any:
        """Value of accelerate's enumeration for the strategy of the run."""
        from accelerate.utils import DistributedType  # type: ignore[import-untyped]

        if self._trainer.is_fsdp_enabled:
            return DistributedType.FSDP
        if not self._is_parallel:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def use_distributed(self) -> bool:
        return self._is_parallel

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._trainer.current_gradient_accumulation_steps

    @property
    def _models(self) -> list[Any]:
        """Models that are prepared already: always the model of the trainer."""
        return [self._trainer.model]

    @property
    def is_last_process(self) -> bool:
        return self.process_index == int(self._trainer.args.world_size) - 1

    @property
    def process_index(self) -> int:
        return int(self._trainer.args.process_index)

    @property
    def local_process_index(self) -> int:
        return int(self._trainer.args.local_process_index)

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer steps after the current micro-batch."""
        return self._trainer.engine._should_sync_gradients()

    @property
    def mixed_precision(self) -> str:
        return self._trainer.engine.args.mixed_precision or "no"

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Run the backward pass of a micro-batch's loss, weighted by its share of the step."""
        step = self._trainer.engine_step
        if step is None:
            raise RuntimeError(
                "accelerator.backward() was called outside of training_step. Call it in an override of training_step."
            )
        step.propagate(loss)

    def autocast(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context of mixed precision."""
        context = self._trainer.engine.amp_context
        if context is None:
            return contextlib.nullcontext()
        entered: contextlib.AbstractContextManager[Any] = context.autocast()
        return entered

    def no_sync(self, model: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
        """Return an empty context: the engine delays the reduction of gradients."""
        return contextlib.nullcontext()

    def accumulate(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Return the objects: the engine places and divides them."""
        return objects[0] if len(objects) == 1 else objects

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        return model

    def prepare_data_loader(self, loader: Any, **_: Any) -> Any:
        return loader

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return unwrap_model(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        return unwrap_model(model).state_dict()

    def wait_for_everyone(self) -> None:
        if self._is_parallel:
            dist.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_local_main_process:
            print(*values, **options)

    def gather(self, value: Any) -> Any:
        """Return tensors of all ranks, joined along their first dimension; collective."""
        return self._joined(value) if self._is_parallel else value

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """Return values of all ranks, without the repeated batches of the evaluation loader; collective.

        Objects that are not tensors, such as a list of texts, are joined to one list.
        """
        if not self._is_parallel:
            return value
        if not use_gather_object and _has_only_tensors(value):
            return self._joined(value, self.has_repeated_batch)
        return [one for part in self._objects_of_ranks([] if self.has_repeated_batch else value) for one in part]

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        gathered = torch.stack(self._of_ranks(tensor)) if self._is_parallel else tensor.unsqueeze(0)
        return (gathered.mean(0) if reduction == "mean" else gathered.sum(0)) * scale

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors with the length of the longest one on any rank; collective."""
        if not self._is_parallel or not isinstance(value, Tensor) or dim >= value.ndim:
            return value
        longest = max(self._objects_of_ranks(value.shape[dim]))
        shape = list(value.shape)
        shape[dim] = longest - value.shape[dim]
        filling = value.new_full(shape, pad_index)
        return torch.cat((filling, value) if pad_first else (value, filling), dim)

    def end_training(self) -> None:
        self._trainer.end()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no attribute {name!r}: Forgather's engine divides the work, and this object has only the "
            "part of accelerate.Accelerator that overrides of trainer methods use. Use trainer.engine or torch instead.",
            name=name,
            obj=self,
        )

    @property
    def _is_parallel(self) -> bool:
        return int(self._trainer.args.world_size) > 1

    def _joined(self, value: Any, is_left_out: bool = False) -> Any:
        if isinstance(value, Tensor):
            parts = self._of_ranks(value, is_left_out)
            return torch.stack(parts) if value.ndim == 0 else torch.cat(parts)
        if isinstance(value, dict):
            return {name: self._joined(one, is_left_out) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._joined(one, is_left_out) for one in value)
        raise TypeError(
            f"accelerator.gather() cannot gather a {type(value).__name__}: it takes tensors, in lists, tuples and dicts. Call "
            "gather_for_metrics(value, use_gather_object=True) for a list of other objects."
        )

    def _of_ranks(self, tensor: Tensor, is_left_out: bool = False) -> list[Tensor]:
        """Return this tensor of every rank that does not leave it out, on the device of this one."""
        # As objects, because ranks may have tensors of different lengths.
        parts = self._objects_of_ranks(None if is_left_out else tensor.detach().cpu())
        return [part.to(tensor.device) for part in parts if part is not None]

    def _objects_of_ranks(self, value: object) -> list[Any]:
        return Peers.world().gather(value)


def _has_only_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_has_only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_has_only_tensors, value))
    return isinstance(value, Tensor)
