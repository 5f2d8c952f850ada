"""ScheduleRunner: training steps through torch's pipeline schedules, for batches of any shape.

A schedule object of torch has receive buffers for one shape, so schedules are kept in an LRU cache by batch signature.
Called by `StageRunner`.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from forgather.ml.trainer.pipeline.model_splitter import Stage
from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas, PipelineBatch, Signature, has_rows
from forgather.ml.trainer.pipeline.schedules.slot_recorder import SlotRecorder
from forgather.ml.trainer.pipeline.stage_loss import MicroBatchLoss

_NO_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_SHAPES_KEPT = 4
"""Size of the LRU cache; each schedule keeps its receive buffers allocated."""

MakeStage = Callable[[PipelineStage, tuple[Tensor, ...], tuple[Tensor, ...]], PipelineStage]
"""Function that creates a stage like another, for inputs and outputs with these shapes and dtypes."""


class ScheduleRunner:
    """Runner of forward and backward passes through this rank's stages, together with the other ranks of the pipeline.

    Each batch shape gets a separate schedule object of torch. `metas_between` returns the shapes and dtypes between
    stages for a micro-batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        make_schedule: Callable[[list[Stage]], Any],
        make_stage: MakeStage,
        metas_between: Callable[[Tensor, Mapping[str, Any]], dict[int, Metas]],
        n_microbatches: int,
        recorder: SlotRecorder,
    ) -> None:
        self._stages = list(stages)
        self._make_schedule = make_schedule
        self._make_stage = make_stage
        self._metas_between = metas_between
        self._n_microbatches = n_microbatches
        self.recorder = recorder
        self._schedules: OrderedDict[Signature, Any] = OrderedDict()

    @property
    def schedule(self) -> Any:
        """Most recently used schedule; before the first batch, a schedule of stages without known shapes."""
        return next(reversed(self._schedules.values())) if self._schedules else self._make_schedule(self._stages)

    def step(self, batch: PipelineBatch, loss: MicroBatchLoss) -> list[Tensor]:
        """Run a batch; return the losses of its micro-batches on the last stage, else an empty list.

        Every rank passes the full batch. Labels are needed only on the last stage.
        """
        schedule = self._schedule_for(batch)
        # Set for each batch: torch splits tensors with rows, and passes all others whole to every micro-batch.
        schedule._kwargs_chunk_spec = {
            name: TensorChunkSpec(0) if has_rows(value, batch.num_rows) else _Replicate
            for name, value in batch.keywords.items()
        }
        # Only the first stage takes the main input. Outputs are not returned, because the logits of all
        # micro-batches would stay in memory.
        is_first = any(stage.is_first for stage in self._stages)
        losses: list[Tensor] = []
        recorder = self.recorder
        with recorder.watching(schedule) if recorder.is_waiting else _NO_CONTEXT:
            schedule.step(
                *((batch.inputs,) if is_first else ()),
                target=batch.labels if any(stage.is_last for stage in self._stages) else None,
                losses=losses,
                return_outputs=False,
                loss_kwargs={"loss": loss},
                **batch.keywords,
            )
        return losses

    def _schedule_for(self, batch: PipelineBatch) -> Any:
        signature = batch.signature
        if signature in self._schedules:
            self._schedules.move_to_end(signature)
            return self._schedules[signature]
        # The signature is equal on all ranks, so all of them build and evict schedules at the same batch. This matters,
        # because `metas_between` may run a collective trial pass.
        if any(getattr(stage, "fixed_shapes", False) for stage in self._stages):
            self._refuse_other_shapes(signature)
            stages = self._stages
        else:
            first = batch.micro_batches(self._n_microbatches)[0]
            metas = self._metas_between(first.inputs, first.keywords)
            stages = [self._shaped(stage, Meta.of(first.inputs), metas) for stage in self._stages]
        self._schedules[signature] = self._make_schedule(stages)
        while len(self._schedules) > _SHAPES_KEPT:
            self._schedules.popitem(last=False)
        return self._schedules[signature]

    def _shaped(self, stage: Any, first: Meta, metas: Mapping[int, Metas]) -> PipelineStage:
        index = stage.stage_index
        inputs = (first,) if stage.is_first else metas[index - 1]
        # The output of the last stage goes to the loss on the same rank, so its declared shape does not matter.
        outputs = metas.get(index, inputs)
        return self._make_stage(stage, _on_meta(inputs), _on_meta(outputs))

    def _refuse_other_shapes(self, signature: Signature) -> None:
        if self._schedules:
            first = next(iter(self._schedules))
            raise ValueError(
                f"The model was traced for batches of {first.inputs.shape}, but got a batch of {signature.inputs.shape}: "
                "create_automatic_splitter fixes all shapes. Pad batches to one length in the data collator, or use a "
                "splitter that does not trace."
            )


def _on_meta(metas: Metas) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point) for shape, dtype in metas
    )
