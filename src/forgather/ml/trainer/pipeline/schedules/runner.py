"""Training steps through a schedule of torch, for batches of whatever shape."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from forgather.ml.trainer.pipeline.forward_only import Meta, Metas, Signature
from forgather.ml.trainer.pipeline.model_splitter import Stage

_SHAPES_KEPT = 4
"""Schedules that are kept with their receive buffers, for batches that come in a few shapes."""

MakeStage = Callable[[PipelineStage, tuple[Tensor, ...], tuple[Tensor, ...]], PipelineStage]
"""A stage like another, for inputs and outputs that look like these."""


def micro_batches(batch: Mapping[str, Any], num_rows: int, number: int) -> list[dict[str, Any]]:
    """A batch in so many equal parts; what has no row for each sample is in all of them."""
    size = num_rows // number
    return [
        {
            name: value[place * size : (place + 1) * size] if has_rows(value, num_rows) else value
            for name, value in batch.items()
        }
        for place in range(number)
    ]


def has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows


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

    def step(self, inputs: Tensor, keywords: Mapping[str, Any], labels: Tensor | None) -> list[Tensor]:
        """Run a batch; returns the losses of its micro-batches where the last stage is, else nothing.

        Every rank gives the whole batch; labels are needed where the last stage is.
        """
        num_rows = inputs.shape[0]
        schedule = self._schedule_for(inputs, keywords, num_rows)
        # Set for each batch, since which tensors have rows is a matter of the batch.
        schedule._kwargs_chunk_spec = {
            name: TensorChunkSpec(0) if has_rows(value, num_rows) else _Replicate for name, value in keywords.items()
        }
        is_first = any(stage.is_first for stage in self._stages)
        losses: list[Tensor] = []
        schedule.step(
            *((inputs,) if is_first else ()),
            target=labels if any(stage.is_last for stage in self._stages) else None,
            losses=losses,
            return_outputs=False,
            **keywords,
        )
        return losses

    def _schedule_for(self, inputs: Tensor, keywords: Mapping[str, Any], num_rows: int) -> Any:
        signature = Signature.of(inputs, keywords)
        if signature in self._schedules:
            self._schedules.move_to_end(signature)
            return self._schedules[signature]
        part = micro_batches({"": inputs, **keywords}, num_rows, self._n_microbatches)[0]
        first = part.pop("")
        if any(getattr(stage, "fixed_shapes", False) for stage in self._stages):
            self._refuse_other_shapes(signature)
            stages = self._stages
        else:
            metas = self._metas_between(first, part)
            stages = [self._shaped(stage, Meta.of(first), metas) for stage in self._stages]
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
