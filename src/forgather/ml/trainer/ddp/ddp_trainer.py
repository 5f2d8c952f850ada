"""DDPTrainer: data parallelism with torch's DistributedDataParallel.

Every rank holds the full model. Gradients are averaged over ranks in the backward pass, and the copies of the model are
compared at every save.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.trainer.batch_size.late_reduction import average_gradients, share_weights
from forgather.ml.trainer.ddp.ddp_arguments import DDPArguments, DDPTrainingArguments, PostLocalSGDArguments
from forgather.ml.trainer.ddp.post_local_sgd import PostLocalSGD
from forgather.ml.trainer.ddp.sharded_optimizer import ShardedOptimizer, require_equal_options, require_equal_owners
from forgather.ml.trainer.ddp.unused_parameters import explained, refuse_unused
from forgather.ml.trainer.ranks.data_parallel_batches import (
    data_parallel_layout,
    dispatches_evaluation,
    evaluation_settings,
)
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replicated_model import ReplicatedModel
from forgather.ml.trainer.ranks.team import RankTeam
from forgather.ml.trainer.setup.declared_state import BY_LOADING, COMPARED, PER_RANK, REPLICATED, Shared
from forgather.ml.trainer.step_loss.fused import fused_loss_refusal
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import OptimizerT

__all__ = ["DDPArguments", "DDPTrainer", "DDPTrainingArguments", "PostLocalSGDArguments"]

logger = logging.getLogger(__name__)

TDDPArgs = TypeVar("TDDPArgs", bound=DDPTrainingArguments)


class DDPTrainer(Trainer[TDDPArgs]):
    """Trainer for data parallelism: every rank holds the full model, and gradients are averaged over ranks.

    N ranks with batch size b train exactly like one device with batch size N x b on the same data order.
    """

    arguments_class = DDPTrainingArguments
    handles_ranks = True
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": COMPARED,
        "optimizer": COMPARED,
        "scheduler": REPLICATED,
        "ema": COMPARED,
        "trainer": REPLICATED,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
        "post_local_sgd": REPLICATED,
    }
    mesh: DeviceMesh | None = None
    ddp_group: ProcessGroup | None = None
    post_local_sgd_state: PostLocalSGD | None = None
    _has_reduced = False

    def __init__(self, *, args: TDDPArgs | Mapping[str, Any], **trainer_kwargs: Any) -> None:
        super().__init__(args=args, **trainer_kwargs)
        if self.use_fused_loss and self.args.ddp.find_unused_parameters:
            raise fused_loss_refusal("ddp.find_unused_parameters=True")

    # --- ranks and batches

    def _init_distributed(self) -> None:
        super()._init_distributed()
        self._follow_ranks()

    def _follow_ranks(self) -> None:
        if self.mesh is None:
            self.mesh = self.team.mesh(self.dist.device_type, (self.dist.world_size,), ("data_parallel",))
        if self.ddp_group is None and self.mesh is not None:
            self.ddp_group = self.mesh.get_group()

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        return {} if self.ddp_group is None else {"ddp_group": self.ddp_group}

    def _dispatches(self, for_training: bool) -> bool:
        return bool(self.args.dispatch_batches) if for_training else self._dispatch_eval_batches()

    def _dispatch_eval_batches(self) -> bool:
        return dispatches_evaluation(self.args)

    def _data_layout(self, for_training: bool) -> DataLayout:
        return data_parallel_layout(self.team, self.mesh, self._dispatches(for_training))

    # --- the model

    def _follow_model(self) -> None:
        self._replicas = ReplicatedModel(self.unwrapped_model(), self.team)
        self._replicas.require_same()

    def _wrap(self) -> None:
        trains = any(parameter.requires_grad for parameter in self.unwrapped_model().parameters())
        # DDP raises for a model without trainable parameters.
        if self.ddp_group is None or not trains:
            return
        if self.args.auto_find_batch_size:
            # DDP reduces inside the backward pass, which a rank without memory cannot finish (see `late_reduction`).
            share_weights(self.unwrapped_model(), self.ddp_group)
            return
        options = {name: value for name, value in vars(self.args.ddp).items() if name != "shard_optimizer"}
        self.model = DistributedDataParallel(
            self.model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=self.ddp_group,
            # The name broadcast_buffers is deprecated in torch, and causes a warning.
            forward_sync_buffers=options.pop("broadcast_buffers"),
            **options,
        )
        if self.args.post_local_sgd.enabled and self.optimizer is not None:
            assert isinstance(self.team, RankTeam)
            self.post_local_sgd_state = PostLocalSGD(
                self.args.post_local_sgd, self.ddp_group, self.team.peers, self.dist
            )
            self.optimizer = self.post_local_sgd_state.attach(self.model, self.optimizer)

    # --- the optimizer

    @property
    def _shards_optimizer(self) -> bool:
        return self.args.ddp.shard_optimizer and self.dist.world_size > 1

    def _adapt_optimizer(self, optimizer: OptimizerT, named: Sequence[tuple[str, nn.Parameter]]) -> OptimizerT:
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer
        optimizer = super()._adapt_optimizer(optimizer, named)
        if not self._shards_optimizer:
            return optimizer
        assert self.ddp_group is not None
        # Reversed, because the first name of a tied parameter is its stored name.
        names: dict[Tensor, str] = {parameter: name for name, parameter in reversed(named)}
        return ShardedOptimizer(optimizer, names, self.ddp_group)

    def _prepare_loop(self) -> None:
        super()._prepare_loop()
        if self.batch_finder is not None and self.ddp_group is not None:
            self.batch_finder.reduce = self._reduce_late

    def _follow_optimizer(self) -> None:
        super()._follow_optimizer()
        if isinstance(self.optimizer, ShardedOptimizer):
            # Ranks with different owners would send broadcasts of different sizes.
            require_equal_owners(self.team.gather(self.optimizer.owner_by_name()))

    # --- the step

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        with self._around_micro_batch():
            return super()._forward_backward_step(input_dict, labels)

    @contextlib.contextmanager
    def _around_micro_batch(self) -> Iterator[None]:
        reduces = self._should_sync_gradients()
        # In gradient accumulation, only the last micro-batch of a step is reduced.
        delayed = contextlib.nullcontext() if reduces or not self._is_wrapped else self.model.no_sync()
        # A step that may be repeated has no collective inside its passes.
        looking = contextlib.nullcontext() if self.batch_finder is not None else self._replicas.forward(self.model)
        with delayed, looking:
            try:
                yield
            except RuntimeError as error:
                better = explained(error, self.unwrapped_model()) if reduces and self._is_wrapped else None
                if better is None:
                    raise
                raise better from error

    def _reduce_late(self) -> None:
        """Average gradients after all passes of a step (`auto_find_batch_size`); collective."""
        assert self.batch_finder is not None and self.ddp_group is not None
        trained = [one for one in self.unwrapped_model().parameters() if one.requires_grad]
        average_gradients(trained, self.ddp_group, self.team.sum)
        self._replicas.note_changes(self.batch_finder.changed_buffers)

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        if self._has_reduced or not (self._is_wrapped and self._should_sync_gradients()):
            return
        # Raise before the next collective: a rank with all gradients still waits for the buckets of this rank.
        if not (self.args.ddp.find_unused_parameters or self.args.ddp.static_graph):
            refuse_unused(self.unwrapped_model())
        self._has_reduced = True

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        if self.post_local_sgd_state is None or not norms:
            return norms
        # Ranks have different gradients between two averages. Report the root mean square of their norms.
        squares = self.team.sum(torch.tensor(norms, dtype=torch.float64).square())
        return (squares / self.team.size).sqrt().tolist()

    # --- evaluation and state

    def _before_evaluation(self) -> None:
        # DDP broadcasts buffers before a forward pass. The last pass of training has changed them since.
        if getattr(self.model, "forward_sync_buffers", self.args.auto_find_batch_size):
            self._replicas.share_buffers()

    def _common_weights(self) -> contextlib.AbstractContextManager[None]:
        local = self.post_local_sgd_state
        return super()._common_weights() if local is None else local.averaged_weights()

    def _before_save(self) -> None:
        super()._before_save()
        # A save compares the copies of all ranks, so they must be equal.
        self._replicas.share_buffers()
        if self.post_local_sgd_state is not None:
            self.post_local_sgd_state.average_replicas()
        if isinstance(self.optimizer, ShardedOptimizer):
            require_equal_options(self.team.gather(self.optimizer.options_of_groups()))

    def _after_load(self) -> None:
        # A state with master weights also sets float32 parameters, on the ranks that own them.
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.broadcast()

    def _sharing_table(self) -> Mapping[str, Shared]:
        table = super()._sharing_table()
        # Each rank saves the moments of the parameters that it updates, by name.
        return {**table, "optimizer": PER_RANK} if self._shards_optimizer else table

    def _model_to_save(self) -> dict[str, Any]:
        return {**super()._model_to_save(), "mesh": self.mesh}

    def _built_statefuls(self) -> dict[str, object]:
        statefuls = super()._built_statefuls()
        return (
            {**statefuls, "post_local_sgd": self.post_local_sgd_state}
            if self.args.post_local_sgd.enabled
            else statefuls
        )

    def _evaluation_settings(self) -> dict[str, Any]:
        return {**evaluation_settings(self.args, self._dispatches(False)), **super()._evaluation_settings()}
