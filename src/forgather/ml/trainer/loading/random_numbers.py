"""Random state of data loading: save, check and watch the global generators of Python, NumPy and torch on the CPU.

A resumed run must draw the same numbers at the same points as an uninterrupted run. The wrapped loaders save these
states; `SynchronizedDataLoader` and `DataloaderDispatcher` watch for draws before they read ahead.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.rng import RNGState, undisturbed_random_numbers
from forgather.ml.checkpoint.state.state_schema import Schema, Violation, anything

_GENERATORS = Schema(dict.fromkeys(("python", "numpy", "torch"), anything))


def host_generators() -> dict[str, Any]:
    """Return the states of the generators that datasets use, in the format of `RNGState`."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def generator_states(value: object) -> None:
    """Raise Violation unless the value has the form of `host_generators`."""
    # States from a checkpoint are untrusted: a wrong position makes a generator read outside of its state array.
    _GENERATORS(value)
    assert isinstance(value, Mapping), "the schema has checked it"
    try:
        RNGState().check_state_dict(_GENERATORS.known(value))
    except CheckpointLoadError as error:
        # The rest of the message is advice to skip the component "rng", which is not the component loaded here.
        reason = str(error).partition(". ")[0]
        raise Violation(f"the states of the generators of Python, NumPy and torch ({reason})", value) from None


def known_generators(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the states of the Python, NumPy and torch generators without any other entries."""
    return None if states is None else _GENERATORS.known(states)


@contextlib.contextmanager
def generators_apart(start: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Run the body with the random state `start`, if given, and restore the current random state afterwards."""
    # For work that only a resumed run does, such as reading batches again. It must not change the draws that follow.
    with undisturbed_random_numbers():
        if start is not None:
            RNGState().load_state_dict(start)
        yield


@contextlib.contextmanager
def draws_random_numbers() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns, after the block, whether the block drew from the global generators."""
    # Read-ahead moves the reading of a batch before the training step of the previous batch. If reading draws from the
    # global generators (random augmentation or masking in this process), it would take the numbers that the step draws
    # otherwise. A resumed run starts without a batch read ahead, so its draws would differ. Loaders therefore watch some
    # reads, and read ahead only while reading draws nothing. Workers have their own generators and are not affected.
    before = _fingerprint()
    found: list[bool] = []
    yield lambda: found[0]
    found.append(_fingerprint() != before)


def _fingerprint() -> tuple[Any, ...]:
    # Copies as bytes: arrays do not compare to a single bool.
    states = host_generators()
    numpy_state = states["numpy"]
    return states["python"], numpy_state[1].tobytes(), numpy_state[2:], states["torch"].numpy().tobytes()
