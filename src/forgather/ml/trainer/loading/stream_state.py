"""Resuming streams of the package `datasets`: which of them their own state brings back exactly."""

import logging
from collections.abc import Iterator
from typing import Any

from forgather.ml.distributed.environment import get_rank

logger = logging.getLogger(__name__)

# NumPy draws as many bits for a generator without a seed; nobody types such a number.
_BITS_OF_NO_SEED = 65


def loses_samples(dataset: object) -> bool:
    """Whether a stream of `datasets` has a shuffle buffer, or batches of tables, which its state does not contain."""
    return any(_is_lossy(node) for node in _nodes(dataset))


def warn_of_random_order(dataset: object) -> None:
    """Say that a shuffled stream without a seed has another order in each process."""
    generators = (getattr(node, "generator", None) for node in _nodes(dataset))
    if get_rank() == 0 and any(_has_no_seed(generator) for generator in generators):
        logger.warning(
            "The training data (%s of the package datasets) are shuffled without a seed, so each process reads them in another "
            "order: a resumed run would repeat samples and leave out others. Give shuffle() or interleave_datasets() a seed.",
            type(dataset).__name__,
        )


def warn_of_lost_samples(loader: object) -> None:
    """Say that a ready loader with a state of its own does not bring back the buffer of its stream."""
    if get_rank() == 0 and loses_samples(getattr(loader, "dataset", None)):
        logger.warning(
            "%s keeps the state of a stream with a shuffle buffer, which does not contain the buffered samples: a resumed run "
            "would repeat samples and leave out others. Give the trainer the dataset itself, which is then read again up to "
            "the position, or a torch DataLoader.",
            type(loader).__name__,
        )


def _nodes(dataset: object) -> Iterator[Any]:
    """The steps that a stream of `datasets` consists of, told by their names: importing the package takes seconds."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, tuple)):
            waiting.extend(node)
        elif type(node).__module__.partition(".")[0] == "datasets":
            yield node
            waiting.extend(value for name, value in vars(node).items() if name.startswith("ex_iterable"))


def _is_lossy(node: object) -> bool:
    # Of batches of tables the package itself says that some may be skipped.
    in_tables = getattr(node, "batched", False) and getattr(getattr(node, "formatting", None), "is_table", False)
    return type(node).__name__ == "BufferShuffledExamplesIterable" or bool(in_tables)


def _has_no_seed(generator: object) -> bool:
    sequence = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() >= _BITS_OF_NO_SEED
