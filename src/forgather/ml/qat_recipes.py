"""QAT recipes: quantisation-aware training by name."""

from forgather.ml.quantization.qat import (
    StraightThrough,
    convert_qat,
    prepare_qat,
    prepared_for,
    recipe_to_base_config,
    require_qat,
)

__all__ = [
    "StraightThrough",
    "convert_qat",
    "prepare_qat",
    "prepared_for",
    "recipe_to_base_config",
    "require_qat",
]
