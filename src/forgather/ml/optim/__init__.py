"""Optimizers: several optimizers acting as one (`Multiopt`), and parameter groups by regular expression (`opt_utils`).

`step_in_backward` and `gradient_trace` are used by the trainers only.
"""

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
