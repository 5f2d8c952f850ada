"""AccelTrainer: training with a Hugging Face `Accelerator`, in one process or with DDP.

The accelerator sets device, ranks and precision. Each process reads its own shard of the data, without the loaders of
Accelerate, so that positions in checkpoints are exact.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import DeviceMesh

from forgather.ml.trainer.accelerate.accelerator_checks import (
    AcceleratedOptimizer,
    Accelerator,
    check_against_arguments,
    environment_of,
    require_usable,
    taken_apart,
)
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.checks import check_param_precision
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.ranks.replicated_model import ReplicatedModel
from forgather.ml.trainer.setup.declared_state import BY_LOADING, COMPARED, PER_RANK, REPLICATED, Shared
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.step_loss.fused import fused_loss_refusal
from forgather.ml.trainer.trainer import Trainer, TTrainingArgs
from forgather.ml.trainer.trainer_types import OptimizerT

__all__ = ["AccelTrainer", "AccelTrainingArguments"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """Arguments of `Trainer`; all other settings are arguments of the `Accelerator`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with Accelerate: the accelerator reduces, scales and clips "
                "all gradients before an update. Turn it off, or use Trainer on one device."
            )


class AccelTrainer(Trainer[TTrainingArgs]):
    """Trainer for Hugging Face Accelerate: the accelerator prepares the full model, and reduces, clips and steps.

    Rank, number of processes, device and precision come from the accelerator; gradient accumulation comes from the
    arguments. The accelerator does not wrap data loaders: it would repeat samples to make batches even, and read one
    batch ahead of the position in a checkpoint. Instead, each process reads its shard of the global order that one
    device would read. No sample is repeated or lost, and positions are exact. Options such as `even_batches` have no
    effect.

    Args:
        accelerator: the `accelerate.Accelerator` of this process.
    """

    arguments_class = AccelTrainingArguments
    handles_ranks = True
    unrepeatable = "accelerate reduces gradients inside the backward pass, so a step cannot be repeated. Use DDPTrainer"
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": COMPARED,
        "optimizer": REPLICATED,
        "scheduler": REPLICATED,
        "ema": COMPARED,
        "trainer": REPLICATED,
        "dataset": BY_LOADING,
        "rng": PER_RANK,
    }

    mesh: DeviceMesh | None = None

    @explains_calls
    def __init__(
        self, *, args: TTrainingArgs | Mapping[str, Any], accelerator: Accelerator, **trainer_kwargs: Any
    ) -> None:
        require_usable(accelerator)
        self.accelerator = accelerator
        # Objects that the user has prepared are registered with the accelerator, until `_release_prepared` removes them.
        self._prepared = [trainer_kwargs.get("optimizer"), trainer_kwargs.get("lr_scheduler")]
        trainer_kwargs["distributed_env"] = environment_of(accelerator, trainer_kwargs.get("distributed_env"))
        super().__init__(args=args, **taken_apart(accelerator, trainer_kwargs))
        check_against_arguments(accelerator, self.args)
        self.args.mixed_precision = accelerator.mixed_precision
        check_param_precision(self.args)
        if self.use_fused_loss and getattr(accelerator.ddp_handler, "find_unused_parameters", False):
            raise fused_loss_refusal("DistributedDataParallelKwargs(find_unused_parameters=True)")
        self._initial_loss_scale = None if accelerator.scaler is None else accelerator.scaler.state_dict()

    # --- preparation

    def _follow_ranks(self) -> None:
        if self.mesh is None:
            self.mesh = self.team.mesh(self.dist.device_type, (self.dist.world_size,), ("data_parallel",))

    def _data_layout(self, for_training: bool) -> DataLayout:
        return DataLayout(Part(self.team.rank, self.team.size), remedy="A map-style dataset is split by the trainer.")

    def _device_type(self) -> str:
        return str(self.accelerator.device.type)

    def _init_device(self) -> None:
        self.args.device = str(self.accelerator.device)

    def _make_amp_context(self) -> AMPContext:
        if self._initial_loss_scale is not None:
            # The accelerator outlives a run. Its loss scale must not carry over to the next run.
            self.accelerator.scaler.load_state_dict(self._initial_loss_scale)
        return AcceleratorPrecision(self.accelerator)

    def _follow_model(self) -> None:
        self._replicas = ReplicatedModel(self.unwrapped_model(), self.team)
        self._replicas.require_same()

    def _wrap(self) -> None:
        self._release_prepared()
        self.model = self._prepare_by_accelerator(self.model)
        # An interrupted accumulation leaves this False, and prepared optimizers would not even clear gradients.
        self.accelerator.sync_gradients = True
        if self.optimizer is not None:
            # Device placement reloads the optimizer's state, which casts it to the dtype of the parameters.
            self.optimizer = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)
            self._prepared.append(self.optimizer)
        if self.lr_scheduler is not None:
            self._prepare_scheduler()

    def _init_scheduler(self) -> None:
        super()._init_scheduler()
        if isinstance(self.optimizer, AcceleratedOptimizer):
            # The schedule was rebuilt for a checkpoint with steps of another size.
            self._prepare_scheduler()

    def _prepare_scheduler(self) -> None:
        self.lr_scheduler = self.accelerator.prepare_scheduler(self.lr_scheduler)
        # Otherwise it steps once per process. It still skips a step that the optimizer skipped because of an overflow.
        self.lr_scheduler.split_batches = True
        self._prepared.append(self.lr_scheduler)

    def _prepare_by_accelerator(self, model: nn.Module) -> Any:
        accelerator = self.accelerator
        # Left by an earlier run. With it, the accelerator treats the model as already wrapped.
        vars(self.unwrapped_model()).pop("_is_accelerate_prepared", None)
        trains = self.optimizer is not None and any(one.requires_grad for one in model.parameters())
        # The trainer enters autocast around forward pass and loss. The accelerator would patch it into the user's model,
        # where it stays after training.
        uses_autocast, accelerator.native_amp = accelerator.native_amp, False
        try:
            # In evaluation mode there is no DDP, which raises for a model without trainable parameters.
            prepared = accelerator.prepare_model(model, evaluation_mode=not trains)
        finally:
            accelerator.native_amp = uses_autocast
        self._prepared.append(model)
        return prepared

    def _release_prepared(self) -> None:
        """Remove objects of an earlier run from the accelerator: it clips and unscales everything that it holds."""
        old = {id(one) for one in self._prepared}
        for objects in (self.accelerator._models, self.accelerator._optimizers, self.accelerator._schedulers):
            objects[:] = [one for one in objects if id(one) not in old]
        self._prepared = []

    # --- the step

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        with self._around_micro_batch():
            return super()._forward_backward_step(input_dict, labels)

    @contextlib.contextmanager
    def _around_micro_batch(self) -> Iterator[None]:
        reduces = self._should_sync_gradients()
        # The prepared optimizer reads this flag, and does nothing in the middle of an accumulation.
        self.accelerator.sync_gradients = reduces
        delayed = contextlib.nullcontext() if reduces else self.accelerator.no_sync(self.model)
        with delayed, self._replicas.forward(self.model):
            yield

    def _backward(self, loss: Tensor) -> None:
        accelerator = self.accelerator
        # The loss is already scaled to its share of the step. The accelerator would divide it again by its own steps.
        own_steps, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, 1
        try:
            accelerator.backward(loss)
        finally:
            accelerator.gradient_accumulation_steps = own_steps

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        assert self.optimization is not None
        if max_grad_norm and not self.optimization.is_narrow:
            # This also unscales the gradients, which may happen only once per step.
            norm: Tensor = self.accelerator.clip_grad_norm_(self.optimization.parameters, max_grad_norm, norm_type)
            return norm
        self.accelerator.unscale_gradients(self.optimizer)
        # The accelerator would compute the norm of bfloat16 gradients in bfloat16.
        return super()._clip_grad_norm(max_grad_norm, norm_type)

    # --- evaluation and state

    def _before_evaluation(self) -> None:
        # DDP broadcasts buffers before a forward pass. The last pass of training has changed them since.
        if getattr(self.model, "forward_sync_buffers", False):
            self._replicas.share_buffers()

    def _model_to_save(self) -> dict[str, Any]:
        return {**super()._model_to_save(), "mesh": self.mesh}

    def _before_save(self) -> None:
        super()._before_save()
        # A save compares the copies of all processes, so they must be equal.
        self._replicas.share_buffers()


class AcceleratorPrecision(AMPContext):
    """Mixed precision of the accelerator; its loss scale, if any, is part of the checkpoint."""

    def __init__(self, accelerator: Accelerator) -> None:
        # No precision for the base class: autocast and gradient scaler belong to the accelerator.
        super().__init__(None, accelerator.device.type)
        self._accelerator = accelerator
        self._mixed_precision = accelerator.mixed_precision
        self._scaler = accelerator.scaler
        if self._scaler is not None:
            self._known_scale = self._scaler.get_scale()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def unscale_(self, optimizer: OptimizerT) -> None:
        """Do nothing: the accelerator unscales when it clips."""

    def optimizer_step(self, optimizer: OptimizerT) -> None:
        # The prepared optimizer calls the gradient scaler itself.
        optimizer.step()
        # On other devices, reading the scale would wait for the device.
        if self._device_type == "cpu":
            self.log_scale_drop()
