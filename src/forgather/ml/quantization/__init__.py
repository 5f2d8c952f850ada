"""The names of recipes, without anything that takes time to import: help texts list them."""

QAT_RECIPES: tuple[str, ...] = (
    "int8-dynamic-act-int4-weight",
    "int4-weight-only",
    "float8-dynamic-act-float8-weight",
)
FP8_RECIPES: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
