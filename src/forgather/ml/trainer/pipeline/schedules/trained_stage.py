"""torch's stage with what training needs beside it: outputs that can be let go, and gradients that are reduced in time."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas


class StageReducer(Protocol):
    """Reduces the gradients of stages over the copies that other pipelines have of them."""

    def watching(self, stage_index: int) -> contextlib.AbstractContextManager[None]:
        """In this context the last gradients of a stage are computed, and can be reduced as they come."""
        ...

    def reduce(self, stage_index: int) -> None:
        """All gradients of a stage are there."""
        ...


class TrainedStage(PipelineStage):
    """A stage of this rank in one shape. `splits_backward` is for schedules that compute two kinds of gradients apart."""

    splits_backward = False
    reducer: StageReducer | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What forward passes run in."""
    expected: Metas | None = None
    """What the next stage, which looks at nothing, has made room for."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.expected is not None:
            _require(self.stage_index, output, self.expected)
        if not self.splits_backward:
            return output
        if isinstance(output, Tensor):
            return _let_go(output)
        return tuple(_let_go(one) for one in output)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.reducer is None or not last_backward:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self.reducer.watching(self.stage_index):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        if self.reducer is not None:
            self.reducer.reduce(self.stage_index)


def _require(stage_index: int, output: Any, expected: Metas) -> None:
    found = tuple(map(Meta.of, output if isinstance(output, tuple) else (output,)))
    if found != expected:
        raise RuntimeError(
            f"Stage {stage_index} put out {found}, where {expected} was expected: what passes between stages must have shapes "
            "and types that follow from those of the batch."
        )


def _let_go(output: Any) -> Any:
    """Not a view: those cannot be detached in place, which is how torch frees the graph after the first kind."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output
