"""FSDP2Trainer: fully sharded data parallelism with torch's fully_shard, and HSDP (sharded replicas).

Every rank holds one shard of each parameter, gradient and optimizer state. Layers are gathered for their forward and
backward pass. Checkpoints contain full tensors by FQN, so they load in any trainer.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.checkpoint.weights.adapters import is_peft_model, note_sharded_base, whole_adapters
from forgather.ml.construct import torch_dtype
from forgather.ml.distributed.groups import new_group
from forgather.ml.distributed.rank_messages import sendable
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.fsdp2.deferred_init import build_deferred
from forgather.ml.trainer.fsdp2.fsdp2_arguments import FSDP2Arguments, FSDP2TrainingArguments
from forgather.ml.trainer.fsdp2.layer_order import LayerOrder
from forgather.ml.trainer.fsdp2.sharded_gradients import (
    ShardedGradientNorm,
    clip_shards,
    refuse_unshardable,
    release_gradients,
)
from forgather.ml.trainer.fsdp2.sharded_model import InitialValues, fill_shards, is_sharded_model, shard_model
from forgather.ml.trainer.loop.evaluator import Prediction
from forgather.ml.trainer.ranks.data_parallel_batches import (
    data_parallel_layout,
    dispatches_evaluation,
    evaluation_settings,
)
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replicated_model import ReplicatedModel
from forgather.ml.trainer.ranks.team import RankTeam
from forgather.ml.trainer.recipes.activation_checkpointing import checkpointing_function
from forgather.ml.trainer.setup.declared_state import BY_LOADING, PER_RANK, REPLICATED, Shared
from forgather.ml.trainer.setup.seeding import seed_everything, undisturbed_random_numbers
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.utils import default_dtype

__all__ = ["FSDP2Arguments", "FSDP2Trainer", "FSDP2TrainingArguments"]

TFSDP2Args = TypeVar("TFSDP2Args", bound=FSDP2TrainingArguments)

_REPLICAS = Shared(SharingPattern.PER_GROUP, "replicate_group", compared=True)
"""Shards with copies on the ranks of other replicas (HSDP); compared at every save."""


class FSDP2Trainer(Trainer[TFSDP2Args]):
    """Trainer for fully sharded data parallelism: every rank holds a shard of the model, and trains on its own batches.

    N ranks with batch size b train exactly like one device with batch size N x b on the same data order. Pass the model as
    `model_init`, so that no rank ever holds it whole.
    """

    arguments_class = FSDP2TrainingArguments
    handles_ranks = True
    # The deferred construction of `model_init` would leave the frozen weights of a resumed run empty.
    builds_adapters = False
    unrepeatable = "its passes gather parameters from all ranks, so one rank cannot repeat a step alone"
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        # Each rank has its own shards. A save streams them to files of full tensors (`checkpoint.sharding`).
        "model": PER_RANK,
        "optimizer": PER_RANK,
        "scheduler": REPLICATED,
        "ema": PER_RANK,
        "trainer": REPLICATED,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }
    replicated_sharing: ClassVar[Mapping[str, Shared]] = {
        **state_sharing,
        "model": _REPLICAS,
        "optimizer": _REPLICAS,
        "ema": _REPLICAS,
    }
    """Table for HSDP (`fsdp2.replicate_size` > 1): the replicas hold copies of the same shards."""
    mesh: DeviceMesh | None = None
    fsdp_group: ProcessGroup | None = None
    replicate_group: ProcessGroup | None = None
    _batch_mesh: DeviceMesh | None = None
    _order_group: ProcessGroup | None = None
    _order: LayerOrder | None = None
    _ordered_model: nn.Module | None = None

    # --- ranks and batches

    def _init_distributed(self) -> None:
        super()._init_distributed()
        self._follow_ranks()

    def _follow_ranks(self) -> None:
        if self.mesh is None and isinstance(self.team, RankTeam):
            self._init_mesh(self.args.fsdp2.replicate_size)

    def _init_mesh(self, num_replicas: int) -> None:
        size, device_type = self.dist.world_size, self.dist.device_type
        if size % num_replicas or size == num_replicas:
            raise ValueError(
                f"fsdp2.replicate_size={num_replicas} does not fit the {size} ranks of this job: each replica needs the same "
                "number of ranks, and at least two. Choose a smaller divisor of the number of ranks, or use DDPTrainer for "
                "replicas that are not sharded."
            )
        parts, num_shards = self.args.fsdp2.reshard_after_forward, size // num_replicas
        if not isinstance(parts, bool) and (parts == 0 or num_shards % parts):
            raise ValueError(
                f"fsdp2.reshard_after_forward={parts} does not fit {num_shards} shards: weights can stay divided over a number "
                "of ranks that divides the number of shards. Choose such a number, or True or False."
            )
        if num_replicas == 1:
            self.mesh = self._batch_mesh = self.team.mesh(device_type, (size,), ("shard",))
            assert self.mesh is not None
        else:
            names = ("replicate", "shard")
            self.mesh = self.team.mesh(device_type, (num_replicas, num_shards), names)
            self._batch_mesh = self.team.mesh(device_type, (size,), ("data_parallel",))
            assert self.mesh is not None
            self.replicate_group = self.mesh.get_group("replicate")
        self.fsdp_group = self.mesh.get_group("shard")

    def _sharing_table(self) -> Mapping[str, Shared]:
        table = self.state_sharing if self.args.fsdp2.replicate_size == 1 else self.replicated_sharing
        # Adapters are small, so one rank writes all of them.
        return {**table, "model": REPLICATED} if self._has_adapters else table

    @property
    def _has_adapters(self) -> bool:
        return self.model is not None and is_peft_model(self.unwrapped_model())

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        groups = {"fsdp_group": self.fsdp_group, "replicate_group": self.replicate_group}
        return {name: group for name, group in groups.items() if group is not None}

    def _dispatches(self, for_training: bool) -> bool:
        return bool(self.args.dispatch_batches) if for_training else self._dispatch_eval_batches()

    def _dispatch_eval_batches(self) -> bool:
        return dispatches_evaluation(self.args)

    def _data_layout(self, for_training: bool) -> DataLayout:
        return data_parallel_layout(self.team, self._batch_mesh, self._dispatches(for_training))

    def _is_model_parallel(self) -> bool:
        return self.mesh is not None

    # --- the model

    def _make_amp_context(self) -> AMPContext:
        # fully_shard casts the gathered weights (param_dtype). Autocast would cast them a second time.
        return super()._make_amp_context() if self.mesh is None else AMPContext(None, self.device.type)

    def _prepare_model(self) -> None:
        if self.mesh is None:
            super()._prepare_model()
            return
        builds = self.model is None or (self.starts_over and self.model_init is not None)
        with self.team.agreement("building the model"):
            if builds:
                # Free the old model first: two models at once may not fit into memory.
                self.model = self._order = self._ordered_model = None
            model, values = self._construct() if builds else (self.unwrapped_model(), {})
            if not is_sharded_model(model):
                self._shard(model, values)
            self.model = model
        note_sharded_base(model)

    def _construct(self) -> tuple[nn.Module, InitialValues]:
        assert self.model_init is not None
        with contextlib.ExitStack() as context:
            dtype = self.args.default_dtype
            context.enter_context(default_dtype(None if dtype is None else torch_dtype(dtype)))
            if self.loads_weights:
                context.enter_context(no_init_weights())
            model, deferred = build_deferred(self.model_init)
        return model, {} if deferred is None else deferred.initial_values(model)

    def _shard(self, model: nn.Module, values: InitialValues) -> None:
        assert self.mesh is not None
        self.recipes.apply_layers(model)
        enable = checkpointing_function(self.args, self.enable_activation_checkpoint_fn)
        if enable is not None:
            enable(self.team.rank, model)
        shard_model(model, self.mesh, self.args, self.device)
        device = torch.device("cpu") if self.args.fsdp2.cpu_offload else self.device
        fill_shards(model, device, values, self.loads_weights)

    def _follow_model(self) -> None:
        self._replicas = ReplicatedModel(self.unwrapped_model(), self.team)
        self._replicas.require_same()
        if self.mesh is not None and self._ordered_model is not self.unwrapped_model():
            self._follow_layers(self.unwrapped_model())

    def _follow_layers(self, model: nn.Module) -> None:
        # A separate group: a rank may wait in it while messages of the batches are on their way.
        self._order_group = self._order_group or new_group(backend="gloo")
        self._order = LayerOrder(model, self._order_group, self.args.fsdp2.find_unused_parameters)
        self._ordered_model = model

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        # A forward pass, such as a trial of a fused loss, leaves gathered parameters in the modules. The optimizer must
        # update the shards.
        self._reshard()
        return super()._named_parameters()

    def _follow_optimizer(self) -> None:
        super()._follow_optimizer()
        if self.fsdp_group is not None:
            assert self.optimization is not None
            refuse_unshardable(self.optimizer)
            self.optimization.norm = ShardedGradientNorm(self.optimization.parameters, self.fsdp_group, self.device)

    def _agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        if self.mesh is None:
            super()._agree_on_loss(loss, batch)
            return
        # A forward pass gathers parameters from all ranks. With the same batch and random numbers, all ranks run the same
        # number of passes, and find the same loss.
        holders = self.team.gather(batch is not None)
        own = dict(batch or {})
        sent = sendable(own)
        sent, kept = self.team.broadcast_from(holders.index(True), (sent, [name for name in own if name not in sent]))
        # Objects that cannot be sent, such as paths, are those of the rank's own batch.
        shared = {**sent, **{name: own[name] for name in kept if name in own}}
        with undisturbed_random_numbers():
            seed_everything(self.seed)
            finding = self.steps.look_at_loss(loss, shared)
        if finding is not None:
            loss.adopt(finding)

    # --- the step

    def _around_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.mesh is None else self._reducing()

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        with self._around_micro_batch():
            return super()._forward_backward_step(input_dict, labels)

    @contextlib.contextmanager
    def _reducing(self) -> Iterator[None]:
        # Gradients are reduce-scattered after every micro-batch: keeping them whole until the last one, as DDP does, would
        # take the memory of the full model. The all-reduce between replicas needs only the shards, so it can wait.
        if self.replicate_group is not None:
            self._root().set_requires_all_reduce(self._should_sync_gradients())
        assert self._order is not None
        with self._replicas.forward(), self._order.watched("training"):
            yield
        if self._should_sync_gradients():
            self._order.forget_unused(self.team.sum)

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        if self.mesh is None:
            return super()._clip_grad_norm(max_grad_norm, norm_type)
        assert self.optimization is not None
        norm = self.optimization.norm(norm_type)
        if max_grad_norm:
            clip_shards(self.optimization.parameters, max_grad_norm, norm)
        return norm

    def _advance_schedule(self) -> None:
        super()._advance_schedule()
        # The last call before gradients are cleared.
        if self.mesh is not None and self.device.type != "cpu":
            release_gradients(self._root())

    def _root(self) -> FSDPModule:
        root = self.unwrapped_model()
        assert isinstance(root, FSDPModule)
        return root

    # --- evaluation and state

    def _prepare_loop(self) -> None:
        super()._prepare_loop()
        # Ranks wait for each other inside forward passes, so a failed rank cannot finish its round.
        self.evaluator.waits_for_errors = self.mesh is None
        self.evaluator.joins_all_rounds = self.mesh is not None

    def _before_evaluation(self) -> None:
        self._replicas.share_buffers()

    def _eval_loop(self) -> dict[str, Any]:
        try:
            return super()._eval_loop()
        finally:
            self._reshard()

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> Prediction:
        with contextlib.nullcontext() if self._order is None else self._order.watched("an evaluation"):
            return super()._prediction_step(input_dict, labels)

    def _reshard(self) -> None:
        """Free the parameters that forward passes of an evaluation have left gathered."""
        # They would hide a change of the shards, such as loaded weights, from the next forward pass.
        if self.mesh is not None:
            self._root().reshard()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self._reshard()
        with super().averaged_weights():
            yield
            self._reshard()

    def _before_save(self) -> None:
        super()._before_save()
        # A save writes one copy of the buffers, and HSDP compares them.
        self._replicas.share_buffers()
        if self._has_adapters:
            self._gather_adapters()

    def _gather_adapters(self) -> None:
        if self.mesh is not None:
            self.gathered_adapters = whole_adapters(self.unwrapped_model())

    def _model_to_save(self) -> dict[str, Any]:
        return {**super()._model_to_save(), "mesh": self.mesh}

    def _evaluation_settings(self) -> dict[str, Any]:
        return {**evaluation_settings(self.args, self._dispatches(False)), **super()._evaluation_settings()}
