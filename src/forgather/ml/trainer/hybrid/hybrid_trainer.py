"""HybridTrainer: data parallelism between pipelines, pipeline parallelism within each.

Ranks at the same position of their pipelines hold copies of the same stages (dp_strategy="replicate"), or shards of them
("shard", FSDP2). Gradients are summed over these ranks. Copies are compared at every save.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.trainer.fsdp2.sharded_gradients import ShardedGradientNorm, clip_shards
from forgather.ml.trainer.hybrid.gradient_reduction import AllReduceBucket, GradientReducer, bucketed
from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
from forgather.ml.trainer.hybrid.sharded_stages import ShardedStages
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel
from forgather.ml.trainer.pipeline.pipeline_ranks import PipelineRanks
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replicated_model import ReplicatedModel
from forgather.ml.trainer.setup.declared_state import BY_LOADING, PER_RANK, REPLICATED, Shared

__all__ = ["HybridTrainer", "HybridTrainingArguments"]

THybridArgs = TypeVar("THybridArgs", bound=HybridTrainingArguments)

_COPIED_STAGES = Shared(SharingPattern.PER_GROUP, "dp_group", compared=True)
"""State with copies on the ranks at the same position of their pipelines; compared at every save."""


class HybridTrainer(PipelineTrainer[THybridArgs]):
    """Trainer with `dp_size` pipelines of `pp_size` ranks; ranks at equal positions hold copies of the same stages.

    With dp_strategy="shard" they hold shards of these stages, and gather the full weights for each step. Pipelines with
    batch size b train exactly like one device with batch size `dp_size` x b on the same data order.
    """

    arguments_class = HybridTrainingArguments
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": _COPIED_STAGES,
        "optimizer": _COPIED_STAGES,
        "scheduler": REPLICATED,
        "ema": _COPIED_STAGES,
        "trainer": REPLICATED,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }
    sharded_sharing: ClassVar[Mapping[str, Shared]] = {
        # Each rank has its own shards. A save streams them to files of full tensors (`checkpoint.sharding`).
        "model": PER_RANK,
        "optimizer": PER_RANK,
        "scheduler": REPLICATED,
        "ema": PER_RANK,
        "trainer": REPLICATED,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }
    """Table for dp_strategy="shard"."""
    dp_process_group: ProcessGroup | None = None
    pp_process_group: ProcessGroup | None = None
    _shards: ShardedStages | None = None
    """Sharded parameters of this rank's stages; None with dp_strategy="replicate"."""

    # --- ranks and batches

    def _init_mesh(self) -> None:
        if self.mesh is None:
            shape, names = self.args.sizes(self.dist.world_size), ("data_parallel", "pipeline_parallel")
            self.mesh = self.team.mesh(self.dist.device_type, shape, names)
        assert self.mesh is not None
        self.dp_process_group = self.mesh.get_group("data_parallel")
        self.pp_group = self.pp_process_group = self.mesh.get_group("pipeline_parallel")

    def _find_ranks(self) -> PipelineRanks:
        assert self.mesh is not None and self.pp_group is not None
        return PipelineRanks(self.pp_group, self.mesh.mesh.tolist(), self.dp_process_group)

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        groups = super().get_process_groups()
        return groups if self.dp_process_group is None else {"dp_group": self.dp_process_group, **groups}

    def _dispatches(self, for_training: bool) -> bool:
        return bool(self.args.dispatch_batches) if for_training else self._dispatch_eval_batches()

    def _dispatch_eval_batches(self) -> bool:
        return bool(self.args.dispatch_batches)

    def _data_layout(self, for_training: bool) -> DataLayout:
        assert self.mesh is not None
        ranks = self.ranks
        part, speaks = Part(ranks.replica, len(ranks.pipelines)), ranks.rank == 0
        # All ranks of a pipeline train on the same batches, so only its first rank counts them.
        if self._dispatches(for_training):
            everyone = range(self.dist.world_size)
            return DataLayout(part, speaks, readers=[everyone], reads_whole=True, mesh=self.mesh, axis=0)
        return DataLayout(part, speaks, readers=ranks.pipelines, mesh=self.mesh["pipeline_parallel"])

    # --- the model

    def _prepare_model(self) -> None:
        if self.starts_over:
            # Free the old model first: two models at once may not fit into memory.
            self._shards = None
        super()._prepare_model()

    def _shard_stages(self, pipeline: PipelineModel) -> None:
        if self.args.dp_strategy == "shard":
            assert self.mesh is not None
            with self.team.agreement("sharding the stages"):
                self._shards = ShardedStages(pipeline, self.mesh["data_parallel"])

    def _wrap_loss_fn(self) -> None:
        # A fused loss looks at the output head.
        with self._gathered() if self.fused_loss_factory is not None else contextlib.nullcontext():
            super()._wrap_loss_fn()

    def _make_reducer(self, pipeline: PipelineModel) -> GradientReducer:
        assert self.dp_process_group is not None
        self._replicas = ReplicatedModel(pipeline.part, self.team, self.dp_process_group)
        if self._shards is not None:
            self._reducer = self._shards.reducer
        else:
            all_reduce = partial(AllReduceBucket, group=self.dp_process_group)
            self._reducer = GradientReducer(*bucketed(pipeline.own, all_reduce))
        return self._reducer

    def _follow_optimizer(self) -> None:
        super()._follow_optimizer()
        if self._shards is not None:
            assert self.optimization is not None and self.dp_process_group is not None
            # The norm of a stage is equal on all its ranks, as with replicated stages.
            counted = self._tied.counted(self.optimization.parameters)
            self.optimization.norm = ShardedGradientNorm(counted, self.dp_process_group, self.device)

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        return super()._gathered() if self._shards is None else self._shards.gathered()

    # --- the step

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        if self._shards is not None:
            # Here, and not inside the schedule: a pipeline may run trial passes that the others do not run. The weights
            # stay gathered until the last batch of the step is reduced.
            self._shards.gather()
        # In gradient accumulation, only the last batch of a step is reduced.
        self._reducer.is_active = self._should_sync_gradients()
        with self._replicas.forward():
            return super()._forward_backward_step(input_dict, labels)

    def _reduce_gradients(self) -> None:
        # First over pipelines: this replaces each `.grad`, which the sum over tied weights then changes in place.
        self._reducer.finish()
        super()._reduce_gradients()

    def _scale_gradients(self, max_grad_norm: float | None, norm: Tensor) -> None:
        if self._shards is None:
            super()._scale_gradients(max_grad_norm, norm)
        elif max_grad_norm:
            assert self.optimization is not None
            clip_shards(self.optimization.parameters, max_grad_norm, norm)

    def _advance_schedule(self) -> None:
        super()._advance_schedule()
        # The last call before gradients are cleared.
        if self._shards is not None:
            self._shards.release_gradients()

    # --- generation

    def _share_tokens(self, num_rows: int, tokens: Tensor | None) -> Tensor:
        shared = super()._share_tokens(num_rows, tokens)
        # Every pipeline sampled its own tokens. Broadcast the tokens of the first.
        dist.broadcast(shared, group=self.ranks.replicas, group_src=0)
        return shared

    # --- evaluation and state

    def _sharing_table(self) -> Mapping[str, Shared]:
        return self.state_sharing if self.args.dp_strategy == "replicate" else self.sharded_sharing

    def _before_evaluation(self) -> None:
        self._replicas.share_buffers()

    def _eval_loop(self) -> dict[str, Any]:
        # Once for all batches: pipelines evaluate different numbers of them.
        with self._gathered():
            return super()._eval_loop()

    def _before_save(self) -> None:
        super()._before_save()
        # A save compares the copies of stages. Buffers such as running means differ, because pipelines see other batches.
        self._replicas.share_buffers()

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        has_one_position = self._dispatches(for_training=True) or self.args.global_batch_size is not None
        return SharingPattern.GLOBAL if has_one_position else SharingPattern.PER_GROUP

    def _dataset_group(self) -> str | None:
        return "pp_group"
