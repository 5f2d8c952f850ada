"""Work of `forgather samples`: prints the samples of a step, with their sources."""

import argparse
import dataclasses
import json
from typing import Any

from forgather.cli.command_line import DONE
from forgather.cli.errors import UsageError
from forgather.cli.output import note, print_json, show_table
from forgather.cli.process_setup import show_own_messages
from forgather.config import builders
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.samples import RunOrder, StepError, StepSample, order_of_run

_LONGEST_TEXT = 200
_COLUMNS = ("step", "position", "index", "rank", "micro-batch", "row", "source")


def show_samples(options: argparse.Namespace) -> int:
    """Print the samples as the command line requests; returns the exit code."""
    show_own_messages()
    try:
        order = order_of_run(options.run, options.config)
        last = options.step if options.to is None else options.to
        order.require_planned(last)
        samples = [one for step in range(options.step, last + 1) for one in order.samples(step)]
    except (CheckpointNotFoundError, FileNotFoundError, StepError) as error:
        raise UsageError(str(error)) from None
    sources, texts = _sources(order, options), {}
    if options.text:
        texts = _texts(order, options, samples)
    if options.json:
        print_json("samples/1", _as_data(order, options, samples, sources, texts))
    else:
        _show(order, options, samples, sources, texts)
    return DONE


def _sources(order: RunOrder, options: argparse.Namespace) -> Any:
    """Return the training dataset if it knows where its samples come from, else None."""
    try:
        dataset = order.dataset_of_step(options.step, may_tokenize=options.text)
    except (UsageError, FileNotFoundError) as error:
        # The indices are known without the data. Only --text needs them.
        if options.text:
            raise UsageError(
                f"--text needs the data of the run: {error} Relative paths start where training was started: run the command "
                "there, or pass --config."
            ) from None
        note(f"The sources are not shown: {error} --text reads the data again.")
        return None
    return dataset


def _texts(order: RunOrder, options: argparse.Namespace, samples: list[StepSample]) -> dict[int, str]:
    configuration, _ = order.run.configuration(options.step, options.config)
    tokenizer: Any = builders.build_tokenizer(configuration.tokenizer)
    dataset = order.dataset_of_step(options.step)
    return {one.index: str(tokenizer.decode(_ids(dataset[one.index]))) for one in samples}


def _ids(sample: Any) -> list[int]:
    try:
        ids = sample["input_ids"]
    except (KeyError, IndexError, TypeError):
        raise UsageError("--text needs samples with input_ids, but the samples of this run have none.") from None
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _spans(dataset: Any, index: int) -> list[dict[str, object]]:
    if not hasattr(dataset, "source_of"):
        return []
    return [
        {
            "file": None if span.place is None else span.place.file,
            "document": None if span.place is None else span.place.number + 1,
            "offset": span.offset,
            "begin": span.begin,
            "tokens": span.num_tokens,
        }
        for span in dataset.source_of(index)
    ]


def _as_data(
    order: RunOrder, options: argparse.Namespace, samples: list[StepSample], dataset: Any, texts: dict[int, str]
) -> dict[str, object]:
    first = order.order(options.step)
    rows = [
        {
            **dataclasses.asdict(one),
            "sources": _spans(dataset, one.index),
            **({"text": texts[one.index]} if texts else {}),
        }
        for one in samples
    ]
    return {
        "run": order.run.output_dir,
        "num_samples": first.num_samples,
        "samples_per_step": first.samples_per_step,
        "num_ranks": first.num_ranks,
        "samples": rows,
    }


def _show(
    order: RunOrder, options: argparse.Namespace, samples: list[StepSample], dataset: Any, texts: dict[int, str]
) -> None:
    rows = [
        (one.step, one.position, one.index, one.rank, one.micro_batch, one.row, _source(dataset, one))
        for one in samples
    ]
    show_table(_COLUMNS, rows, numeric=_COLUMNS[:-1])
    for one in samples if texts else ():
        show_row(str(one.index), quoted(texts[one.index], _LONGEST_TEXT))
    if any(one.is_skipped for one in samples):
        show_row("skipped", ", ".join(str(one.index) for one in samples if one.is_skipped))


def _source(dataset: Any, sample: StepSample) -> str:
    from forgather.tools.replay.sample_losses import describe_source

    described = None if dataset is None else describe_source(dataset, sample.index)
    return described or ""


def quoted(text: str, longest: int) -> str:
    """Return text of a run in quotes, shortened, with line breaks and tabs escaped."""
    return json.dumps(text if len(text) <= longest else text[:longest] + "...", ensure_ascii=False)
