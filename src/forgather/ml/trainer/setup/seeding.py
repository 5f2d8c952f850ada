"""Random numbers: one seed for the job, a stream of its own for every rank, the same initial model everywhere."""

import random

import numpy as np
import torch

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers

__all__ = ["choose_seed", "seed_everything", "seed_host_generators", "seed_of_rank", "undisturbed_random_numbers"]


def choose_seed(seed: int) -> int:
    """The seed itself, or for a negative one a new one."""
    return seed if seed >= 0 else random.SystemRandom().getrandbits(31)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on the CPU and on accelerators."""
    seed_host_generators(seed)
    torch.manual_seed(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU.

    Accelerators are left out: DataLoader workers do not use them, and torch would queue a call for each seed.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_of_rank(seed: int, rank: int) -> int:
    """Rank 0 goes on with the seed of the model; other ranks' streams are unrelated to it and to each other."""
    return seed if rank == 0 else int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint32)[0])
