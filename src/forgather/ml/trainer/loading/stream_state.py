"""Streams of Hugging Face `datasets`: detection of shuffle buffers and missing seeds, which prevent an exact resume.

`builders` calls it. A stream that loses samples is read again up to the position instead of using its own state.
"""

import logging
from collections.abc import Iterator
from typing import Any

from forgather.ml.distributed.environment import get_rank

logger = logging.getLogger(__name__)

# NumPy draws 128 bits of entropy for a generator without a seed. A seed set by a user is hardly longer than 64 bits.
_BITS_OF_NO_SEED = 65


def loses_samples(dataset: object) -> bool:
    """Return whether the state of a `datasets` stream omits samples, in a shuffle buffer or in batches of tables."""
    return any(_is_lossy(node) for node in _nodes(dataset))


def warn_of_random_order(dataset: object) -> None:
    """Warn about a stream that is shuffled without a seed, since its order differs in each process."""
    generators = (getattr(node, "generator", None) for node in _nodes(dataset))
    if get_rank() == 0 and any(_has_no_seed(generator) for generator in generators):
        logger.warning(
            "The training data (%s of the package datasets) are shuffled without a seed, so the order differs in each "
            "process: a resumed run would repeat some samples and skip others. Pass a seed to shuffle() or "
            "interleave_datasets().",
            type(dataset).__name__,
        )


def warn_of_lost_samples(loader: object) -> None:
    """Warn about a stateful loader with a state that omits the shuffle buffer of its stream."""
    if get_rank() == 0 and loses_samples(getattr(loader, "dataset", None)):
        logger.warning(
            "%s saves the state of a stream with a shuffle buffer, which does not contain the buffered samples: a resumed run "
            "would repeat some samples and skip others. Pass the dataset itself to the trainer, which then reads it again up "
            "to the position, or a torch DataLoader.",
            type(loader).__name__,
        )


def _nodes(dataset: object) -> Iterator[Any]:
    """Yield the processing steps of a `datasets` stream."""
    # Recognise them by module name: importing the package takes seconds.
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, tuple)):
            waiting.extend(node)
        elif type(node).__module__.partition(".")[0] == "datasets":
            yield node
            waiting.extend(value for name, value in vars(node).items() if name.startswith("ex_iterable"))


def _is_lossy(node: object) -> bool:
    # For batches in a table format `datasets` itself states that a resume may skip samples.
    in_tables = getattr(node, "batched", False) and getattr(getattr(node, "formatting", None), "is_table", False)
    return type(node).__name__ == "BufferShuffledExamplesIterable" or bool(in_tables)


def _has_no_seed(generator: object) -> bool:
    sequence = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() >= _BITS_OF_NO_SEED
