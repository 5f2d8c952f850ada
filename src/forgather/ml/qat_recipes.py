"""QAT recipes: public names of quantisation-aware training.

Facade of `forgather.ml.quantization.qat`.
"""

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
