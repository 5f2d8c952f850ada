"""Training steps through a schedule of torch, for batches of whatever shape."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from forgather.ml.trainer.pipeline.model_splitter import Stage
from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas, PipelineBatch, Signature, has_rows
from forgather.ml.trainer.pipeline.stage_loss import MicroBatchLoss

_SHAPES_KEPT = 4
"""Schedules that are kept with their receive buffers, for batches that come in a few shapes."""

MakeStage = Callable[[PipelineStage, tuple[Tensor, ...], tuple[Tensor, ...]], PipelineStage]
"""A stage like another, for inputs and outputs that look like these."""


class ScheduleRunner:
    """Runs batches through this rank's stages, forward and backward, together with the other ranks of the pipeline.

    A schedule of torch is made for one shape: each shape of batches gets one of its own. `metas_between` tells what passes
    between stages for a micro-batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        make_schedule: Callable[[list[Stage]], Any],
        make_stage: MakeStage,
        metas_between: Callable[[Tensor, Mapping[str, Any]], dict[int, Metas]],
        n_microbatches: int,
    ) -> None:
        self._stages = list(stages)
        self._make_schedule = make_schedule
        self._make_stage = make_stage
        self._metas_between = metas_between
        self._n_microbatches = n_microbatches
        self._schedules: OrderedDict[Signature, Any] = OrderedDict()

    @property
    def schedule(self) -> Any:
        """The schedule that ran last; before the first batch, one for stages that do not know their shapes yet."""
        return next(reversed(self._schedules.values())) if self._schedules else self._make_schedule(self._stages)

    def step(self, batch: PipelineBatch, loss: MicroBatchLoss) -> list[Tensor]:
        """Run a batch; returns the losses of its micro-batches where the last stage is, else nothing.

        Every rank gives the whole batch; labels are needed where the last stage is.
        """
        schedule = self._schedule_for(batch)
        # Set for each batch, since which tensors have rows is a matter of the batch.
        schedule._kwargs_chunk_spec = {
            name: TensorChunkSpec(0) if has_rows(value, batch.num_rows) else _Replicate
            for name, value in batch.keywords.items()
        }
        is_first = any(stage.is_first for stage in self._stages)
        losses: list[Tensor] = []
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
        # What the last stage puts out goes to the loss on the same rank, whatever it looks like.
        outputs = metas.get(index, inputs)
        return self._make_stage(stage, _on_meta(inputs), _on_meta(outputs))

    def _refuse_other_shapes(self, signature: Signature) -> None:
        if self._schedules:
            first = next(iter(self._schedules))
            raise ValueError(
                f"The model was traced for batches of {first.inputs.shape}, and now got one of {signature.inputs.shape}: "
                "create_automatic_splitter fixes all shapes. Pad batches to one length (a data collator can), or use a "
                "splitter that does not trace."
            )


def _on_meta(metas: Metas) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point) for shape, dtype in metas
    )
