"""Documents: the texts of files, of JSON lines, of parquet columns and of Hugging Face datasets on disk."""

import glob
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_JSON_LINES = (".jsonl", ".ndjson")


def find_files(patterns: Sequence[str]) -> list[str]:
    """The files that paths and globs name, in a fixed order, each once."""
    files: dict[str, None] = {}
    for pattern in patterns:
        found = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
        if not found:
            raise FileNotFoundError(
                f"No file matches {pattern!r} (looked in {os.getcwd()}). Paths and globs are relative to the current "
                "directory; '**' goes into folders."
            )
        files.update(dict.fromkeys(found))
    return list(files)


def read_documents(files: Sequence[str], text_field: str = "text") -> Iterator[str]:
    """The documents of files in their order: a text file is one, a JSON line or a parquet row is one each."""
    for path in files:
        yield from _reader(path)(path, text_field)


def read_saved_dataset(path: str, text_field: str = "text", split: str = "train") -> Iterator[str]:
    """The documents of a dataset that `datasets` saved with `save_to_disk`."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"There is no dataset directory {path!r}.")
    datasets = _require("datasets", path)
    dataset = datasets.load_from_disk(path)
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f"The dataset in {path!r} has no split {split!r}; it has {', '.join(map(repr, dataset))}.")
        dataset = dataset[split]
    for number, row in enumerate(dataset):
        yield _text_of(row, text_field, f"{path}, row {number}")


def _reader(path: str) -> Callable[[str, str], Iterator[str]]:
    suffix = Path(path).suffix.lower()
    if suffix in _JSON_LINES:
        return _read_json_lines
    return _read_parquet if suffix == ".parquet" else _read_text


def _read_text(path: str, text_field: str) -> Iterator[str]:
    yield Path(path).read_text(encoding="utf-8", errors="replace")


def _read_json_lines(path: str, text_field: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
            yield row if isinstance(row, str) else _text_of(row, text_field, f"{path}, line {number}")


def _read_parquet(path: str, text_field: str) -> Iterator[str]:
    parquet = _require("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise _no_text_error(path, text_field, file.schema_arrow.names)
        for batch in file.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield str(text)


def _text_of(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        raise _no_text_error(where, text_field, list(row) if isinstance(row, dict) else [])
    return str(row[text_field])


def _no_text_error(where: str, text_field: str, fields: Sequence[str]) -> ValueError:
    has = f"it has {', '.join(map(repr, fields))}" if fields else "it has no fields"
    return ValueError(
        f"{where} has no text in field {text_field!r}; {has}. Set data.text_field to the one to train on."
    )


def _require(module: str, path: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"Reading {path!r} needs the package {package!r}: pip install {package}") from None
