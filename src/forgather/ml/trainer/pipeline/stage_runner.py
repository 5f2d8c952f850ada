"""StageRunner: runs this rank's pipeline stages, with torch's schedule in training and forward-only otherwise.

All ranks of a pipeline call each method together, with the same batch. `PipelineTrainer` uses it for training steps,
evaluation and generation.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.pipeline.forward_only import Consume, ForwardOnly
from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas, PipelineBatch
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel
from forgather.ml.trainer.pipeline.pipeline_ranks import PipelineRanks
from forgather.ml.trainer.pipeline.schedules import ScheduleChoice
from forgather.ml.trainer.pipeline.schedules.runner import ScheduleRunner
from forgather.ml.trainer.pipeline.schedules.slot_recorder import SlotRecorder
from forgather.ml.trainer.pipeline.schedules.trained_stage import StageReducer, TrainedStage
from forgather.ml.trainer.pipeline.stage_loss import MicroBatchLoss, apply_loss
from forgather.ml.trainer.recipes import Recipes
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers

Context = Callable[[], AbstractContextManager[object]]


class StageRunner:
    """Runner of a rank's stages; all ranks of a pipeline call its methods together.

    The `reducer` is notified when the gradients of a stage are complete.
    """

    def __init__(
        self,
        pipeline: PipelineModel,
        schedule: ScheduleChoice,
        ranks: PipelineRanks,
        n_microbatches: int,
        amp: AMPContext,
        recipes: Recipes,
        reducer: StageReducer | None,
        recorder: SlotRecorder,
    ) -> None:
        self._pipeline = pipeline
        self._splits_backward = schedule.traits.splits_backward
        self._amp = amp
        self._recipes = recipes
        self._reducer = reducer
        self._has_fixed_shapes = pipeline.has_fixed_shapes
        self._forward_context: Context = self._offloading if recipes.offloads else amp.autocast
        # The stages come from the splitter, and were created before modules were compiled or lost their head.
        for stage in pipeline.stages:
            stage.submod = pipeline.running[stage.stage_index]
        # Tensors return to lower ranks only if ranks have several stages.
        groups = (ranks.group, ranks.return_group() if schedule.traits.is_multistage else None)
        options = (pipeline.stage_ranks, groups, pipeline.device, pipeline.boundary)
        self._forward_only = ForwardOnly(pipeline.running, *options)
        # Generation needs logits, and lengths that change with every pass: compiled modules would recompile.
        self._generating = ForwardOnly(pipeline.own, *options)
        self._schedules = ScheduleRunner(
            pipeline.stages,
            lambda stages: schedule.make(stages, n_microbatches, apply_loss),
            self._make_stage,
            self._metas_between,
            n_microbatches,
            recorder,
        )

    @property
    def schedule(self) -> Any:
        """torch's schedule object for the most recent batch shape."""
        return self._schedules.schedule

    def step(self, batch: PipelineBatch, loss: MicroBatchLoss) -> Tensor:
        """Run forward and backward passes of a batch; return the sum of its losses on the last stage, else zero."""
        # TrainedStage enters the context for its forward passes only. Traced stages do not know it, so for them the
        # context surrounds the whole step.
        with self._forward_context() if self._has_fixed_shapes else contextlib.nullcontext():
            losses = self._schedules.step(batch, loss)
        if not losses:
            return torch.zeros((), device=self._pipeline.device)
        # Detached: the schedule has already run the backward passes.
        return torch.stack([one.detach() for one in losses]).sum()

    def forward(self, micro_batches: Sequence[PipelineBatch], consume: Consume) -> None:
        """Run micro-batches forward; on the last stage, `consume` gets the index and the logits of each."""
        inputs = [one.inputs for one in micro_batches]
        with self._amp.autocast():
            self._forward_only.run(inputs, [one.keywords for one in micro_batches], consume)

    def look(self, micro_batch: PipelineBatch, consume: Consume) -> None:
        """Run one micro-batch forward without side effects: no gradients, random draws or running statistics."""
        with _without_trace(self._pipeline.own_modules):
            self.forward([micro_batch], consume)

    def generate(
        self, inputs: Tensor, keywords: Mapping[str, Any], stage_keywords: Mapping[int, Mapping[str, Any]]
    ) -> Tensor | None:
        """Return the logits of the last position on the last stage, else None.

        It runs modules that are not compiled, so inputs may have any length.
        """
        results: list[Tensor] = []
        # With torch_compile_scope="layer", the layers themselves are compiled, also in uncompiled stages.
        with torch.compiler.set_stance("force_eager"):
            self._generating.run([inputs], [keywords], lambda _, logits: results.append(logits[:, -1:]), stage_keywords)
        return results[0] if results else None

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Enter evaluation mode, no_grad and autocast for `generate`."""
        with set_train(self._pipeline.own_modules, False), torch.no_grad(), self._amp.autocast():
            yield

    @contextlib.contextmanager
    def _offloading(self) -> Iterator[None]:
        """Enter autocast and activation offloading for the forward passes of training."""
        with self._amp.autocast(), self._recipes.activations(lambda: self._pipeline.part):
            yield

    def _make_stage(self, like: PipelineStage, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> TrainedStage:
        stage = TrainedStage(
            like.submod, like.stage_index, like.num_stages, like.device, inputs, outputs, group=like.group
        )
        stage.splits_backward = self._splits_backward
        stage.context = self._forward_context
        stage.reducer = self._reducer
        stage.expected = None if stage.is_last else tuple(map(Meta.of, outputs))
        return stage

    def _metas_between(self, inputs: Tensor, keywords: Mapping[str, Any]) -> dict[int, Metas]:
        with _without_trace(self._pipeline.own_modules), self._amp.autocast():
            return self._forward_only.metas_between(inputs, keywords)


@contextlib.contextmanager
def _without_trace(modules: nn.Module) -> Iterator[None]:
    # Evaluation mode keeps dropout from drawing random numbers and batch norms from updating their statistics.
    with undisturbed_random_numbers(), set_train(modules, False), torch.no_grad():
        yield
