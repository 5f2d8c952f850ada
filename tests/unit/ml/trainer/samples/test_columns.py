"""Unused columns: the collator gets the columns that the model's forward accepts, for every kind of dataset."""

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn

from forgather.ml.trainer.samples.columns import used_names
from tests.support.tiny_models import Stream, TokenModel, quiet_trainer, tiny_llama, token_samples

SAMPLES = [{**one, "text": "words", "number": index} for index, one in enumerate(token_samples(4))]
PLAIN = [
    {name: getattr(value, "tolist", lambda value=value: value)() for name, value in one.items()} for one in SAMPLES
]


class Seen:
    """Collator that records the keys of the samples it gets."""

    def __init__(self) -> None:
        self.keys: set[frozenset[str]] = set()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        self.keys |= {frozenset(sample) for sample in samples}
        return {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in ("input_ids", "labels")}


def with_transform() -> datasets.Dataset:
    """Build a dataset that computes its inputs from a column that the model does not accept."""
    made = datasets.Dataset.from_list([{"number": index} for index in range(4)])

    def inputs(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        rows = [PLAIN[index] for index in batch["number"]]
        return {"input_ids": [row["input_ids"] for row in rows], "labels": [row["labels"] for row in rows]}

    made.set_transform(inputs)
    return made


KINDS: dict[str, Any] = {
    "list": lambda: SAMPLES,
    "stream": lambda: Stream(SAMPLES),
    "Dataset": lambda: datasets.Dataset.from_list(PLAIN),
    "Dataset with a transform": with_transform,
    "IterableDataset": lambda: datasets.Dataset.from_list(PLAIN).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_collator_gets_only_used_columns(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collator, data = Seen(), KINDS[kind]()
    caplog.set_level(logging.INFO)
    options = {"data_collator": collator, "eval_dataset": KINDS[kind]()}
    trainer = quiet_trainer(
        tmp_path, TokenModel(), data, max_steps=2, remove_unused_columns=True, trainer_options=options
    )
    trainer.train()
    trainer.evaluate()
    assert collator.keys == {frozenset(("input_ids", "labels"))}
    said = [one.getMessage() for one in caplog.records if "does not accept are removed" in one.getMessage()]
    if kind != "Dataset with a transform":
        assert 1 <= len(said) <= 2 and all("text, number" in one for one in said)


def test_columns_are_found_for_a_model_that_is_built_later(tmp_path: Path) -> None:
    collator = Seen()
    options = {"data_collator": collator, "model_init": tiny_llama}
    quiet_trainer(tmp_path, None, SAMPLES, max_steps=1, remove_unused_columns=True, trainer_options=options).train()
    assert collator.keys == {frozenset(("input_ids", "labels"))}


def test_all_columns_stay_by_default(tmp_path: Path) -> None:
    collator = Seen()
    quiet_trainer(tmp_path, TokenModel(), SAMPLES, max_steps=1, trainer_options={"data_collator": collator}).train()
    assert collator.keys == {frozenset(("input_ids", "labels", "text", "number"))}


class AnyArguments(nn.Module):
    def forward(self, **inputs: Tensor) -> None: ...


class SomeArguments(nn.Module):
    def forward(self, input_ids: Tensor, *, mask: Tensor | None = None, **others: Tensor) -> None: ...


def test_used_names_are_the_arguments_of_forward_and_labels() -> None:
    labels = {"label", "label_ids", "labels"}
    assert used_names(AnyArguments(), ()) is None
    assert used_names(SomeArguments(), ("start_positions",)) == {"input_ids", "mask", "start_positions", *labels}
    compiled: Any = torch.compile(SomeArguments(), backend="eager")
    assert used_names(compiled, ()) == {"input_ids", "mask", *labels}


@pytest.mark.parametrize("kind", ["list", "Dataset", "IterableDataset"])
def test_dataset_without_any_used_column_is_an_error(kind: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "number": 1}]
    data = {"list": rows, "Dataset": datasets.Dataset.from_list(rows)}
    data["IterableDataset"] = datasets.Dataset.from_list(rows).to_iterable_dataset()
    trainer = quiet_trainer(tmp_path, TokenModel(), data[kind], max_steps=1, remove_unused_columns=True)
    with pytest.raises(
        ValueError, match=r"would remove all columns, \['text', 'number'\].*forward accepts \['input_ids'\]"
    ):
        trainer.train()
