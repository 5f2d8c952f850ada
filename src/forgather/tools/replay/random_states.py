"""RankGenerators: the random numbers of several data-parallel ranks, replayed one after another on one device.

Each rank of a run draws from its own generators, such as for dropout. A replay on one device runs the micro-batches of
all ranks in turn, and switches to the generators of the rank that a micro-batch belonged to.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.rng import RNGState, undisturbed_random_numbers
from forgather.ml.trainer.setup.seeding import seed_everything, seed_of_rank


class RankGenerators:
    """Random states of the ranks of a run; rank 0 uses the generators of this process."""

    def __init__(self, states: Sequence[Mapping[str, Any]] = ()) -> None:
        """`states` are the states of all ranks in the checkpoint; with fewer than two, nothing is switched."""
        self._states: list[Mapping[str, Any]] = list(states) if len(states) > 1 else []

    @classmethod
    def seeded(cls, seed: int, num_ranks: int) -> "RankGenerators":
        """Return the states that the ranks of a run begin with."""
        states = []
        with undisturbed_random_numbers():
            for rank in range(num_ranks):
                seed_everything(seed_of_rank(seed, rank))
                states.append(RNGState().state_dict())
        return cls(states)

    @contextlib.contextmanager
    def of_micro_batch(self, number: int) -> Iterator[None]:
        """Use the generators of the rank of a micro-batch; ranks take turns."""
        rank = number % len(self._states) if self._states else 0
        if rank == 0:
            yield
            return
        generators = RNGState()
        own = generators.state_dict()
        generators.load_state_dict(self._states[rank])
        try:
            yield
        finally:
            self._states[rank] = generators.state_dict()
            generators.load_state_dict(own)


def torch_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators for the CPU and a device, to see whether a computation draws from them."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
