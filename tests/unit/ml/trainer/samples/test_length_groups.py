"""Groups of similar length: an order by (seed, epoch), equal for any number of ranks, with exact positions."""

import itertools
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from forgather.ml.trainer.loading.builders import ResumableLoader, build_train_loader
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.samples.length_groups import SampleLengths
from tests.support.loading import between_epochs, interrupted, stored, straight
from tests.support.tiny_models import Stream, TokenModel, quiet_trainer, token_samples

LENGTHS = np.random.default_rng(5).integers(1, 200, 403).tolist()
SAMPLES = [{"index": index, "length": length} for index, length in enumerate(LENGTHS)]


def indices(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {"index": [sample["index"] for sample in samples]}


def loader(part: Part = WHOLE, batch_size: int = 8, seed: int = 3, data: Any = SAMPLES) -> ResumableLoader:
    lengths = SampleLengths(data, "length", False)
    return build_train_loader(data, batch_size=batch_size, collate_fn=indices, seed=seed, part=part, lengths=lengths)


def epoch_of(loader: ResumableLoader) -> list[int]:
    return list(itertools.chain.from_iterable(batches_of(loader)))


def batches_of(loader: ResumableLoader) -> list[list[int]]:
    return [batch["index"] for batch in loader]


def spread(batches: list[list[int]]) -> float:
    return float(np.mean([np.ptp([LENGTHS[index] for index in batch]) for batch in batches]))


def test_each_sample_comes_once_and_batches_have_similar_lengths() -> None:
    grouped = batches_of(loader())
    assert sorted(itertools.chain.from_iterable(grouped)) == list(range(len(SAMPLES)))
    shuffled = build_train_loader(SAMPLES, batch_size=8, collate_fn=indices, seed=3)
    assert spread(grouped) < 0.2 * spread(batches_of(shuffled))


def test_order_depends_only_on_seed_and_epoch() -> None:
    expected = epoch_of(loader())
    assert epoch_of(loader(batch_size=5)) == expected
    torch.rand(3)
    assert epoch_of(loader()) == expected
    assert epoch_of(loader(seed=4)) != expected
    other = loader()
    other.set_epoch(1)
    assert epoch_of(other) != expected


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_together_read_the_order_of_one(num_ranks: int) -> None:
    parts = [batches_of(loader(Part(rank, num_ranks), batch_size=4)) for rank in range(num_ranks)]
    rounds = list(zip(*parts, strict=True))
    whole = epoch_of(loader())
    full = [index for one in rounds[:-1] for batch in one for index in batch]
    assert full == whole[: len(full)]
    # All batches of a step are similar, not only each of them.
    assert spread([list(itertools.chain.from_iterable(one)) for one in rounds[:-1]]) < 0.25 * spread(
        [list(range(start, start + 8)) for start in range(0, 400, 8)]
    )


def test_position_resumes_exactly() -> None:
    expected = straight(loader)
    for position in (1, 17, 50, 60):
        assert interrupted(loader, position) == expected
    assert between_epochs(loader) == expected


def test_position_of_another_strategy_is_refused() -> None:
    grouped, shuffled = loader(), build_train_loader(SAMPLES, batch_size=8, collate_fn=indices, seed=3)
    states = [stored(one.state_dict()) for one in (grouped, shuffled)]
    with pytest.raises(ValueError, match="saved with train_sampling_strategy='group_by_length', but it is 'random'"):
        shuffled.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"it is 'group_by_length' now.*skip_checkpoint_components=\[\"dataset\"\]"):
        grouped.load_state_dict(states[1])


def test_lengths_come_from_the_column_or_from_input_ids() -> None:
    rows = [{"input_ids": list(range(length)), "size": -length} for length in (3, 1, 2)]
    for data in (rows, datasets.Dataset.from_list(rows)):
        assert SampleLengths(data, "length", False).of_epoch(0).tolist() == [3, 1, 2]
        assert SampleLengths(data, "size", False).of_epoch(0).tolist() == [-3, -1, -2]
    with pytest.raises(ValueError, match=r"neither the column 'length'.*nor 'input_ids'.*Add a column"):
        SampleLengths([{"value": 1}], "length", False)


def test_trainer_groups_samples_and_reads_the_length_before_columns_are_removed(tmp_path: Path) -> None:
    order: list[int] = []

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        assert all(set(one) == {"input_ids", "labels"} for one in samples)
        order.extend(int(one["input_ids"][0]) for one in samples)
        return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}

    samples = token_samples(24)
    for index, one in enumerate(samples):
        one["input_ids"][0] = index
    data = [{**one, "size": index % 6} for index, one in enumerate(samples)]
    settings = {"train_sampling_strategy": "group_by_length", "length_column_name": "size", "shuffle": True}
    quiet_trainer(
        tmp_path,
        TokenModel(),
        data,
        remove_unused_columns=True,
        per_device_train_batch_size=3,
        trainer_options={"data_collator": collate},
        **settings,
    ).train()
    assert sorted(order) == list(range(24))
    sizes = [index % 6 for index in order]
    assert sizes[:6] == sorted(sizes[:6], reverse=True) and sizes[6:12] == sorted(sizes[6:12])


def test_sequential_is_the_order_of_the_dataset(tmp_path: Path) -> None:
    seen: list[Any] = []
    settings = {"train_sampling_strategy": "sequential", "shuffle": True, "per_device_train_batch_size": 2}
    options = {
        "data_collator": lambda samples: (
            seen.extend(samples)
            or {
                "input_ids": torch.stack([one["input_ids"] for one in samples]),
                "labels": torch.stack([one["labels"] for one in samples]),
            }
        )
    }
    samples = token_samples(6)
    quiet_trainer(tmp_path, TokenModel(), samples, trainer_options=options, **settings).train()
    assert [one["input_ids"].tolist() for one in seen] == [one["input_ids"].tolist() for one in samples]


@pytest.mark.parametrize(("data", "words"), [(Stream([]), "a stream"), (iter([]), "a loader")])
def test_data_without_a_length_is_refused_at_construction(data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"group_by_length' needs a map-style dataset.*{words}"):
        quiet_trainer(
            tmp_path, TokenModel(), data, train_sampling_strategy="group_by_length", shuffle=True, max_steps=1
        )


def test_grouping_without_shuffling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be combined with shuffle=False"):
        quiet_trainer(tmp_path, TokenModel(), [], train_sampling_strategy="group_by_length")
