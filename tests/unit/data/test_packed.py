"""Packing: sequences of one length from documents of any length."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from forgather.data.packed import PackedTokens
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loading.builders import build_train_loader


def packed(lengths: list[int], sequence_length: int) -> PackedTokens:
    """Pack documents of these lengths, with the numbers 1, 2, 3, ... as tokens."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return PackedTokens(tokens, starts, sequence_length, padding_token=0)


def test_documents_are_concatenated_and_the_last_sequence_is_padded() -> None:
    dataset = packed([3, 5, 2], 4)
    assert [sample["input_ids"].tolist() for sample in (dataset[i] for i in range(len(dataset)))] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 0, 0],
    ]


def test_first_token_of_a_document_is_not_a_target() -> None:
    dataset = packed([3, 5, 2], 4)
    assert [dataset[i]["labels"].tolist() for i in range(3)] == [
        [-100, 2, 3, -100],
        [5, 6, 7, 8],
        [-100, 10, -100, -100],
    ]


def test_loss_ignores_predictions_across_a_document_boundary() -> None:
    labels = packed([2, 2], 4)[0]["labels"][None]
    logits = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    changed[0, 1] += torch.arange(8)  # Position 1 would predict the first token of the second document.
    loss = CausalLoss()
    assert torch.equal(loss(logits, labels), loss(changed, labels))
    assert loss.num_targets(labels) == 2


def test_long_document_continues_in_the_next_sequence() -> None:
    dataset = packed([8], 4)
    assert dataset[1]["labels"].tolist() == [5, 6, 7, 8]


def test_saved_position_resumes_with_the_same_batches() -> None:
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


def test_memory_mapped_dataset_is_pickled_as_a_path(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    dataset = PackedTokens(np.memmap(path, dtype=np.uint16, mode="r"), np.zeros(1, dtype=np.int64), 10)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1500
    assert torch.equal(pickle.loads(pickled)[7]["input_ids"], dataset[7]["input_ids"])


def test_index_out_of_range_and_short_sequences_are_rejected() -> None:
    with pytest.raises(IndexError):
        packed([4], 4)[1]
    with pytest.raises(ValueError, match="sequence_length=1 cannot be used"):
        packed([4], 1)
