"""Shards of data with dispatch_batches=False: no sample is left out or trained twice, and a doubt is an error."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainingArguments
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2TrainingArguments
from forgather.ml.trainer.hybrid.hybrid_trainer import HybridTrainingArguments
from forgather.ml.trainer.loading.collation import collate_samples
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainingArguments
from tests.support.data_parallel import ddp_trainer, fsdp2_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, Stream, TokenModel, quiet_trainer, token_samples
from tests.unit.ml.trainer.ddp.test_ddp_trainer import kept_records

SAMPLES = token_samples(80, length=12)
COLUMN = "number"


def numbered(numbers: Any) -> list[dict[str, Any]]:
    return [{**SAMPLES[number], COLUMN: torch.tensor(number)} for number in numbers]


class Noting:
    """Collator that keeps the numbers of the samples it got."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        self.numbers += [int(sample[COLUMN]) for sample in samples]
        return collate_samples([{name: sample[name] for name in ("input_ids", "labels")} for sample in samples])


class Noisy(list[Any]):
    """Random augmentation by the global generator of torch."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        noise = torch.randint(0, 4, sample["input_ids"].shape)
        return {**sample, "input_ids": (sample["input_ids"] + noise) % 8}


class NoisyOnOneRank(list[Any]):
    """Random numbers of a generator of the dataset, on rank 1 only."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples)
        self._generator = torch.Generator()

    def __getitem__(self, index: Any) -> Any:
        noise = torch.rand((), generator=self._generator) if dist.get_rank() else torch.zeros(())
        return {**super().__getitem__(index), "weight": noise}


class OnlyInWorkers(list[Any]):
    """Dataset that must not be read by the training process, such as one that opens its files at the first read."""

    def __getitem__(self, index: Any) -> Any:
        assert get_worker_info() is not None
        return super().__getitem__(index)


class Damaged(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            raise OSError("sample 0 is damaged")
        return super().__getitem__(index)


def changed(numbers: Any, place: int) -> list[dict[str, Any]]:
    """Return an older copy of the samples, with another one at `place`."""
    samples = numbered(numbers)
    samples[place] = {**samples[place], "labels": torch.zeros(12, dtype=torch.int64)}
    return samples


DATASETS: dict[str, Callable[[int], Any]] = {
    "halves": lambda rank: numbered(range(40 * rank, 40 * rank + 40)),
    "common": lambda rank: numbered(range(80)),
    "common, noisy": lambda rank: Noisy(numbered(range(80))),
    "common, damaged": lambda rank: Damaged(numbered(range(80))),
    "halves in workers": lambda rank: OnlyInWorkers(numbered(range(40 * rank, 40 * rank + 40))),
    "uneven shards": lambda rank: numbered(range(41 * rank, 41 + 39 * rank)),
    "incomplete copy": lambda rank: numbered(range(72 if rank else 80)),
    "older copy": lambda rank: changed(range(80), 79) if rank else numbered(range(80)),
    "noisy halves": lambda rank: Noisy(numbered(range(40 * rank, 40 * rank + 40))),
    "noisy on one rank": lambda rank: NoisyOnOneRank(numbered(range(80))),
    "objects": lambda rank: [{**sample, "source": object()} for sample in numbered(range(80))],
}


def train(output_dir: Path, name: str, settings: dict[str, Any], make: Any = ddp_trainer) -> dict[str, Any]:
    """Train one epoch; return the numbers of this rank's samples, the losses, the messages and the error."""
    collator, seen, error = Noting(), Recorder(), ""
    options = {"data_collator": collator, **settings.pop("trainer_options", {})}
    settings = {
        "num_train_epochs": 1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        **settings,
    }
    dataset = DATASETS[name](dist.get_rank())
    trainer = make(output_dir, TokenModel(), dataset, seen, dispatch_batches=False, trainer_options=options, **settings)
    logging.getLogger("forgather").setLevel(logging.INFO)
    with kept_records(logging.INFO) as records:
        try:
            trainer.train()
        except ValueError as raised:
            error = str(raised)
    losses = [log["loss"] for _, log in seen.logs if "loss" in log]
    return {"numbers": collator.numbers, "losses": losses, "error": error, "messages": records}


def trained(tmp_path: Path, name: str, make: Any = ddp_trainer, **settings: Any) -> list[int]:
    """Return the numbers of the trained samples in order; fail unless only rank 0 says how the data are divided."""
    first, second = run_on_ranks(train, 2, tmp_path, name, settings, make)
    assert first["error"] == second["error"] == ""
    said = [[one for one in result["messages"] if " shard" in one] for result in (first, second)]
    assert len(said[0]) == 1 and "training dataset" in said[0][0] and not said[1]
    return sorted(first["numbers"] + second["numbers"])


def refusal(tmp_path: Path, name: str, **settings: Any) -> str:
    first, second = run_on_ranks(train, 2, tmp_path, name, settings)
    assert first["error"] == second["error"] != "" and not first["numbers"]
    return str(first["error"])


def test_shards_of_equal_length_are_trained_completely(tmp_path: Path) -> None:
    assert trained(tmp_path / "ddp", "halves") == list(range(80))
    assert trained(tmp_path / "fsdp2", "halves", make=fsdp2_trainer) == list(range(80))


@pytest.mark.parametrize("name", ["common", "common, noisy"])
def test_common_dataset_is_sharded_by_the_trainer(name: str, tmp_path: Path) -> None:
    assert trained(tmp_path / "content", name) == list(range(80))
    assert trained(tmp_path / "asked", name, data_is_sharded=False) == list(range(80))


def test_different_lengths_need_the_argument(tmp_path: Path) -> None:
    message = refusal(tmp_path / "copy", "incomplete copy")
    for part in ("training", "80 samples on rank 0; 72 samples on rank 1", "set data_is_sharded=True", "same complete"):
        assert part in message
    assert "data_is_sharded=False says" in refusal(tmp_path / "wrong", "incomplete copy", data_is_sharded=False)
    assert "41 samples on rank 0; 39 samples on rank 1" in refusal(tmp_path / "shards", "uneven shards")
    # The shorter shard ends the epoch, after 39 samples of each rank.
    first, second = run_on_ranks(train, 2, tmp_path / "asked", "uneven shards", {"data_is_sharded": True})
    assert sorted(second["numbers"]) == list(range(41, 80)) and len(set(first["numbers"])) >= 39
    said = [[one for one in result["messages"] if "are not trained on" in one] for result in (first, second)]
    assert len(said[0]) == 1 and "10 on rank 1; 11 on rank 0. An epoch ends on all ranks after 10," in said[0][0]
    assert not said[1]


def test_ranks_with_as_many_batches_are_not_warned(tmp_path: Path) -> None:
    for result in run_on_ranks(train, 2, tmp_path, "common", {}):
        assert not [one for one in result["messages"] if "are not trained on" in one]


def test_different_samples_contradict_a_common_dataset(tmp_path: Path) -> None:
    asked = refusal(tmp_path / "asked", "halves", data_is_sharded=False)
    assert "sample 0 differs between ranks 0 and 1" in asked and "data_is_sharded=False says" in asked
    older = refusal(tmp_path / "older", "older copy")
    assert "sample 79 differs between ranks 0 and 1, while others are equal" in older


@pytest.mark.parametrize("name", ["noisy on one rank", "objects"])
def test_samples_without_comparable_content_need_the_argument(name: str, tmp_path: Path) -> None:
    message = refusal(tmp_path / "doubt", name)
    assert "80 samples each, but their samples cannot be compared" in message and "data_is_sharded=False" in message
    assert trained(tmp_path / "asked", name, data_is_sharded=False) == list(range(80))


def test_comparison_draws_no_random_numbers(tmp_path: Path) -> None:
    compared, asked = (
        run_on_ranks(train, 2, tmp_path / str(setting), "noisy halves", {"data_is_sharded": setting})
        for setting in (None, True)
    )
    assert [one["losses"] for one in compared] == [one["losses"] for one in asked]
    assert len(compared[0]["losses"]) == 10 and compared[0]["numbers"] == asked[0]["numbers"]


def test_comparison_reads_where_training_reads(tmp_path: Path) -> None:
    results = run_on_ranks(train, 2, tmp_path, "halves in workers", {"dataloader_num_workers": 1})
    assert [result["error"] for result in results] == ["", ""] and len(results[0]["losses"]) == 10


def test_skipped_samples_need_not_be_readable(tmp_path: Path) -> None:
    assert trained(tmp_path, "common, damaged", skip_samples=[0]) == list(range(1, 80))


def test_equal_shards_cause_a_warning(tmp_path: Path) -> None:
    for result in run_on_ranks(train, 2, tmp_path, "common", {"data_is_sharded": True}):
        assert [one for one in result["messages"] if "same first batch" in one and "data_is_sharded=True" in one]


# --- evaluation


def _evaluate(output_dir: Path, sizes: list[tuple[int, int]], setting: bool | None) -> list[Any]:
    settings: dict[str, Any] = {"data_is_sharded": setting, "per_device_eval_batch_size": 3}
    trainer = ddp_trainer(output_dir, TokenModel(), None, dispatch_eval_batches=False, **settings)
    found: list[Any] = []
    for start, stop in [sizes[dist.get_rank()]] * 2:
        try:
            found.append(trainer.evaluate(SAMPLES[start:stop])["eval_tokens"])
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [([(0, 7), (7, 14)], None), ([(0, 14), (0, 14)], None), ([(0, 14), (0, 14)], False), ([(0, 0), (0, 14)], True)],
)
def test_evaluation_data_are_divided_alike(sizes: Any, setting: bool | None, tmp_path: Path) -> None:
    first, second = run_on_ranks(_evaluate, 2, tmp_path, sizes, setting)
    whole = quiet_trainer(tmp_path, TokenModel(), None).evaluate(SAMPLES[:14])["eval_tokens"]
    assert first == second == [whole, whole]


def test_evaluation_data_of_different_lengths_need_the_argument(tmp_path: Path) -> None:
    first, second = run_on_ranks(_evaluate, 2, tmp_path, [(0, 8), (0, 7)], None)
    assert first == second and len(set(first)) == 1
    assert (
        "evaluation datasets of the ranks have different lengths: 8 samples on rank 0; 7 samples on rank 1" in first[0]
    )


# --- settings


def _stream(output_dir: Path) -> str:
    stream = Stream(SAMPLES[:8])
    trainer = ddp_trainer(output_dir, TokenModel(), stream, dispatch_batches=False, data_is_sharded=False, max_steps=1)
    with pytest.raises(ValueError, match="iterable dataset as training data"):
        trainer.train()
    return "refused"


def test_streams_are_not_sharded_by_the_trainer(tmp_path: Path) -> None:
    assert run_on_ranks(_stream, 2, tmp_path) == ["refused", "refused"]


@pytest.mark.parametrize(
    "kind", [DDPTrainingArguments, FSDP2TrainingArguments, HybridTrainingArguments, PipelineTrainingArguments]
)
def test_shards_that_nobody_reads_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="data_is_sharded=True cannot be used: rank 0 reads for all ranks"):
        kind(data_is_sharded=True)
    assert kind().data_is_sharded is None


@pytest.mark.parametrize("kind", [DDPTrainingArguments, FSDP2TrainingArguments, HybridTrainingArguments])
def test_shards_that_ranks_read_are_accepted(kind: Any) -> None:
    assert kind(data_is_sharded=True, dispatch_batches=False).data_is_sharded
    if kind is not HybridTrainingArguments:
        assert kind(data_is_sharded=True, dispatch_eval_batches=False).data_is_sharded
