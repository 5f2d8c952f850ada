"""SkippedData: samples and steps that a run leaves out (`skip_samples`, `skip_steps`), as part of the checkpoint.

A skipped sample is missing from its batch; the batches of all other steps stay the same. A skipped step reads its batches
and makes no update. The loader asks for samples, `StepRunner` for steps.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

SKIP_SAMPLES, SKIP_STEPS = "skip_samples", "skip_steps"
_NUM_SHOWN = 10


class SkippedData:
    """Dataset indices and step numbers to leave out.

    A resumed run without the argument keeps what its checkpoint recorded. An argument replaces the recorded list.
    """

    def __init__(self, samples: Sequence[int] = (), steps: Sequence[int] = ()) -> None:
        self.samples = frozenset(samples)
        self.steps = frozenset(steps)

    @property
    def is_active(self) -> bool:
        return bool(self.samples or self.steps)

    def check_samples(self, num_samples: int) -> None:
        """Raise ValueError for indices outside of the dataset, and if no sample would be left."""
        unknown = sorted(index for index in self.samples if index >= num_samples)
        if unknown:
            raise ValueError(
                f"{SKIP_SAMPLES} names sample {unknown[0]}, but the training dataset has {num_samples} samples, 0 to "
                f"{num_samples - 1}. forgather samples RUN --step N lists the indices of a step."
            )
        if self.samples and len(self.samples) == num_samples:
            raise ValueError(
                f"{SKIP_SAMPLES} names all {num_samples} samples of the training dataset: nothing is left."
            )

    def kept(self, indices: list[int]) -> list[int]:
        """Return the indices that are not skipped; one other sample if all are, to give an `EmptyBatch` its shapes."""
        if not self.samples:
            return indices
        kept = [index for index in indices if index not in self.samples]
        return kept or [next(index for index in range(len(self.samples) + 1) if index not in self.samples)]

    def takes_all(self, indices: Sequence[int]) -> bool:
        """Return whether all of these samples are skipped."""
        return all(index in self.samples for index in indices)

    def state_dict(self) -> dict[str, Any]:
        return {SKIP_SAMPLES: sorted(self.samples), SKIP_STEPS: sorted(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples = _settled(SKIP_SAMPLES, self.samples, state[SKIP_SAMPLES])
        self.steps = _settled(SKIP_STEPS, self.steps, state[SKIP_STEPS])


def _settled(name: str, given: frozenset[int], stored: Collection[int]) -> frozenset[int]:
    """Return the given numbers, or the stored ones if none were given; log a difference."""
    if given == frozenset(stored):
        return given
    if not given:
        logger.info("The run still leaves out %s=%s, as recorded in the checkpoint.", name, _shown(stored))
        return frozenset(stored)
    if stored:
        logger.info("%s=%s replaces %s of the checkpoint.", name, _shown(given), _shown(stored))
    return given


def _shown(numbers: Collection[int]) -> str:
    ordered = sorted(numbers)
    more = f", and {len(ordered) - _NUM_SHOWN} more" if len(ordered) > _NUM_SHOWN else ""
    return f"[{', '.join(map(str, ordered[:_NUM_SHOWN]))}{more}]"
