"""Recipes for precision and memory: FP8, QAT, bfloat16 weights, activation offloading, step in backward, EMA.

`Recipes` is created by the trainer. Related settings are elsewhere: mixed precision in `amp`, compilation and gradient
checkpointing in `Trainer`, settings of torch in `setup.torch_settings`, fused losses in `step_loss.fused`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from forgather.ml.optim.step_in_backward import StepInBackward
from forgather.ml.trainer.arguments.checks import refuse_short_weights
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.recipes.activation_offloading import OffloadedActivations
from forgather.ml.trainer.recipes.layers import apply_layer_recipe
from forgather.ml.trainer.recipes.param_precision import with_param_precision, with_precise_updates
from forgather.ml.trainer.recipes.precise_optimizer import PreciseOptimizer
from forgather.ml.trainer.recipes.weight_average import WeightAverage
from forgather.ml.trainer.trainer_types import OptimizerT

logger = logging.getLogger(__name__)

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class Recipes:
    """Recipes that the arguments enable, and their state."""

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self._with_layers: nn.Module | None = None
        self.offloads = False
        """Whether activations are offloaded to CPU memory."""
        self.average: WeightAverage | None = None
        """EMA of the weights, if `ema_decay` is set."""
        self.step_in_backward: StepInBackward | None = None
        self.num_updates = 0
        """Number of EMA updates."""

    def use_device(self, device: torch.device) -> None:
        self.offloads = self._args.enable_activation_offloading and device.type != "cpu"
        if self._args.enable_activation_offloading and not self.offloads:
            logger.warning("enable_activation_offloading=True has no effect: activations are on the CPU already.")

    def apply_layers(self, model: nn.Module) -> None:
        """Replace linear layers for `fp8_recipe` or `qat_recipe`, once per model, and convert parameters to bfloat16.

        Parameter objects and their names stay.
        """
        if self._with_layers is not model:
            self._with_layers = model
            apply_layer_recipe(model, self._args)
        with_param_precision(model, self._args.param_precision)

    def precise(self, optimizer: OptimizerT, named: Sequence[tuple[str, nn.Parameter]], seed: int) -> OptimizerT:
        """Return the optimizer with the updates of `param_precision`."""
        return with_precise_updates(optimizer, self._args.param_precision, named, seed)

    def activations(self, model: Callable[[], nn.Module]) -> AbstractContextManager[object]:
        """Return the context for forward passes of the model in training; it offloads activations if enabled."""
        # The loss stays outside of it: backward needs the activations of the loss first, so copies would not pay off.
        return OffloadedActivations(model().parameters()) if self.offloads else _NO_CONTEXT

    def attach(
        self, optimizer: OptimizerT, named: Sequence[tuple[str, nn.Parameter]]
    ) -> Callable[[float], Tensor] | None:
        """Set up recipes for a new optimizer; return a function for the gradient norm if a recipe computes the norm."""
        # GradScaler cannot unscale fp16 gradients, so fp16 weights are rejected.
        if self._args.mixed_precision == "fp16":
            for name, parameter in named:
                if parameter.requires_grad:
                    refuse_short_weights(parameter.dtype, name)
        self.step_in_backward = StepInBackward(optimizer) if self._args.fuse_optim_with_backward else None
        decay = self._args.ema_decay
        precise = optimizer.precise if isinstance(optimizer, PreciseOptimizer) else None
        self.average = None if decay is None else WeightAverage(named, decay, precise)
        return self.step_in_backward

    # --- the average

    def begin_average(self) -> None:
        if self.average is not None:
            self.average.begin()

    def forget_average(self) -> None:
        if self.average is not None:
            self.average.forget()

    def update_average(self) -> None:
        """Update the EMA with the weights of a step."""
        # `StepRunner` compares this count to find out whether `_train_step` has called this method. An override may not.
        self.num_updates += 1
        if self.average is not None:
            self.average.update()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights in this context; all ranks enter it together."""
        decay = self._args.ema_decay
        if self.average is None or not self.average.is_begun:
            reason = "has not trained yet, nor loaded a checkpoint" if decay is not None else "keeps none"
            raise ValueError(
                f"The averaged weights were requested, but this trainer {reason} (ema_decay={decay}). Set ema_decay, such as "
                "0.999, and call train() or load_checkpoint() first."
            )
        with self.average.in_model():
            yield

    def refuse_averages_in_model(self, problem: str) -> None:
        if self.average is not None and self.average.is_in_model:
            raise ValueError(problem)
