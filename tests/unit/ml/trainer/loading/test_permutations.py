"""The keyed permutation is a bijection for every number of samples, looks random, and takes no memory."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from forgather.ml.trainer.loading.permutations import KeyedPermutation
from tests.support.drawn_order import drawn_order

LARGE = [10**6 + 3, 10**9, 2**32 - 1, 2**32, 2**40 - 1, 2**40, 2**40 + 1, 2**62]
# Nothing here is random: a seed that passes once passes forever. Five deviations are a wrong distribution, not bad luck.
MAX_DEVIATION = 5.0


def permuted(num_samples: int, *key: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
    positions = np.arange(start, num_samples if stop is None else stop, dtype=np.uint64)
    return KeyedPermutation(num_samples, *key)(positions).astype(np.int64)


def deviation(counts: NDArray[np.int64], num_bins: int) -> float:
    """Return chi-squared of counts that should be equal, in standard deviations from its mean."""
    mean = counts.sum() / num_bins
    excess = float(((counts - mean) ** 2 / mean).sum()) - (num_bins - 1)
    return excess / math.sqrt(2 * (num_bins - 1))


def in_bins(values: NDArray[np.int64], num_values: int, num_bins: int) -> NDArray[np.int64]:
    return (values / num_values * num_bins).astype(np.int64)


def test_every_number_of_samples_gets_a_permutation() -> None:
    for num_samples in [*range(300), *range(300, 2001, 13), 2**16 - 1, 2**16, 2**16 + 1, 300_007]:
        found = np.sort(permuted(num_samples, 3, num_samples))
        assert np.array_equal(found, np.arange(num_samples)), num_samples


@pytest.mark.parametrize("num_samples", LARGE)
def test_large_numbers_of_samples_have_distinct_indices_in_range(num_samples: int) -> None:
    ends = [permuted(num_samples, 3, start=start, stop=start + 100_000) for start in (0, num_samples - 100_000)]
    found = np.concatenate(ends)
    assert len(np.unique(found)) == len(found) == 200_000 and found.min() >= 0 and found.max() < num_samples


def test_values_are_fixed_by_the_checkpoint_format() -> None:
    assert permuted(10, 7, 3).tolist() == [2, 5, 0, 9, 3, 7, 8, 6, 4, 1]
    assert permuted(10**9, 7, 3, stop=4).tolist() == [667480227, 531703521, 95607273, 498962331]
    assert permuted(2**40, -1, 0, stop=3).tolist() == [285701414137, 757366342779, 610557594894]


def test_a_position_does_not_depend_on_the_other_positions() -> None:
    permutation = KeyedPermutation(1000, 1, 2)
    whole = permutation(np.arange(1000, dtype=np.uint64))
    some = np.array([999, 3, 3, 500], dtype=np.uint64)
    assert np.array_equal(permutation(some), whole[[999, 3, 3, 500]])
    assert np.array_equal(some, [999, 3, 3, 500]), "the positions are the caller's"


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    tracemalloc.start()
    permuted(2**40, 1, stop=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_permutations_of_few_samples_are_equally_likely(num_samples: int) -> None:
    all_of_them = list(itertools.permutations(range(num_samples)))
    times = Counter(tuple(permuted(num_samples, 5, epoch).tolist()) for epoch in range(10 * len(all_of_them)))
    counts = np.array([times[one] for one in all_of_them])
    assert abs(deviation(counts, len(all_of_them))) < MAX_DEVIATION


def is_odd(permutation: NDArray[np.int64]) -> bool:
    earlier, later = np.triu_indices(len(permutation), 1)
    return int((permutation[earlier] > permutation[later]).sum()) % 2 == 1


def test_odd_permutations_are_as_likely_as_even_ones() -> None:
    # Nine samples fill a square table with odd sides, which would have even permutations only.
    num_odd = sum(is_odd(permuted(9, 5, epoch)) for epoch in range(400))
    assert abs(num_odd - 200) < MAX_DEVIATION * math.sqrt(400 / 4)


@pytest.mark.parametrize("num_samples", [10, 49, 100])
def test_epochs_of_few_samples_look_random(num_samples: int) -> None:
    epochs = np.stack([permuted(num_samples, 3, epoch) for epoch in range(600)])
    by_position = epochs + num_samples * np.arange(num_samples)
    counts = np.bincount(by_position.ravel(), minlength=num_samples**2)
    assert abs(deviation(counts, num_samples**2)) < MAX_DEVIATION, "every sample at every position"
    differences = np.diff(epochs) % num_samples
    counts = np.bincount(differences.ravel(), minlength=num_samples)[1:]
    assert abs(deviation(counts, num_samples - 1)) < MAX_DEVIATION, "no neighbours stay together"
    # A random permutation has one fixed point on average, with variance 1. Likewise, two epochs have on average one
    # sample at the same position.
    for repeated in (epochs == np.arange(num_samples), epochs[1:] == epochs[:-1]):
        per_epoch = repeated.sum(axis=1)
        assert abs(per_epoch.mean() - 1) < MAX_DEVIATION / math.sqrt(len(per_epoch))


@pytest.mark.parametrize("num_samples", LARGE)
def test_epochs_of_many_samples_look_random(num_samples: int) -> None:
    num_read = 200_000 if num_samples > 10**7 else num_samples
    epoch, following = (permuted(num_samples, 8, number, stop=num_read) for number in (0, 1))
    other_seed = permuted(num_samples, 9, 0, stop=num_read)
    bins, bins_of_following = (in_bins(values, num_samples, 50) for values in (epoch, following))
    pairs = {
        "neighbours": 50 * bins[1:] + bins[:-1],
        "epochs": 50 * bins + bins_of_following,
        "seeds": 50 * bins + in_bins(other_seed, num_samples, 50),
    }
    for name, values in pairs.items():
        assert abs(deviation(np.bincount(values, minlength=2500), 2500)) < MAX_DEVIATION, name
    assert abs(deviation(np.bincount(np.diff(epoch) % 997, minlength=997), 997)) < MAX_DEVIATION, "differences"
    for other in (following, other_seed, np.roll(epoch, 1), np.arange(num_read)):
        assert abs(np.corrcoef(epoch, other)[0, 1]) < MAX_DEVIATION / math.sqrt(num_read)
    assert (epoch == following).sum() < 10 and (epoch == np.arange(num_read)).sum() < 10


def test_order_of_older_runs_differs() -> None:
    assert permuted(100, 7, 3).tolist() != drawn_order(100, 7, 3)
