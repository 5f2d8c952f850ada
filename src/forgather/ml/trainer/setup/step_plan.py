"""Step plan: the number of optimizer steps per epoch and per run, from batches and gradient accumulation.

A loader may have no length; the plan then assumes `epoch_train_steps`, and epochs end with their data. `Trainer` and
`Cadence` read the plan, and a resume with another batch size recounts it.
"""

import logging
import math
from typing import Any, Protocol

from torch.utils.data import DataLoader

from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.loading.epoch_loader import name_of
from forgather.ml.trainer.trainer_types import NO_STEP_LIMIT, TrainerState

logger = logging.getLogger(__name__)

_SCHEDULES_WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")


class _SizedLoader(Protocol):
    @property
    def num_batches(self) -> int | None: ...


class StepPlan:
    """Number of steps of an epoch and of the run, as far as known."""

    def __init__(self, args: MinimalTrainingArguments, loader: _SizedLoader | None) -> None:
        self._args = args
        self.num_batches = None if loader is None else loader.num_batches
        """Batches per epoch; None if the loader has no length."""
        self.steps_per_epoch = max(self._steps_per_epoch(), 1) if loader is not None else 1
        self.num_steps = self._planned_steps() if loader is not None else 0
        self.counts_steps = args.max_steps >= 0
        """Whether a number of steps was requested; epochs repeat as needed."""

    def follow(self, num_steps: int | None, num_batches: int | None) -> None:
        """Use the counts set by an override of `_update_training_steps`."""
        if num_batches is not None and num_batches != self.num_batches:
            self.num_batches, self.steps_per_epoch = num_batches, max(self.steps_of(num_batches), 1)
        # A changed number acts like max_steps: epochs repeat until it is reached.
        if num_steps is not None and num_steps != self.num_steps:
            self.num_steps, self.counts_steps = num_steps, True

    @property
    def has_limit(self) -> bool:
        """Whether `num_steps` ends the run. Without a length, epochs end with their data, not at the assumed step."""
        return self.counts_steps or self.num_batches is not None

    @property
    def schedule_steps(self) -> int:
        """Number of steps of the learning-rate schedule."""
        return min(self.num_steps, NO_STEP_LIMIT)

    def replan(self, state: TrainerState, position: dict[str, Any], samples_per_batch: int) -> bool:
        """Recount a resumed run with a new step size; return True if the length of the run may have changed."""
        # The position counts samples, which do not depend on the batch size. The start of the epoch moves so that the
        # remaining samples end it, and it may become negative.
        num_left = self.steps_per_epoch
        # A checkpoint from the end of an epoch counts the next epoch already, while its position is still the end of
        # the previous one: no sample of the new epoch was read.
        if position.get("num_samples") and state.global_step != state.epoch_start_step:
            num_left = self.steps_of_samples(position["num_samples"] - position["index"], samples_per_batch)
        state.epoch_train_steps = self.steps_per_epoch  # type: ignore[attr-defined]
        state.epoch_start_step = state.global_step + num_left - self.steps_per_epoch
        if self.counts_steps or self._args.num_train_epochs < 0:
            return False
        epochs_left = self._args.num_train_epochs - state.raw_epoch
        state.max_steps = self.num_steps = state.epoch_start_step + math.ceil(epochs_left * self.steps_per_epoch)
        return True

    def steps_of(self, num_batches: float) -> int:
        """Return the number of steps for a number of batches; a fraction is an incomplete batch."""
        accumulation = self._args.gradient_accumulation_steps
        if self._args.dataloader_drop_last:
            return math.floor(num_batches) // accumulation
        return math.ceil(math.ceil(num_batches) / accumulation)

    def steps_of_samples(self, num_samples: int, samples_per_batch: int) -> int:
        """Return the number of steps for a number of samples; a batch of all ranks has `samples_per_batch`."""
        size = self._args.global_batch_size
        if size is None:
            return self.steps_of(num_samples / samples_per_batch)
        # Micro-batches of a global batch have different sizes, so steps are counted directly.
        return num_samples // size if self._args.dataloader_drop_last else math.ceil(num_samples / size)

    def _steps_per_epoch(self) -> int:
        """Return the optimizer steps of a full epoch; `epoch_train_steps` for loaders without a length."""
        if self.num_batches is None:
            return int(self._args.epoch_train_steps)
        return max(self.steps_of(self.num_batches), 1)

    def _planned_steps(self) -> int:
        if self._args.max_steps >= 0:
            return int(self._args.max_steps)
        if self._args.num_train_epochs < 0:
            return NO_STEP_LIMIT
        return math.ceil(self._args.num_train_epochs * self.steps_per_epoch)


def batch_size_of(dataset: object, default: int) -> int:
    """Return the samples per batch; a DataLoader passed as dataset has its own batch size."""
    if isinstance(dataset, DataLoader):
        # A DataLoader with a batch_sampler has batch_size=None; the sampler may have the number.
        for owner in (dataset, dataset.batch_sampler):
            size = getattr(owner, "batch_size", None)
            if isinstance(size, int):
                return size
    return default


def warn_of_unknown_end(args: MinimalTrainingArguments, loader: _SizedLoader, has_schedule_by_name: bool) -> None:
    """Warn if the number of steps is assumed or unlimited, so that a decaying schedule would hardly decay."""
    if args.max_steps >= 0:
        return
    falls = has_schedule_by_name and args.lr_scheduler_type not in _SCHEDULES_WITHOUT_END
    assumed = MinimalTrainingArguments.epoch_train_steps
    if args.num_train_epochs < 0:
        if falls:
            logger.warning(
                "num_train_epochs=%s and max_steps=-1 set no limit, so the learning rate of lr_scheduler_type=%r never "
                "decays. Set max_steps, or lr_scheduler_type='constant'.",
                *(args.num_train_epochs, args.lr_scheduler_type),
            )
    elif loader.num_batches is None and args.epoch_train_steps == assumed:
        dataset = getattr(loader, "dataset", None)
        schedule = (
            f"the learning rate of lr_scheduler_type={args.lr_scheduler_type!r} decays over that many, and hardly "
        )
        logger.warning(
            "The training data (%s) have no length, so epoch_train_steps=%d steps per epoch are assumed%s. Set max_steps "
            "to the number of steps to train, or epoch_train_steps to the steps per epoch.",
            name_of(loader if dataset is None else dataset),
            assumed,
            f": {schedule}at all if the data end earlier" if falls else "",
        )
