"""Replica validation: compares state that must be identical on several ranks.

Facade of `forgather.ml.checkpoint.replicas`.
"""

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
