"""Training with a Hugging Face `Accelerator`, for one process or for replicas that average their gradients (DDP)."""

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgather.ml.distributed import (
    DistributedEnvInterface,
    StaticDistributedEnvironment,
    get_local_world_size,
    get_world_size,
)
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.data_parallel import DataParallelTrainer
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.step_loss.fused import fused_loss_refusal
from forgather.ml.trainer.step_loss.model_loss import Window
from forgather.ml.trainer.trainer_types import OptimizerT

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "AccelTrainer needs the package accelerate, which is not installed: pip install accelerate."
    ) from missing

__all__ = ["AccelTrainer", "AccelTrainingArguments"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """The arguments of `Trainer`; what else there is to choose, the `Accelerator` was made with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with Accelerate: the accelerator reduces, scales and clips "
                "whole sets of gradients before an update. Turn it off, or train with the trainer for one device."
            )


class AccelTrainer(DataParallelTrainer):
    """Every process has the whole model, which the accelerator has prepared; it also steps, clips and reduces.

    Rank, number of processes, device and precision are the accelerator's; accumulation is that of the arguments. Loaders
    are not wrapped by it: to make them even it repeats samples, and it reads a batch ahead of the position that a
    checkpoint would hold. Each process reads its part of the same global order that one device would read instead, so
    that no sample is repeated or lost, and positions are exact. So options such as `even_batches` have no effect.
    """

    arguments_class = AccelTrainingArguments
    _compared_components = ("model", "ema")
    _remedy_for_equal_batches = "A map-style dataset is split by the trainer."

    @explains_calls
    def __init__(self, *, args: Any, accelerator: Accelerator, **trainer_kwargs: Any) -> None:
        _require_usable(accelerator)
        self.accelerator = accelerator
        self._prepared = [trainer_kwargs.get("optimizer"), trainer_kwargs.get("lr_scheduler")]
        trainer_kwargs["distributed_env"] = _environment(accelerator, trainer_kwargs.get("distributed_env"))
        super().__init__(args=args, **_taken_apart(accelerator, trainer_kwargs))
        self._check_against_arguments()
        self._initial_loss_scale = None if accelerator.scaler is None else accelerator.scaler.state_dict()

    def _check_against_arguments(self) -> None:
        accelerator, args = self.accelerator, self.args
        device = accelerator.device
        contradictions = {
            "mixed_precision": args.mixed_precision not in (None, accelerator.mixed_precision),
            "use_cpu": args.use_cpu and device.type != "cpu",
            "device": args.device is not None and str(args.device) not in (str(device), device.type),
        }
        for name, is_contradicted in contradictions.items():
            if is_contradicted:
                raise ValueError(
                    f"{name}={getattr(args, name)!r} is not what the accelerator was made with: it decides, and it has "
                    f"mixed_precision={accelerator.mixed_precision!r} on device {device}. Leave {name} out of the arguments, "
                    "or make the Accelerator with the same choice (mixed_precision=..., cpu=True)."
                )
        args.mixed_precision = accelerator.mixed_precision
        if self._fused_loss_factory is not None and getattr(accelerator.ddp_handler, "find_unused_parameters", False):
            raise fused_loss_refusal("DistributedDataParallelKwargs(find_unused_parameters=True)")

    # --- preparation

    def _dispatches(self, for_training: bool) -> bool:
        return False

    def _device_type(self) -> str:
        return str(self.accelerator.device.type)

    def _init_device(self) -> None:
        self.device = self.accelerator.device

    def _init_precision(self) -> None:
        super()._init_precision()
        if self._initial_loss_scale is not None:
            # The accelerator outlives a run, whose scale is not to reach into the next.
            self.accelerator.scaler.load_state_dict(self._initial_loss_scale)
        self.amp = _AcceleratorPrecision(self.accelerator)

    def _wrap(self) -> None:
        super()._wrap()
        self._release_prepared()
        self._forward_model = self._prepare_forward_model()
        # An interrupted accumulation would have left it False, and optimizers would not even clear gradients.
        self.accelerator.sync_gradients = True
        if self.optimizer is not None:
            # Without placement, which reloads the state and thereby casts it to the dtype of the parameters.
            self.optimizer = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)
            self._prepared.append(self.optimizer)
        if self.lr_scheduler is not None:
            self._prepare_scheduler()

    def _init_scheduler(self) -> None:
        super()._init_scheduler()
        if isinstance(self.optimizer, AcceleratedOptimizer):
            # A schedule that is made anew, for a checkpoint whose steps had another size.
            self._prepare_scheduler()

    def _prepare_scheduler(self) -> None:
        self.lr_scheduler = self.accelerator.prepare_scheduler(self.lr_scheduler)
        # Else it steps once for each process. It still waits when an overflow made the optimizer leave out a step.
        self.lr_scheduler.split_batches = True
        self._prepared.append(self.lr_scheduler)

    def _prepare_forward_model(self) -> Any:
        accelerator, model = self.accelerator, self.unwrapped_model()
        # A mark of an earlier run, by which the accelerator takes it for wrapped.
        vars(model).pop("_is_accelerate_prepared", None)
        trains = self.optimizer is not None and any(parameter.requires_grad for parameter in model.parameters())
        # Autocast is entered around forward pass and loss. In the user's model it would stay when training is over.
        uses_autocast, accelerator.native_amp = accelerator.native_amp, False
        try:
            prepared = accelerator.prepare_model(self._forward_model, evaluation_mode=not trains)
        finally:
            accelerator.native_amp = uses_autocast
        self._prepared.append(self._forward_model)
        return prepared

    def _release_prepared(self) -> None:
        """Let the accelerator let go of what it has for an earlier run: it clips and unscales all that it has."""
        old = {id(one) for one in self._prepared}
        for objects in (self.accelerator._models, self.accelerator._optimizers, self.accelerator._schedulers):
            objects[:] = [one for one in objects if id(one) not in old]
        self._prepared = []

    # --- the step

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        is_last = number + 1 == len(window.batches)
        # What the prepared optimizer goes by: it does nothing in the middle of an accumulation.
        self.accelerator.sync_gradients = is_last
        reducing = contextlib.nullcontext() if is_last else self.accelerator.no_sync(self._forward_model)
        with reducing:
            return super()._forward_backward_step(window, number)

    def _should_sync_gradients(self) -> bool:
        return bool(self.accelerator.sync_gradients)

    def _run_backward(self, loss: Tensor) -> None:
        accelerator = self.accelerator
        # The loss has its share of the step already; the accelerator would divide it by its own number of steps again.
        own_steps, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, 1
        try:
            accelerator.backward(loss)
        finally:
            accelerator.gradient_accumulation_steps = own_steps

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        if max_grad_norm:
            # Takes the loss scale out of the gradients too, which may happen only once.
            norm: Tensor = self.accelerator.clip_grad_norm_(self._parameters, max_grad_norm, norm_type)
            return norm
        self.accelerator.unscale_gradients(self.optimizer)
        return super()._clip_grad_norm(None, norm_type)

    def _distributed_sums(self, sums: Tensor) -> Tensor:
        return self._reduced(sums)

    def _distributed_loss(self, losses: Tensor) -> Tensor:
        return self._reduced(losses)

    def _distributed_tokens(self, tokens: Tensor) -> Tensor:
        return self._reduced(tokens)

    def _reduced(self, numbers: Tensor) -> Tensor:
        if not self._is_parallel:
            return numbers
        with self._contact("adding up numbers of all ranks"):
            sums: Tensor = self.accelerator.reduce(numbers.to(self.device), "sum")
        return sums.cpu()


class _AcceleratorPrecision(AMPContext):
    """Mixed precision as the accelerator does it; its loss scale, if it has one, is part of the checkpoint."""

    def __init__(self, accelerator: Accelerator) -> None:
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
        """Nothing: the accelerator unscales when it clips."""

    def optimizer_step(self, optimizer: OptimizerT) -> None:
        # The prepared optimizer steps through the scaler by itself.
        optimizer.step()
        if self._device_type == "cpu":
            self.log_scale_drop()


def _require_usable(accelerator: Accelerator) -> None:
    """Refuse what is no accelerator, and those that do not leave each process a whole model."""
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator must be an accelerate.Accelerator, but is {accelerator!r}: pass accelerator=Accelerator()."
        )
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"AccelTrainer cannot use an accelerator that was set up for {kind}: it trains, counts and checkpoints whole "
            f"copies of the model, in one process or with DDP, and {kind} handles model and gradients in its own way. Make "
            "the Accelerator without that plugin, and leave it out of the configuration of `accelerate launch` (its "
            "variables ACCELERATE_USE_...)."
        )
    sizes = accelerator.parallelism_config
    if sizes is not None and sizes.total_size != sizes.dp_replicate_size:
        raise ValueError(
            f"AccelTrainer cannot use the accelerator's {sizes}: every process must have the whole model. Leave "
            "parallelism_config out."
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "AccelTrainer cannot use an accelerator with mixed_precision='fp8', which replaces layers of the model, so that "
            "its checkpoints would fit no other trainer. Use 'bf16', 'fp16' or 'no'."
        )
    if accelerator.mixed_precision != "no" and not accelerator.native_amp:
        logger.warning(
            "The accelerator has mixed_precision=%r, but does nothing for it on %s: training is in full precision.",
            accelerator.mixed_precision,
            accelerator.device,
        )


def _environment(accelerator: Accelerator, given: DistributedEnvInterface | None) -> DistributedEnvInterface:
    """The accelerator's place in the job, or the given one if it is the same place."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if given is not None:
        if (given.rank, given.world_size) != (rank, world_size):
            raise ValueError(
                f"distributed_env says rank {given.rank} of {given.world_size}, but the accelerator rank {rank} of "
                f"{world_size}. Leave distributed_env out: the accelerator knows."
            )
        return given
    if world_size == 1 < get_world_size():
        raise ValueError(
            f"This process is one of {get_world_size()} (WORLD_SIZE), but the accelerator was set up for one: each would "
            "train alone and write to the same output directory. Where there is no GPU, make it with Accelerator(cpu=True)."
        )
    return StaticDistributedEnvironment(
        rank=rank,
        local_rank=accelerator.local_process_index,
        world_size=world_size,
        local_world_size=get_local_world_size() if world_size > 1 else 1,
        device=str(accelerator.device),
        device_type=accelerator.device.type,
    )


def _taken_apart(accelerator: Accelerator, trainer_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the user has prepared already is prepared by the trainer: its state is that of the objects inside."""
    plain = dict(trainer_kwargs)
    if plain.get("model") is not None:
        plain["model"] = accelerator.unwrap_model(plain["model"])
    if isinstance(plain.get("optimizer"), AcceleratedOptimizer):
        plain["optimizer"] = plain["optimizer"].optimizer
    if isinstance(plain.get("lr_scheduler"), AcceleratedScheduler):
        plain["lr_scheduler"] = plain["lr_scheduler"].scheduler
    return plain
