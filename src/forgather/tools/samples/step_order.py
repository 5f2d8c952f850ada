"""StepOrder: the samples of any step of a run, without a model and without reading data.

It divides steps with the samplers of the training loader, so both agree by construction. The cost of a step does not
depend on its number.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.elastic.step_shares import StepShares
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.loading.data_order import DRAWN_ORDER, KEYED_ORDER, DataOrder, Part, PositionedBatches
from forgather.ml.trainer.loading.data_types import Move
from forgather.ml.trainer.loading.epoch_loader import name_of
from forgather.ml.trainer.samples.length_groups import GroupedOrder, SampleLengths
from forgather.ml.trainer.samples.skipped import SkippedData
from forgather.ml.trainer.setup.step_plan import StepPlan
from forgather.ml.trainer.trainer import Trainer


@dataclass(frozen=True)
class StepSample:
    """Sample of a step, and the micro-batch that it belongs to."""

    step: int
    position: int
    """Place in the step, from 0. Steps have the same samples in the same places on any number of ranks."""
    index: int
    """Index in the training dataset, as in `skip_samples`."""
    epoch: int
    rank: int
    """Data-parallel rank; the number of the pipeline with `HybridTrainer`, and 0 with `PipelineTrainer`."""
    micro_batch: int
    """Number of the micro-batch in the step, from 0."""
    row: int
    """Place in the micro-batch, from 0."""
    is_skipped: bool = False
    """Whether `skip_samples` or `skip_steps` leaves it out."""


@dataclass(frozen=True)
class Anchor:
    """Known position of a run: after `step` steps, the next sample is number `index` of the order of `epoch`."""

    step: int = 0
    epoch: int = 0
    index: int = 0


class StepOrder:
    """Order of the samples of a run, step by step, from a known position on."""

    def __init__(
        self,
        args: TrainingArguments,
        num_samples: int,
        *,
        seed: int,
        num_ranks: int = 1,
        anchor: Anchor = Anchor(),  # noqa: B008 - it is immutable
        version: int = KEYED_ORDER,
        lengths: SampleLengths | None = None,
        skipped: SkippedData | None = None,
    ) -> None:
        """Describe a run by its arguments; `num_ranks` counts the data-parallel ranks, or pipelines.

        `version` is the version of the order, as stored with a position. `lengths` are needed for `group_by_length`.
        """
        if seed < 0:
            raise ValueError(
                f"seed={seed} draws a new seed for each run, so the order is unknown. Pass the seed of the run."
            )
        self.args = args
        self.num_samples = num_samples
        self.num_ranks = num_ranks
        self.skipped = skipped or SkippedData(args.skip_samples, args.skip_steps)
        self._anchor = anchor
        self._order = (
            DataOrder(num_samples, seed=seed, shuffle=args.shuffles)
            if lengths is None
            else GroupedOrder(num_samples, seed=seed, lengths=lengths)
        )
        if lengths is None:
            self._order.version = version
        self._plan = StepPlan(args, None)

    @classmethod
    def of(cls, args: TrainingArguments, dataset: Any, *, num_ranks: int = 1, seed: int | None = None) -> "StepOrder":
        """Return the order of a run from its beginning; `seed` replaces the seed of the arguments."""
        require_known_order(dataset)
        lengths = None
        if args.train_sampling_strategy == "group_by_length":
            lengths = SampleLengths(dataset, args.length_column_name, may_change=False)
        return cls(args, len(dataset), seed=args.seed if seed is None else seed, num_ranks=num_ranks, lengths=lengths)

    @classmethod
    def from_trainer(cls, trainer: Trainer[Any]) -> "StepOrder":
        """Return the order of a trainer that has been prepared, such as after `train`."""
        return cls.of(trainer.args, trainer.train_dataset, num_ranks=trainer.num_data_parallel_ranks, seed=trainer.seed)

    def continued(self, anchor: Anchor, position: Mapping[str, Any]) -> "StepOrder":
        """Return this order from a known position on; `position` is the state of a loader, as in a checkpoint."""
        other = copy.copy(self)
        other._anchor, other._order = anchor, copy.copy(self._order)
        if not isinstance(self._order, GroupedOrder):
            other._order.version = position.get("order_version", DRAWN_ORDER)
        return other

    def samples(self, step: int) -> list[StepSample]:
        """Return the samples of a step, in the order of their positions."""
        if step <= self._anchor.step:
            raise ValueError(
                f"Step {step} cannot be computed from a position after step {self._anchor.step}: steps are counted from 1, "
                "and the position has to be earlier."
            )
        epoch, start = self._start_of(step)
        self._order.start_epoch(epoch, self.num_samples)
        moves = sorted(self._moves(start), key=lambda item: item[2].first)
        passes_over = step in self.skipped.steps
        samples = []
        for micro_batch, rank, move in moves:
            for row, index in enumerate(self._order.samples(move.first, move.stop)):
                is_skipped = passes_over or index in self.skipped.samples
                position = move.first - start + row
                samples.append(StepSample(step, position, index, epoch, rank, micro_batch, row, is_skipped))
        return samples

    @property
    def samples_per_step(self) -> int:
        args = self.args
        if args.global_batch_size is not None:
            return int(args.global_batch_size)
        return args.per_device_train_batch_size * self.num_ranks * args.gradient_accumulation_steps

    def _start_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the position of its first sample in the order of the epoch."""
        number, anchor = step - self._anchor.step - 1, self._anchor
        left = self._steps_in(self.num_samples - anchor.index)
        if number < left:
            return anchor.epoch, anchor.index + number * self.samples_per_step
        per_epoch = self._steps_in(self.num_samples)
        if per_epoch == 0:
            raise ValueError(
                f"An epoch of {self.num_samples} samples has no full step of {self.samples_per_step} samples, and "
                "dataloader_drop_last=True drops incomplete ones."
            )
        epochs, number = divmod(number - left, per_epoch)
        return anchor.epoch + 1 + epochs, number * self.samples_per_step

    def _steps_in(self, num_samples: int) -> int:
        return self._plan.steps_of_samples(num_samples, self.args.per_device_train_batch_size * self.num_ranks)

    def _moves(self, start: int) -> Iterator[tuple[int, int, Move]]:
        """Yield micro-batch, rank and positions of all micro-batches with samples."""
        for rank in range(self.num_ranks):
            for number, move in enumerate(self._moves_of(Part(rank, self.num_ranks), start)):
                if not move.is_empty:
                    yield number, rank, move

    def _moves_of(self, part: Part, start: int) -> Iterator[Move]:
        args = self.args
        if args.global_batch_size is None:
            batches = PositionedBatches(
                self._order, args.per_device_train_batch_size, args.dataloader_drop_last, part=part
            )
            return itertools.islice(batches.moves(start), args.gradient_accumulation_steps)
        shares = StepShares(args.global_batch_size, args.per_device_train_batch_size, part)
        return shares.moves(start, min(args.global_batch_size, self.num_samples - start))


def require_known_order(dataset: object) -> None:
    """Raise ValueError for data without indices: streams and loaders define their own order."""
    kind = kind_of(dataset)
    if kind != "map":
        what = "a stream (an iterable dataset)" if kind == "iterable" else "a loader"
        raise ValueError(
            f"The samples of a step cannot be known: the training data are {what} ({name_of(dataset)}), which has its own "
            "order, and its samples have no index. Only map-style datasets, with __len__ and __getitem__, can be traced."
        )


def samples_of_step(source: "StepOrder | Trainer[Any] | str", step: int, to: int | None = None) -> list[StepSample]:
    """Return the samples of a step, or of all steps from `step` to `to`.

    `source` is a `StepOrder`, a prepared trainer, or the path of a run of `forgather train` (an output directory or a
    checkpoint). For a run from Python, `StepOrder.of(args, dataset, num_ranks=...)` needs no trainer.
    """
    steps = range(step, (step if to is None else to) + 1)
    if isinstance(source, str):
        from forgather.tools.samples.run_order import order_of_run

        run = order_of_run(source)
        return [sample for number in steps for sample in run.samples(number)]
    order = source if isinstance(source, StepOrder) else StepOrder.from_trainer(source)
    return [sample for number in steps for sample in order.samples(number)]
