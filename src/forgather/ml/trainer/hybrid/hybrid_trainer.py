"""Several pipelines with copies of one model: data parallelism between them, pipeline parallelism within."""

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.pipelining import PipelineStage

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.trainer.hybrid.gradient_reduction import GradientReducer
from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.pipeline.pipeline_utils import tensors_of
from forgather.ml.trainer.pipeline.schedules.trained_stage import TrainedStage
from forgather.ml.trainer.ranks.mutable_buffers import ChangingBuffers
from forgather.ml.trainer.step_loss.model_loss import Window

__all__ = ["HybridTrainer", "HybridTrainingArguments"]


class HybridTrainer(PipelineTrainer):
    """`dp_size` pipelines of `pp_size` ranks; ranks at the same place of their pipelines have copies of the same stages.

    Pipelines with batch b train exactly like one device with as many times b on the same order of the data.
    """

    arguments_class = HybridTrainingArguments
    _reducer: GradientReducer | None = None
    _changing_buffers: ChangingBuffers

    # --- ranks

    def _make_mesh(self) -> DeviceMesh:
        return dist.device_mesh.init_device_mesh(
            self.env.device_type,
            self.args.sizes(self.env.world_size),
            mesh_dim_names=("data_parallel", "pipeline_parallel"),
        )

    @property
    def _pp_size(self) -> int:
        return int(self.args.sizes(self.env.world_size)[1])

    @property
    def _dp_group(self) -> ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group("data_parallel")

    @property
    def _dp_rank(self) -> int:
        return dist.get_rank(self._dp_group)

    @property
    def _pipelines(self) -> list[list[int]]:
        assert self._mesh is not None
        pipelines: list[list[int]] = self._mesh.mesh.tolist()
        return pipelines

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        return {"dp_group": self._dp_group, "pp_group": self._pp_group}

    # --- data

    def _dispatches(self, for_training: bool) -> bool:
        return bool(self.args.dispatch_batches)

    @property
    def _reads_for_others(self) -> bool:
        return True

    def _dispatcher_mesh(self, for_training: bool) -> tuple[DeviceMesh, int | None]:
        assert self._mesh is not None
        if self._dispatches(for_training):
            return self._mesh, 0
        return self._mesh["pipeline_parallel"], None

    def _readers(self, for_training: bool) -> list[list[int]]:
        return super()._readers(for_training) if self._dispatches(for_training) else self._pipelines

    @property
    def _data_part(self) -> Part:
        return Part(self._dp_rank, dist.get_world_size(self._dp_group))

    # --- the model

    def _give_values(self, source: nn.Module | None) -> None:
        if self._dp_rank == 0:
            super()._give_values(source)
        tensors = {id(tensor): tensor for tensor in tensors_of(self.pipeline.part).values()}
        works = [
            dist.broadcast(tensor.detach(), group=self._dp_group, group_src=0, async_op=True)
            for tensor in tensors.values()
        ]
        for work in works:
            assert work is not None
            work.wait()

    def _compile_model(self) -> None:
        super()._compile_model()
        self._reducer = GradientReducer(self.pipeline.own, self._dp_group)
        self._changing_buffers = ChangingBuffers(self.pipeline.part, self._peers, self._dp_group)

    def _make_stage(self, like: PipelineStage, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> TrainedStage:
        stage = super()._make_stage(like, inputs, outputs)
        stage.reducer = self._reducer
        return stage

    # --- the step

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        assert self._reducer is not None
        self._reducer.is_active = number + 1 == len(window.batches)
        if self._changing_buffers.are_known:
            return super()._forward_backward_step(window, number)
        with self._changing_buffers.found_out():
            return super()._forward_backward_step(window, number)

    def _finish_gradients(self) -> None:
        assert self._reducer is not None
        self._reducer.finish()
        super()._finish_gradients()

    # --- generation

    def _share_tokens(self, num_rows: int, tokens: Tensor | None) -> Tensor:
        shared = super()._share_tokens(num_rows, tokens)
        # Each pipeline has drawn its own, and all are to say the same.
        dist.broadcast(shared, group=self._dp_group, group_src=0)
        return shared

    # --- state

    def _before_save(self) -> None:
        super()._before_save()
        self._changing_buffers.share()

    def _evaluate_on(self, dataset: Any) -> dict[str, Any]:
        self._changing_buffers.share()
        return super()._evaluate_on(dataset)

    def _as_part(self, component: StateComponent) -> StateComponent:
        return dataclasses.replace(
            component,
            sharing_pattern=SharingPattern.PER_GROUP,
            process_group_name="dp_group",
            validate_replication=True,
        )

    def _dataset_component(self) -> StateComponent:
        pattern = self._get_dataset_sharing_pattern()
        family = "pp_group" if pattern is SharingPattern.PER_GROUP else None
        return StateComponent("dataset", self.train_dataloader, pattern, family, required=False)

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL if self._dispatches(for_training=True) else SharingPattern.PER_GROUP
