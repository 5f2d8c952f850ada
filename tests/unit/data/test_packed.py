"""Sequences of one length from documents of any."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from forgather.data.packed import PackedTokens
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loading.builders import build_train_loader


def packed(lengths: list[int], sequence_length: int) -> PackedTokens:
    """Documents of these lengths, with the numbers 1, 2, 3, ... as tokens."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return PackedTokens(tokens, starts, sequence_length, padding_token=0)


def test_documents_are_laid_end_to_end_and_the_last_sequence_is_padded() -> None:
    dataset = packed([3, 5, 2], 4)
    assert [sample["input_ids"].tolist() for sample in (dataset[i] for i in range(len(dataset)))] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 0, 0],
    ]


def test_the_first_token_of_a_document_is_no_target_and_all_others_are() -> None:
    dataset = packed([3, 5, 2], 4)
    assert [dataset[i]["labels"].tolist() for i in range(3)] == [
        [-100, 2, 3, -100],
        [5, 6, 7, 8],
        [-100, 10, -100, -100],
    ]


def test_the_loss_does_not_depend_on_what_is_predicted_across_a_boundary() -> None:
    labels = packed([2, 2], 4)[0]["labels"][None]
    logits = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    changed[0, 1] += torch.arange(8)  # position 1 would predict the first token of the second document
    loss = CausalLoss()
    assert torch.equal(loss(logits, labels), loss(changed, labels))
    assert loss.num_targets(labels) == 2


def test_one_document_longer_than_a_sequence_goes_on_in_the_next() -> None:
    dataset = packed([8], 4)
    assert dataset[1]["labels"].tolist() == [5, 6, 7, 8]


def test_a_saved_position_continues_with_the_same_batches() -> None:
    def loader() -> object:
        return build_train_loader(packed([50] * 8, 10), batch_size=4, seed=3)

    straight = [batch["input_ids"] for batch in loader()]  # type: ignore[attr-defined]
    first = loader()
    iterator = iter(first)  # type: ignore[call-overload]
    for _ in range(4):
        next(iterator)
    second = loader()
    second.load_state_dict(first.state_dict())  # type: ignore[attr-defined]
    rest = [batch["input_ids"] for batch in second]  # type: ignore[attr-defined]
    assert len(rest) == len(straight) - 4
    assert all(torch.equal(a, b) for a, b in zip(rest, straight[4:], strict=True))


def test_a_memory_mapped_dataset_reaches_workers_as_a_path(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    dataset = PackedTokens(np.memmap(path, dtype=np.uint16, mode="r"), np.zeros(1, dtype=np.int64), 10)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1500
    assert torch.equal(pickle.loads(pickled)[7]["input_ids"], dataset[7]["input_ids"])


def test_indices_outside_and_sequences_too_short_are_refused() -> None:
    with pytest.raises(IndexError):
        packed([4], 4)[1]
    with pytest.raises(ValueError, match="sequence_length=1 cannot be used"):
        packed([4], 1)
