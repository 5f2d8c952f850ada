"""Evaluation data, loss and tokenizer of a configuration, for commands that measure the loss of a checkpoint.

Nothing is written into the directory of the run: cached tokens are read there, and missing ones go to a temporary
directory.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forgather.cli.errors import UsageError
from forgather.cli.work.stored_run import device_of
from forgather.config import builders, data_builders
from forgather.config.schema import Configuration
from forgather.data.token_store import TextTokenizer
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.tools.evaluation import single_device_arguments


@dataclass(frozen=True)
class EvaluationData:
    """Dataset of the evaluations of a run (None if it has none), and the trainer keywords that belong to it."""

    dataset: Any | None
    tokenizer: TextTokenizer
    loss: dict[str, Any]

    @property
    def keywords(self) -> dict[str, Any]:
        return {"processing_class": self.tokenizer, **self.loss}


@contextlib.contextmanager
def evaluation_data(configuration: Configuration, output_dir: str, remedy: str) -> Iterator[EvaluationData]:
    """Build the evaluation data; tokens that are not cached in `output_dir` exist until the context ends.

    Data that cannot be loaded raise UsageError, which ends with the `remedy`.
    """
    with tempfile.TemporaryDirectory(prefix="forgather-tokens-") as scratch:
        try:
            data = _built(configuration, output_dir, scratch)
        except (FileNotFoundError, UsageError) as error:
            raise UsageError(
                f"Losses cannot be measured, because the data of the run cannot be loaded: {error} Relative paths start "
                f"where training was started: {remedy}"
            ) from None
        yield data


def _built(configuration: Configuration, output_dir: str, scratch: str) -> EvaluationData:
    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    loss = builders.build_loss(configuration.loss)
    # Cached tokens of the run are reused, even if its output directory was moved.
    args = dataclasses.replace(configuration.args, output_dir=output_dir)
    dataset = data_builders.build_datasets(configuration.data, tokenizer, args, scratch=scratch).eval
    return EvaluationData(dataset, tokenizer, loss)


def arguments_on_this_machine(configuration: Configuration, **changes: Any) -> TrainingArguments:
    """Return the run's arguments for an evaluation on one device of this machine."""
    device = None if configuration.args.use_cpu else device_of(configuration)
    return single_device_arguments(configuration.args, device=device, **changes)
