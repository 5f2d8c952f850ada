"""Random numbers of data loading: states of the generators of Python, NumPy and torch on the CPU."""

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
    """The state of the generators that data is drawn with, in the form of `RNGState`."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def generator_states(value: object) -> None:
    """Checks states that `host_generators` gave; a wrong one would let a generator read outside of its words."""
    _GENERATORS(value)
    assert isinstance(value, Mapping), "the schema has checked it"
    try:
        RNGState().check_state_dict(_GENERATORS.known(value))
    except CheckpointLoadError as error:
        # What follows tells how to do without the component "rng", which is another one.
        reason = str(error).partition(". ")[0]
        raise Violation(f"the states of the generators of Python, NumPy and torch ({reason})", value) from None


def known_generators(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The states of those generators that data is drawn with, and of no others."""
    return None if states is None else _GENERATORS.known(states)


@contextlib.contextmanager
def generators_apart(start: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Work that only a resumed run does: it draws from `start`, if given, and leaves the generators as they were."""
    with undisturbed_random_numbers():
        if start is not None:
            RNGState().load_state_dict(start)
        yield


@contextlib.contextmanager
def draws_random_numbers() -> Iterator[Callable[[], bool]]:
    """Watches the generators; what it gives tells, once the block is over, whether anything was drawn in it."""
    before = _fingerprint()
    found: list[bool] = []
    yield lambda: found[0]
    found.append(_fingerprint() != before)


def _fingerprint() -> tuple[Any, ...]:
    states = host_generators()
    numpy_state = states["numpy"]
    return states["python"], numpy_state[1].tobytes(), numpy_state[2:], states["torch"].numpy().tobytes()
