"""Loss of a pipeline: MicroBatchLoss is the loss callback of torch's schedule, StageLoss creates one for each batch.

Only the last stage sees logits. It finds out which labels the loss counts, and broadcasts the answer to its pipeline.
Used by `PipelineTrainer`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.pipeline.forward_only import Consume
from forgather.ml.trainer.pipeline.pipeline_batches import PipelineBatch
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel
from forgather.ml.trainer.step_loss.loss_traits import Traits
from forgather.ml.trainer.step_loss.token_weighting import StepLoss

Look = Callable[[PipelineBatch, Consume], None]
"""Forward pass of one micro-batch without side effects (gradients, random draws, running statistics)."""
Forward = Callable[[Sequence[PipelineBatch], Consume], None]
"""Forward pass of micro-batches."""


class MicroBatchLoss:
    """Share of a micro-batch in the loss of a step, or in the mean of an evaluation batch.

    `total` is the number of targets that losses are divided by. A batch with `is_stand_in` has weight zero.
    """

    def __init__(self, step_loss: StepLoss, total: int | Tensor, is_stand_in: bool, amp: AMPContext) -> None:
        self._step_loss = step_loss
        self._total = total
        self._is_stand_in = is_stand_in
        self._amp = amp

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        with self._amp.autocast():
            if self._is_stand_in:
                # Zero, but connected to the logits: the schedule still runs the backward pass.
                return self._step_loss.nothing(logits)
            count = self._step_loss.count(labels) if self._step_loss.needs_counts else 0
            # Weighted by targets, so that the loss does not depend on the number of micro-batches.
            return self._step_loss.share(logits, labels, count, self._total, 1)


def apply_loss(logits: Tensor, labels: Tensor, loss: MicroBatchLoss) -> Tensor:
    """Call the loss of the current batch."""
    # A schedule keeps one loss function, but each batch has a different divisor. So each step passes its own loss.
    return loss(logits, labels)


class StageLoss:
    """Loss of a pipeline: shares of training batches and means of evaluation batches."""

    def __init__(self, step_loss: StepLoss, amp: AMPContext, pipeline: PipelineModel) -> None:
        self._step_loss = step_loss
        self._amp = amp
        self._pipeline = pipeline

    def of_batch(self, total: int | Tensor, is_stand_in: bool = False) -> MicroBatchLoss:
        return MicroBatchLoss(self._step_loss, total, is_stand_in, self._amp)

    @property
    def is_resolved(self) -> bool:
        """Whether targets can be counted before any logits are seen."""
        return self._step_loss.is_resolved

    def resolve(self, micro_batch: PipelineBatch, look: Look) -> None:
        """Find out which labels the loss counts, on every rank of the pipeline; collective within the pipeline.

        Other pipelines may have no batch now. They resolve the loss later, with the same result.
        """
        labels = micro_batch.labels
        assert labels is not None
        # A plain loss function does not report whether it shifts labels, ignores -100, or returns a sum. The last stage
        # probes it with real logits from a trial pass. The other ranks cannot probe, but they count targets too.
        look(micro_batch, lambda _, logits: self._step_loss.resolve(logits, labels))
        pipeline = self._pipeline
        # On the device of the stage, because NCCL does not take CPU tensors.
        answer = torch.tensor([(self._step_loss.traits or Traits()).code], device=pipeline.device)
        dist.broadcast(answer, group=pipeline.group, group_src=pipeline.stage_ranks[-1])
        self._step_loss.adopt(Traits.of_code(int(answer.item())))

    def logits(self, micro_batches: Sequence[PipelineBatch], forward: Forward) -> Tensor | None:
        """Return the logits of a batch on the last stage, without a loss; None elsewhere."""
        found: list[Tensor] = []
        forward(micro_batches, lambda _, logits: found.append(self._step_loss.logits(logits)))
        return torch.cat(found) if found else None

    def mean(
        self, micro_batches: Sequence[PipelineBatch], labels: Tensor, forward: Forward, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss over the targets of a batch, and its logits if requested.

        Ranks without the last stage return zero and None. `labels` are the labels of the full batch.
        """
        count = self._step_loss.count(labels)
        loss = self.of_batch(count)
        shares: list[Tensor] = []
        found: list[Tensor] = []

        def consume(number: int, logits: Tensor) -> None:
            own_labels = micro_batches[number].labels
            assert own_labels is not None
            shares.append(loss(logits, own_labels))
            if wants_logits:
                found.append(self._step_loss.logits(logits))

        forward(micro_batches, consume)
        if not shares:
            return torch.zeros(()), None
        return self._step_loss.mean(torch.stack(shares).sum(), count), torch.cat(found) if found else None
