"""Sampling of long parametrisations: `make test` runs a sample of the cases, `make test-all` runs every case."""

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

RUNS_ALL = os.environ.get("EVERY_CASE") == "1"
long_search = pytest.mark.skipif(not RUNS_ALL, reason="a long search; make test-all runs it")


def sampled_keys(cases: Mapping[K, V], *sample: K) -> dict[K, V]:
    """Return the cases with these keys, or all cases with EVERY_CASE=1."""
    return {key: cases[key] for key in sampled(cases, sample)}


def sampled(cases: Iterable[T], sample: Iterable[T]) -> list[T]:
    """Return the sample, or all cases with EVERY_CASE=1; raise ValueError for a sample that is not among the cases."""
    cases, sample = list(cases), list(sample)
    unknown = [case for case in sample if case not in cases]
    if unknown or not sample:
        raise ValueError(f"the sample must contain some of the cases; unknown: {unknown}")
    return cases if RUNS_ALL else sample
