"""RunOrder: the samples of any step of a run of `forgather train`, from its files.

The position in the nearest earlier checkpoint is the starting point, so a run that was resumed with another batch size
or on other ranks is followed exactly.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.loading.data_order import DRAWN_ORDER, KEYED_ORDER
from forgather.ml.trainer.samples.length_groups import SampleLengths
from forgather.ml.trainer.samples.skipped import SKIP_SAMPLES, SKIP_STEPS, SkippedData
from forgather.tools.run_files import RunFiles, num_data_parallel, open_run, state_of, step_of
from forgather.tools.samples.step_order import Anchor, StepOrder, StepSample, require_known_order

if TYPE_CHECKING:
    from forgather.config.schema import Configuration

_POSITION = ("seed", "epoch", "index", "num_samples")


class StepError(ValueError):
    """Step that the run does not have."""


class RunOrder:
    """Order of the samples of a run, step by step."""

    def __init__(self, run: RunFiles, config: str | None = None) -> None:
        """Follow a run; `config` is a configuration file that the caller trusts, instead of the stored one."""
        self.run = run
        self._config = config
        self._orders: dict[tuple[str, str], StepOrder] = {}
        self._dataset: Any = None

    def require_planned(self, step: int) -> None:
        """Raise `StepError` for a step after the end of the run (`max_steps`)."""
        args = self.run.configuration(step, self._config)[0].args
        if 0 < args.max_steps < step:
            raise StepError(
                f"The run ends at step {args.max_steps} (max_steps), before step {step}. Pass --config with another max_steps "
                "to see the samples of a longer run."
            )

    def samples(self, step: int) -> list[StepSample]:
        """Return the samples of a step."""
        return self.order(step).samples(step)

    def order(self, step: int) -> StepOrder:
        """Return the order that a step belongs to, beginning at the nearest earlier checkpoint."""
        if step < 1:
            raise ValueError(f"step {step}: steps are counted from 1.")
        before, described = self.run.before(step), self.run.describing(step)
        key = ("" if before is None else before.path, "" if described is None else described.path)
        if key not in self._orders:
            self._orders[key] = self._make(step)
        return self._orders[key]

    def _make(self, step: int) -> StepOrder:
        configuration, folder = self.run.configuration(step, self._config)
        before, described = self.run.before(step), self.run.describing(step)
        num_ranks = num_data_parallel(configuration.trainer.kind, None if described is None else described.manifest)
        position = None if described is None else self._position(described.path, state_of(described, "dataset"))
        args = configuration.args
        lengths = None
        if args.train_sampling_strategy == "group_by_length":
            lengths = SampleLengths(self.dataset(configuration, folder), args.length_column_name, may_change=False)
        if position is None:
            # No checkpoint yet: the number of samples is known only to the dataset.
            dataset = self.dataset(configuration, folder)
            require_known_order(dataset)
            return StepOrder(args, len(dataset), seed=args.seed, num_ranks=num_ranks, lengths=lengths)
        anchor, skipped = Anchor(), None
        if before is not None:
            position = self._position(before.path, state_of(before, "dataset"))
            anchor = Anchor(step_of(before), position["epoch"], position["index"])
        if described is not None:
            state = state_of(described, "trainer")
            skipped = SkippedData(state.get(SKIP_SAMPLES, ()), state.get(SKIP_STEPS, ()))
        return StepOrder(
            args,
            position["num_samples"],
            seed=position["seed"],
            num_ranks=num_ranks,
            anchor=anchor,
            version=position.get("order_version", DRAWN_ORDER) if lengths is None else KEYED_ORDER,
            lengths=lengths,
            skipped=skipped,
        )

    def _position(self, path: str, state: object) -> Mapping[str, Any]:
        if not isinstance(state, Mapping) or any(type(state.get(name)) is not int for name in _POSITION):
            raise CheckpointLoadError.misfit(
                f"The samples of a step cannot be known: the data position in {path} is the position of a stream or a loader, "
                "which has its own order, and its samples have no index. Only map-style datasets, such as the text files of "
                "forgather train, can be traced."
            )
        return state

    def dataset(self, configuration: "Configuration", folder: str, may_tokenize: bool = True) -> Any:
        """Return the training dataset of the run, built as the run did, without writing into its directory.

        `may_tokenize=False` raises FileNotFoundError if the run has no cached tokens.
        """
        if self._dataset is None:
            from forgather.config.stored import config_option, refuse_code

            if self._config is None:
                refuse_code(configuration, "tokenizer", "data", remedy=config_option(folder))
            with scratch_directory(self.run.output_dir) as scratch:
                self._dataset = build_training_data(configuration, scratch, may_tokenize)
        return self._dataset

    def dataset_of_step(self, step: int, may_tokenize: bool = True) -> Any:
        """Return the training dataset of the run at a step."""
        return self.dataset(*self.run.configuration(step, self._config), may_tokenize)


def order_of_run(path: str, config: str | None = None) -> RunOrder:
    """Return the order of a run, by its output directory or one of its checkpoints."""
    return RunOrder(open_run(path), config)


def build_training_data(configuration: "Configuration", scratch: str, may_tokenize: bool = True) -> Any:
    """Return the training dataset of a configuration; files are written to the directory `scratch` only."""
    from forgather.config import builders, data_builders

    args = dataclasses.replace(configuration.args, output_dir=scratch)
    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    return data_builders.build_datasets(configuration.data, tokenizer, args, may_tokenize=may_tokenize).train


@contextlib.contextmanager
def scratch_directory(output_dir: str) -> Iterator[str]:
    """Create a temporary output directory that finds the cached tokens of a run, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="forgather-") as scratch:
        tokens, own = os.path.join(output_dir, "tokens"), os.path.join(scratch, "tokens")
        os.mkdir(own)
        # Links to the stores of the run: they are found and read, and a missing store is written beside the links.
        for name in os.listdir(tokens) if os.path.isdir(tokens) else ():
            os.symlink(os.path.join(tokens, name), os.path.join(own, name))
        yield scratch
