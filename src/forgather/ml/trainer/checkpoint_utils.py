"""Replica validation: compares state that ranks should hold alike."""

from forgather.ml.checkpoint.replicas import (
    Difference,
    Divergence,
    Tolerance,
    ValidationLevel,
    as_validation_level,
    compare_replicas,
    find_divergences,
    format_divergence,
    validate_replication,
)

__all__ = [
    "Difference",
    "Divergence",
    "Tolerance",
    "ValidationLevel",
    "as_validation_level",
    "compare_replicas",
    "find_divergences",
    "format_divergence",
    "validate_replication",
]
