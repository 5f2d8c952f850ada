"""Sampling of long parametrisations: `make test` runs a sample of the cases, `make test-all` runs every case."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

RUNS_ALL = os.environ.get("EVERY_CASE") == "1"


def sampled(cases: Iterable[T], sample: Iterable[T]) -> list[T]:
    """Return the sample, or all cases with EVERY_CASE=1; raise ValueError for a sample that is not among the cases."""
    cases, sample = list(cases), list(sample)
    unknown = [case for case in sample if case not in cases]
    if unknown or not sample:
        raise ValueError(f"the sample must contain some of the cases; unknown: {unknown}")
    return cases if RUNS_ALL else sample
