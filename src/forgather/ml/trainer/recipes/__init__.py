"""The recipes that change a trainer from inside: layers, activations, the optimizer's step, averages of the weights.

Those that need no more than an argument of something else are where that is made: mixed precision, compilation and gradient
checkpointing in the preparation, torch's own settings in `torch_settings`, fused losses in `fused_loss`.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.optim.step_in_backward import StepInBackward, refuse_several_optimizers
from forgather.ml.quantization.float8 import require_fp8
from forgather.ml.quantization.qat import require_qat
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.arguments.training_arguments import refuse_short_weights
from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.recipes.activation_offloading import OffloadedActivations
from forgather.ml.trainer.recipes.layers import apply_layer_recipe
from forgather.ml.trainer.recipes.weight_average import WeightAverage
from forgather.ml.trainer.setup.torch_settings import cuda_graphs_problem

logger = logging.getLogger(__name__)

_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


class RecipeTrainer(BaseTrainer):
    """Refuses recipes that cannot work here, and applies the others."""

    device: torch.device
    amp: AMPContext
    optimizer: Any
    _gradient_norm: Callable[[float], Tensor]
    _given_optimizer: Any
    _optimizer_groups: Any
    _fused_loss_factory: Any
    _step_in_backward: StepInBackward | None = None
    _average: WeightAverage | None = None
    _is_pipeline_parallel: Callable[[], bool]
    _has_layer_recipe: Any = None
    """The model whose layers were replaced."""

    def _refuse_recipes(self) -> None:
        """Refuse what cannot work with what the trainer was given, or on the device that it will use."""
        if getattr(self.args, "async_save", False):
            raise ValueError("async_save=True is not available in this version of forgather: leave it False.")
        if self._fused_loss_factory is not None and self.compute_loss_func is not None:
            raise ValueError(
                "fused_loss_factory makes the loss function, and compute_loss_func is one: they exclude each other. Leave one "
                "of the two out."
            )
        if self.args.fuse_optim_with_backward:
            refuse_several_optimizers(self._given_optimizer, self._optimizer_groups)
        if self.args.fp8_recipe is not None:
            require_fp8(self.args.fp8_recipe, self._device_type())
        if self.args.qat_recipe is not None:
            require_qat(self.args.qat_recipe, self._device_type())
        if self.args.torch_compile:
            self._refuse_cuda_graphs()

    def _refuse_cuda_graphs(self) -> None:
        mode, num_batches = self.args.torch_compile_mode, self.args.gradient_accumulation_steps
        problem = cuda_graphs_problem(mode, self._device_type(), num_batches, self._is_pipeline_parallel())
        if problem is not None:
            raise ValueError(
                f"torch_compile_mode={mode!r} replays CUDA graphs, which cannot be used here: {problem}. Use "
                "torch_compile_mode='default' or 'max-autotune-no-cudagraphs'."
            )

    def _device_type(self) -> str:
        """The kind of device that `_init_device` will choose."""
        if self.args.use_cpu:
            return "cpu"
        if self.args.device is not None:
            return torch.device(self.args.device).type
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"

    def _apply_layer_recipe(self) -> None:
        """Replace linear layers for fp8_recipe or qat_recipe, once; parameters stay the same, under the same names."""
        if self._has_layer_recipe is not self.model:
            self._has_layer_recipe = self.model
            assert self.model is not None
            apply_layer_recipe(self.model, self.args)

    def _activation_context(self) -> AbstractContextManager[Any]:
        """What the model's forward passes in training run in, but not the loss: its gradients are needed at once."""
        if self._offloads_activations:
            return OffloadedActivations(self.unwrapped_model().parameters())
        return _NO_CONTEXT

    @property
    def _offloads_activations(self) -> bool:
        return bool(self.args.enable_activation_offloading) and self.device.type != "cpu"

    def _refuse_averages_in_model(self) -> None:
        if self._average is not None and self._average.is_in_model:
            raise ValueError("Training cannot begin inside averaged_weights(): leave the context first.")

    def _say_what_has_no_effect(self) -> None:
        if self.args.enable_activation_offloading and not self._offloads_activations:
            logger.warning("enable_activation_offloading=True has no effect: activations are on the CPU already.")

    def _init_optimizer_recipes(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """What goes with the optimizer that was made just now, of these parameters."""
        if self.args.mixed_precision == "fp16":
            for name, parameter in named:
                if parameter.requires_grad:
                    refuse_short_weights(parameter.dtype, name)
        self._step_in_backward = StepInBackward(self.optimizer) if self.args.fuse_optim_with_backward else None
        if self._step_in_backward is not None:
            self._gradient_norm = self._step_in_backward
        self._average = None if self.args.ema_decay is None else WeightAverage(named, self.args.ema_decay)
