"""Optimizers: several acting as one (`Multiopt`), and parameter groups by regular expressions (`opt_utils`)."""

from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.optim.opt_utils import (
    OptimGroupMap,
    build_optimizer_buckets,
    build_parameter_groups,
    make_grouped_optimizer,
)

__all__ = [
    "Multiopt",
    "OptimGroupMap",
    "build_optimizer_buckets",
    "build_parameter_groups",
    "make_grouped_optimizer",
]
