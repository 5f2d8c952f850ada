"""Random seeds: one seed per job, and an independent random stream per rank.

All ranks build the model with the job's seed, so their initial weights are equal. After that each rank continues with
its own stream (`seed_of_rank`). `Trainer._prepare` calls these functions.
"""

import random

import numpy as np
import torch

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers

__all__ = ["choose_seed", "seed_everything", "seed_host_generators", "seed_of_rank", "undisturbed_random_numbers"]


def choose_seed(seed: int) -> int:
    """Return the seed, or a new random seed if it is negative."""
    # From the operating system: a global generator that the user has seeded would give the same seed each time.
    return seed if seed >= 0 else random.SystemRandom().getrandbits(31)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on CPU and accelerators."""
    seed_host_generators(seed)
    torch.manual_seed(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU only."""
    # DataLoader workers do not use accelerators, and torch.manual_seed would queue a call for each seed there.
    random.seed(seed)
    # NumPy accepts 32-bit seeds only.
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of a rank's random stream; rank 0 keeps the job's seed."""
    # SeedSequence hashes its input. Seeds such as `seed + rank` would repeat between jobs with neighbouring seeds.
    return seed if rank == 0 else int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint32)[0])
