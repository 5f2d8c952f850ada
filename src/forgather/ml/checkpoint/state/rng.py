"""RNG state of Python, NumPy and torch (CPU and this process's accelerator) as a checkpoint component.

A resumed run draws the same random numbers as an uninterrupted one. Trainers declare `RNGState` as the component "rng".
`undisturbed_random_numbers` isolates evaluations and saves from training.
"""

import contextlib
import hashlib
import logging
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.device_rng import (
    check_device_state,
    check_generator_bytes,
    copied_device_state,
    cpu_copy,
    device_state,
    set_device_state,
)
from forgather.ml.checkpoint.state.tensor_checks import (
    Where,
    check_mapping,
    check_tensor,
    described,
    is_number,
    one_number,
    whole_number,
)

logger = logging.getLogger(__name__)

_RNG = Where("the random state in the checkpoint", "rng")
_WORDS = 624
"""Number of state words of the Mersenne Twister, the generator of Python, NumPy and the CPU generator of torch."""

_TORCH_HEADER = struct.Struct("@QiiQ")
"""Header of a CPU generator state of torch: seed, words left before regeneration, seeded flag, index of next word."""


class RNGState:
    """Random generators of Python, NumPy and torch (CPU and this process's own device) as one stateful component.

    `seed` is the training seed. A rank without a state in the checkpoint derives its own seed from it.
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
            "accelerator": device_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._loaded = _copied(state_dict)
        self.restore()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless every generator accepts its state; no generator is changed.

        NumPy accepts any position in its words, and torch some invalid positions. Both would read out of bounds.
        """
        missing = {"python", "numpy", "torch"} - check_mapping(state_dict, _RNG).keys()
        if missing:
            raise CheckpointLoadError(
                f"the random state in the checkpoint lacks {sorted(missing)}; it was not written by RNGState. "
                'Add "rng" to skip_checkpoint_components to start with a fresh random state.'
            )
        check_python_state(state_dict["python"], _RNG.at("python"))
        _check_numpy(state_dict["numpy"], _RNG.at("numpy"))
        check_torch_state(state_dict["torch"], _RNG.at("torch"))
        check_device_state(state_dict.get("accelerator"), _RNG.at("accelerator"))

    def restore(self) -> None:
        """Apply the loaded state again, after work that drew random numbers (building the data iterators)."""
        if self._loaded is None:
            raise RuntimeError("no random state was loaded; call load_state_dict before restore")
        random.setstate(self._loaded["python"])
        np.random.set_state(self._loaded["numpy"])
        torch.set_rng_state(self._loaded["torch"])
        set_device_state(self._loaded.get("accelerator"))

    def init_new_rank(self, rank: int, step: int) -> None:
        """Seed all generators of a rank that has no state in the checkpoint, in the same way in every run."""
        seed = _derived_seed(self._seed, rank, step)
        random.seed(seed)
        # NumPy accepts seeds of up to 32 bits.
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # Seeds every accelerator device too.
        # `restore` must work for a new rank as well.
        self._loaded = _copied(self.state_dict())
        logger.info(
            "Rank %d has no random state in the checkpoint. Its generators are seeded with %d, derived from seed %s, "
            "rank %d and step %d.",
            rank,
            seed,
            self._seed,
            rank,
            step,
        )


@contextlib.contextmanager
def undisturbed_random_numbers() -> Iterator[None]:
    """Restore the RNG state after the body, so that an evaluation or a save does not change training."""
    state = RNGState()
    before = state.state_dict()
    try:
        yield
    finally:
        state.load_state_dict(before)


def _derived_seed(seed: int | None, rank: int, step: int) -> int:
    # A digest instead of a sum, because different ranks and steps could have equal sums.
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    # 63 bits, so that the seed fits a signed 64-bit integer of torch.
    return int.from_bytes(digest[:8], "little") >> 1


def check_python_state(state: object, where: Where) -> None:
    """Raise `CheckpointLoadError` for a state that `random.setstate` cannot use or would process for too long."""
    version, internal, gauss_next = _fields(state, 3, where)
    whole_number(version, where.at("version"), least=3, most=3)
    *words, position = _fields(internal, _WORDS + 1, where.at("words"))
    _check_words(words, where.at("words"))
    whole_number(position, where.at("position"), least=0, most=_WORDS)
    if gauss_next is not None:
        _check_normal(gauss_next, where.at("gauss_next"))


def _check_numpy(state: object, where: Where) -> None:
    name, words, position, has_gauss, gauss = _fields(state, 5, where)
    if not isinstance(name, str) or name != "MT19937":
        raise where.refusal(f"is of the generator {described(name)}", "'MT19937'")
    if isinstance(words, np.ndarray):
        if words.dtype != np.uint32 or words.ndim != 1:
            raise where.at("words").refusal(f"has dtype {words.dtype} and shape {words.shape}", "a row of uint32")
        words = words.tolist()
    _check_words(_fields(words, _WORDS, where.at("words")), where.at("words"))
    whole_number(position, where.at("position"), least=0, most=_WORDS)
    whole_number(has_gauss, where.at("has_gauss"), least=0, most=1)
    _check_normal(gauss, where.at("cached_gaussian"))


def _fields(value: object, count: int, where: Where) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise where.refusal(f"is {described(value)}", f"a sequence of {count}")
    if len(value) != count:
        raise where.refusal(f"has {len(value)} entries", f"{count}")
    return value


def _check_words(words: Sequence[Any], where: Where) -> None:
    for word in words:
        whole_number(word, where, least=0, most=2**32 - 1)
    # The generator uses only the highest bit of the first word. From a state of zeros it returns zeros forever, and
    # drawing a normal number would never end.
    if not any(words[1:]) and words[0] < 2**31:
        raise where.refusal("contains only zeros", "the words of a seeded generator")


def _check_normal(value: object, where: Where) -> None:
    if not is_number(value):
        raise where.refusal(f"is {described(value)}", "a number")
    one_number(value, where)


def check_torch_state(state: object, where: Where) -> None:
    """Raise `CheckpointLoadError` for a CPU generator state with an invalid position, which torch would accept."""
    # Torch checks each field of the header separately, but not the sum of `left` and `following`. With a larger sum it
    # would read beyond its words.
    length = len(torch.get_rng_state())
    state = check_tensor(state, where, shape=(length,))
    check_generator_bytes(state, "cpu", where)
    _, left, _, following = _TORCH_HEADER.unpack(bytes(state[: _TORCH_HEADER.size].tolist()))
    words = state.view(torch.uint8)[_TORCH_HEADER.size : _TORCH_HEADER.size + 4 * _WORDS]
    if not words.any():
        raise where.refusal("contains only zeros", "the words of a seeded generator")
    if left + following > _WORDS + 1:
        raise where.refusal(
            f"is at word {following} with {left} left to draw", f"no more than {_WORDS + 1} of both together"
        )


def _copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state with its own tensors: loaded tensors may be mapped to a file that rotation deletes."""
    copied = dict(state_dict)
    # `random.setstate` requires tuples, and some file formats turn them into lists.
    version, internal, gauss_next = copied["python"]
    copied["python"] = (version, tuple(internal), gauss_next)
    name, words, *rest = copied["numpy"]
    copied["numpy"] = (name, np.array(words, np.uint32), *rest)
    copied["torch"] = cpu_copy(copied["torch"])
    accelerator = copied.get("accelerator")
    if accelerator is not None:
        copied["accelerator"] = copied_device_state(accelerator)
    return copied
