"""The state of every random generator that training draws from."""

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forgather.ml.checkpoint.errors import CheckpointLoadError

logger = logging.getLogger(__name__)


class RNGState:
    """The generators of Python, NumPy and torch (CPU and every visible accelerator device) as one stateful component.

    `seed` is the training seed, from which a rank that the checkpoint does not know derives its own.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._loaded: dict[str, Any] | None = None

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded, so that `restore` can apply it again."""
        return self._loaded is not None

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "accelerator": _accelerator_states(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        missing = {"python", "numpy", "torch"} - state_dict.keys()
        if missing:
            raise CheckpointLoadError(
                f"the random state in the checkpoint lacks {sorted(missing)}; it was not written by RNGState. "
                'Start with fresh random numbers by listing "rng" in skip_checkpoint_components.'
            )
        self._loaded = _copied(state_dict)
        self.restore()

    def restore(self) -> None:
        """Applies the loaded state again, for after work that drew random numbers (building the data iterators)."""
        if self._loaded is None:
            raise RuntimeError("no random state was loaded, so there is none to restore; call load_state_dict first")
        version, internal, gauss_next = self._loaded["python"]
        # the standard library insists on tuples, which some containers do not keep
        random.setstate((version, tuple(internal), gauss_next))
        np.random.set_state(self._loaded["numpy"])
        torch.set_rng_state(self._loaded["torch"])
        _set_accelerator_states(self._loaded.get("accelerator"))

    def init_new_rank(self, rank: int, step: int) -> None:
        """Seeds all generators of a rank that has no state in the checkpoint, the same way in every run."""
        seed = _derived_seed(self._seed, rank, step)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # every accelerator device included
        self._loaded = _copied(self.state_dict())
        logger.info(
            "Rank %d has no random state in the checkpoint: its generators are seeded with %d, derived from seed %s, "
            "rank %d and step %d.",
            rank,
            seed,
            self._seed,
            rank,
            step,
        )


def _derived_seed(seed: int | None, rank: int, step: int) -> int:
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    # torch takes seeds of up to 64 bits, and keeps the sign bit
    return int.from_bytes(digest[:8], "little") >> 1


def _copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its tensors in memory of our own: theirs may be mapped to a file that rotation deletes."""
    copied = dict(state_dict)
    copied["torch"] = _cpu_copy(copied["torch"])
    accelerator = copied.get("accelerator")
    if accelerator is not None:
        copied["accelerator"] = {**accelerator, "states": [_cpu_copy(state) for state in accelerator["states"]]}
    return copied


def _cpu_copy(state: torch.Tensor) -> torch.Tensor:
    return state.detach().to("cpu", copy=True)


def _accelerator_states() -> dict[str, Any] | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    states = [module.get_rng_state(*_index(accelerator, n)) for n in range(torch.accelerator.device_count())]
    return {"type": accelerator.type, "states": states}


def _set_accelerator_states(stored: Mapping[str, Any] | None) -> None:
    if stored is None:
        return
    states = stored["states"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_same = accelerator is not None and accelerator.type == stored["type"]
    num_devices = torch.accelerator.device_count() if is_same else 0
    if num_devices < len(states):
        logger.warning(
            "The checkpoint holds the random states of %d %s device(s), but this process sees %d of them: those are "
            "restored, the others are lost, and random numbers drawn on a device may differ from the saved run's.",
            len(states),
            stored["type"],
            num_devices,
        )
    for number, state in enumerate(states[:num_devices]):
        assert accelerator is not None
        torch.get_device_module(accelerator).set_rng_state(state, *_index(accelerator, number))


def _index(accelerator: torch.device, number: int) -> tuple[int, ...]:
    # Apple's GPU is always alone, and its functions take no device
    return () if accelerator.type == "mps" else (number,)
