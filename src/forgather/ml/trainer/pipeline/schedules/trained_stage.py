"""TrainedStage: torch's PipelineStage with output checks, detachable outputs and overlapped gradient reduction.

`StageRunner` creates one per stage and batch shape. Traced stages use `TracedPipelineStage` instead.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas


class StageReducer(Protocol):
    """Reducer of stage gradients over the copies of the stages in other pipelines."""

    def watching(self, stage_index: int) -> contextlib.AbstractContextManager[None]:
        """Enter the last backward pass of a stage in a step; gradients can be reduced as they arrive."""
        ...

    def reduce(self, stage_index: int) -> None:
        """Reduce the remaining gradients of a stage; all of them are complete."""
        ...


class TrainedStage(PipelineStage):
    """Stage of this rank for one batch shape.

    `splits_backward` is True for schedules that compute gradients of inputs and of weights separately.
    """

    splits_backward = False
    reducer: StageReducer | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of forward passes, such as autocast."""
    expected: Metas | None = None
    """Outputs for which the next stage has allocated buffers; None on the last stage."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # Autocast and offloading belong to forward passes, but torch's `step` runs backward passes in between.
        with self.context():
            output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        # The next rank receives into fixed buffers without any check.
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
        # Earlier backward passes only accumulate. Gradients are final in the last one.
        if self.reducer is None or not last_backward:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self.reducer.watching(self.stage_index):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # Called by torch once per step, after the last backward pass of the stage.
        super().perform_reduce_grad(grad_scale_factor)
        if self.reducer is not None:
            self.reducer.reduce(self.stage_index)


def _require(stage_index: int, output: Any, expected: Metas) -> None:
    found = tuple(map(Meta.of, output if isinstance(output, tuple) else (output,)))
    if found != expected:
        raise RuntimeError(
            f"Stage {stage_index} returned {found}, but {expected} was expected: shapes and dtypes between stages must "
            "depend only on the shapes and dtypes of the batch."
        )


def _let_go(output: Any) -> Any:
    """Return the output, cloned if it is a view."""
    # After the input gradients, torch detaches outputs in place to free the graph. This is an error for views.
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output
