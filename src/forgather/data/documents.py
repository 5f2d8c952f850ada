"""Reading of documents: text files, JSON lines, parquet columns, and Hugging Face datasets on disk.

Text and JSON lines may be compressed (.gz, .bz2, .xz, .zst). Documents are streamed in a fixed order, so that every
rank and every run sees the same sequence. Called by the data builders of the command line.
"""

import bz2
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from forgather._extras import MissingPackageError, missing_message

_JSON_LINES = (".jsonl", ".ndjson")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_NUM_BYTES_LOOKED_AT = 8192


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that paths and globs match, in a fixed order, each once."""
    files: dict[str, None] = {}
    for pattern in patterns:
        # The order of glob is the order of the file system, which differs between machines.
        found = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
        if not found:
            raise FileNotFoundError(
                f"No file matches {pattern!r} (looked in {os.getcwd()}). Paths and globs are relative to the current "
                "directory; '**' matches folders recursively."
            )
        files.update(dict.fromkeys(found))
    return list(files)


class FileDocuments:
    """Documents of files in order: each text file, JSON line and parquet row is one document."""

    def __init__(self, files: Sequence[str], text_field: str) -> None:
        self.files = list(files)
        self.counts: list[int] = []
        """Documents of each file that has been read to its end, in the last pass."""
        self._text_field = text_field

    def __iter__(self) -> Iterator[str]:
        self.counts = []
        for path in self.files:
            number = 0
            for text in _reader(path)(path, self._text_field):
                number += 1
                yield text
            self.counts.append(number)


def read_documents(files: Sequence[str], text_field: str = "text") -> FileDocuments:
    """Return the documents of the files, which are read when they are iterated."""
    return FileDocuments(files, text_field)


def read_saved_dataset(path: str, text_field: str = "text", split: str = "train") -> Iterator[str]:
    """Yield the documents of a dataset that was saved with `save_to_disk` of `datasets`."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"There is no dataset directory {path!r}.")
    datasets = _require("datasets", path)
    dataset = datasets.load_from_disk(path)
    if not isinstance(dataset, dict) and split != "train":
        raise ValueError(
            f"The dataset in {path!r} has no splits, so data.eval_split={split!r} cannot be used: evaluation would use the "
            "training data. Remove data.eval_split: data.eval_fraction of the documents are then kept for evaluation."
        )
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f"The dataset in {path!r} has no split {split!r}; it has {', '.join(map(repr, dataset))}.")
        dataset = dataset[split]
    for number, row in enumerate(dataset):
        yield _text_of(row, text_field, f"{path}, row {number}")


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in _COMPRESSIONS


def _reader(path: str) -> Callable[[str, str], Iterator[str]]:
    """Return the reader for the format in a file's name, without the suffix of a compression."""
    suffix = Path(Path(path).stem if is_compressed(path) else path).suffix.lower()
    if suffix in _JSON_LINES:
        return _read_json_lines
    if suffix != ".parquet":
        return _read_text
    if is_compressed(path):
        raise ValueError(
            f"{path}: parquet files are compressed internally and cannot be read from {Path(path).suffix} files."
        )
    return _read_parquet


def _read_text(path: str, text_field: str) -> Iterator[str]:
    with _open(path) as file:
        data = file.read()
    # Text has no zero bytes, but archives, binary formats and UTF-16 do.
    if b"\0" in data[:_NUM_BYTES_LOOKED_AT]:
        raise ValueError(
            f"{path} is not UTF-8 text: it contains zero bytes, like archives, binary formats and UTF-16. Supported files: "
            f"text and JSON lines ({', '.join(_JSON_LINES)}), also compressed ({', '.join(_COMPRESSIONS)}), and .parquet."
        )
    # A few invalid bytes should not stop a run over many files.
    yield data.decode(encoding="utf-8", errors="replace")


def _read_json_lines(path: str, text_field: str) -> Iterator[str]:
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
            # A line may also be a JSON string instead of an object.
            yield row if isinstance(row, str) else _text_of(row, text_field, f"{path}, line {number}")


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed."""
    suffix = Path(path).suffix.lower()
    try:
        with _opened(path, suffix) as file:
            yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # A system error, such as missing permission, and not an error of the compressed format.
            raise
        raise ValueError(f"{path} cannot be decompressed as {suffix}: {error}.") from None


def _opened(path: str, suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".bz2":
        return bz2.open(path)
    if suffix == ".xz":
        return lzma.open(path)
    if suffix == ".zst":
        file: IO[bytes] = _require("zstandard", path).open(path)
        return file
    return open(path, "rb")


def _read_parquet(path: str, text_field: str) -> Iterator[str]:
    parquet = _require("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise _no_text_error(path, text_field, file.schema_arrow.names)
        # In batches, so that a large file is not loaded at once.
        for batch in file.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                # Null values of a column are not documents.
                if text is not None:
                    yield str(text)


def _text_of(row: object, text_field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        raise _no_text_error(where, text_field, list(row) if isinstance(row, dict) else [])
    return str(row[text_field])


def _no_text_error(where: str, text_field: str, fields: Sequence[str]) -> ValueError:
    has = f"it has {', '.join(map(repr, fields))}" if fields else "it has no fields"
    return ValueError(
        f"{where} has no text in field {text_field!r}; {has}. Set data.text_field to the field to train on."
    )


def _require(module: str, path: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(f"{missing_message(f'Reading {path!r}', package)}.") from None
