"""Quantisation: float8 training, quantisation-aware training (QAT), and quantised models on disk, all by torchao.

This file holds the names of the recipes only and imports nothing, so that help texts can list them quickly.
"""

QAT_RECIPES: tuple[str, ...] = (
    "int8-dynamic-act-int4-weight",
    "int4-weight-only",
    "float8-dynamic-act-float8-weight",
)
FP8_RECIPES: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
