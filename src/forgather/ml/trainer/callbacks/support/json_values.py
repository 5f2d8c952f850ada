"""JSON values: conversion of the metrics of a log record."""

import math
from collections.abc import Mapping
from typing import Any


def to_json(value: object) -> Any:
    """Convert a value to JSON types: tensors and arrays to numbers or lists, NaN and infinities to None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value)
