"""Documents from text files, JSON lines and datasets."""

import json
from pathlib import Path

import pytest

from forgather.data.documents import find_files, read_documents, read_saved_dataset
from forgather.data.standard_library import standard_library_documents


def test_globs_and_paths_give_files_in_a_fixed_order_without_duplicates(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "folder/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = find_files([str(tmp_path / "b.txt"), str(tmp_path / "**/*.txt")])
    assert [Path(path).name for path in files] == ["b.txt", "a.txt", "c.txt"]
    assert list(read_documents(files)) == ["b.txt", "a.txt", "folder/c.txt"]


def test_pattern_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No file matches .*nothing-\*\.txt"):
        find_files([str(tmp_path / "nothing-*.txt")])


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two"}\n"three"\n')
    assert list(read_documents([str(path)], "body")) == ["one", "two", "three"]


def test_json_line_without_the_field_names_file_line_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"body": "two"}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 has no text in field 'text'; it has 'body'"):
        list(read_documents([str(path)]))


def test_invalid_json_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON"):
        list(read_documents([str(path)]))


def test_missing_dataset_directory_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no dataset directory 'nowhere'"):
        list(read_saved_dataset("nowhere"))


def test_standard_library_documents_are_deterministic_and_within_the_limit() -> None:
    first = list(standard_library_documents(max_bytes=200_000))
    assert first == list(standard_library_documents(max_bytes=200_000))
    assert 0 < sum(len(text.encode()) for text in first) <= 200_000
