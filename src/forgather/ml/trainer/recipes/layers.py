"""Recipes that replace linear layers: FP8 training and QAT (quantisation-aware training).

`Recipes.apply_layers` calls it once per model, before the optimizer is created.
"""

import logging

from torch import nn

from forgather.ml.quantization.float8 import convert_to_fp8
from forgather.ml.quantization.layer_report import output_head
from forgather.ml.quantization.qat import prepare_qat, prepared_for
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


def apply_layer_recipe(model: nn.Module, args: TrainingArguments) -> None:
    """Replace linear layers as set by `fp8_recipe` and `qat_recipe`; the output head is not replaced."""
    # A fused loss uses the weight of the head directly, and the input embedding may be tied to it.
    keep = output_head(model)
    if args.fp8_recipe is not None:
        convert_to_fp8(model, args.fp8_recipe, args.fp8_dim_alignment, keep)
    if args.qat_recipe is not None:
        prepare_qat(model, args.qat_recipe, keep)
    elif (recipe := prepared_for(model)) is not None:
        logger.warning(
            "The model trains with fake quantisation for %r, because an earlier trainer has replaced its layers, although "
            "qat_recipe is None now. Build the model again to train it without quantisation.",
            recipe,
        )
