"""Sources of samples: file, document and offset of each part, also for token files that are reused."""

import json
from pathlib import Path

import pytest

from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.documents import read_documents
from forgather.data.packed import PackedTokens
from forgather.data.sources import Place, SourceSpan
from forgather.data.token_store import EvaluationShare, split_by_tokens, tokenize_to_files

TEXTS = [f"line {number}" + "x" * number for number in range(9)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A text file, JSON lines with an empty document, and an empty text file before another."""
    rows = [json.dumps({"text": text}) for text in (*TEXTS[:4], "", *TEXTS[4:])]
    contents = {"a.txt": "first text", "b.jsonl": "\n".join(rows), "c.txt": "", "d.txt": "last text"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return [str(tmp_path / name) for name in contents]


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_every_part_of_a_sample_is_found_in_its_document(files: list[str], tmp_path: Path, fraction: float) -> None:
    texts = {
        (files[0], 0): "first text",
        **{(files[1], number): text for number, text in enumerate((*TEXTS[:4], "", *TEXTS[4:]))},
        (files[3], 0): "last text",
    }
    # The second time, the token files exist and no document is read.
    for _ in range(2):
        arrays = tokenize_to_files(
            read_documents(files), byte_tokenizer(), EvaluationShare(fraction), str(tmp_path / "tokens"), ["key"]
        )
        array = arrays["train"]
        dataset = PackedTokens(array.tokens, array.document_starts, 8, sources=array.sources)
        for index in range(len(dataset)):
            ids = dataset[index]["input_ids"].tolist()
            for place, offset, begin, num_tokens in dataset.source_of(index):
                assert place is not None and place.file is not None
                document = [*texts[(place.file, place.number)].encode(), 256]
                assert ids[begin : begin + num_tokens] == document[offset : offset + num_tokens]
        covered = sum(span.num_tokens for index in range(len(dataset)) for span in dataset.source_of(index))
        assert covered == len(array.tokens)


def test_tokens_are_not_written_if_that_is_forbidden(files: list[str], tmp_path: Path) -> None:
    share, folder = EvaluationShare(0.0), str(tmp_path / "tokens")
    with pytest.raises(FileNotFoundError, match="changed or moved"):
        tokenize_to_files(read_documents(files), byte_tokenizer(), share, folder, ["key"], may_write=False)
    assert not (tmp_path / "tokens").exists()


def test_a_split_by_tokens_keeps_the_sources_of_training(files: list[str], tmp_path: Path) -> None:
    arrays = tokenize_to_files(
        read_documents(files), byte_tokenizer(), EvaluationShare(0.0), str(tmp_path / "tokens"), ["key"]
    )
    train = split_by_tokens(arrays["train"], 0.5)["train"]
    dataset = PackedTokens(train.tokens, train.document_starts, 4, sources=train.sources)
    assert dataset.source_of(0) == [SourceSpan(Place(files[0], 0), 0, 0, 4)]
    assert dataset.source_of(len(dataset) - 1)[0].place is not None
