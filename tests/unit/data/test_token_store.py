"""Token store: tokenised documents in memory and in files."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgather.data import token_store
from forgather.data.byte_tokenizer import byte_tokenizer, encode_bytes
from forgather.data.token_store import EvaluationShare, TokenArray, file_identity, tokenize, tokenize_to_files

TEXTS = [f"document {number}: äöü\n" for number in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def documents_in(array: TokenArray) -> list[str]:
    pieces = np.split(array.tokens, array.document_starts[1:])
    assert all(piece[-1] == 256 for piece in pieces)
    return [bytes(piece[:-1].astype(np.uint8)).decode() for piece in pieces]


def test_byte_tokenizer_round_trips_text(tokenizer: Any, tmp_path: Path) -> None:
    text = "def f():\n\treturn 'ä€'  # \x00"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) == encode_bytes(text).tolist()
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == ids and len(loaded) == 257 and loaded.eos_token_id == 256


def test_every_document_is_in_one_split_complete_and_in_order(tokenizer: Any) -> None:
    splits = tokenize(TEXTS, tokenizer, EvaluationShare(0.2))
    train, evaluation = documents_in(splits["train"]), documents_in(splits["eval"])
    assert sorted(train + evaluation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    assert 20 <= len(evaluation) <= 60


def test_split_is_deterministic_and_depends_on_the_seed(tokenizer: Any) -> None:
    chosen = [documents_in(tokenize(TEXTS, tokenizer, EvaluationShare(0.2, seed))["eval"]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_added_documents_keep_the_split_of_the_others(tokenizer: Any) -> None:
    before = documents_in(tokenize(TEXTS[:100], tokenizer, EvaluationShare(0.2))["eval"])
    assert documents_in(tokenize(TEXTS, tokenizer, EvaluationShare(0.2))["eval"])[: len(before)] == before


def test_files_hold_the_same_tokens_and_are_reused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = tokenize(TEXTS, tokenizer, EvaluationShare(0.2))
    written = tokenize_to_files(TEXTS, tokenizer, EvaluationShare(0.2), str(tmp_path), ["a"])
    monkeypatch.setattr(token_store, "_write_store", lambda *_: pytest.fail("tokenised twice"))
    found = tokenize_to_files(TEXTS, tokenizer, EvaluationShare(0.2), str(tmp_path), ["a"])
    for split in ("train", "eval"):
        assert isinstance(found[split].tokens, np.memmap)
        assert np.array_equal(found[split].tokens, in_memory[split].tokens)
        assert np.array_equal(written[split].document_starts, in_memory[split].document_starts)


def test_changed_source_is_tokenised_again(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = file_identity(str(path))
    os.utime(path, ns=(0, 0))
    assert file_identity(str(path)) != before


def test_interrupted_tokenisation_leaves_nothing(tokenizer: Any, tmp_path: Path) -> None:
    def broken() -> Any:
        yield "one"
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        tokenize_to_files(broken(), tokenizer, EvaluationShare(0.0), str(tmp_path), ["a"])
    assert list(tmp_path.iterdir()) == []


def test_invalid_eval_fraction_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"eval_fraction=1\.5 cannot be used"):
        EvaluationShare(1.5)
