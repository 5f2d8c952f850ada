"""Documents: the texts of files, of JSON lines, of parquet columns and of Hugging Face datasets on disk.

Text and JSON lines may be compressed: .gz, .bz2, .xz and .zst.
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

_JSON_LINES = (".jsonl", ".ndjson")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_NUM_BYTES_LOOKED_AT = 8192


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
    if not isinstance(dataset, dict) and split != "train":
        raise ValueError(
            f"The dataset in {path!r} has no splits, so data.eval_split={split!r} names nothing in it, and an evaluation would "
            "use the training data. Leave data.eval_split out: data.eval_fraction of the documents are then kept from training."
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
    """The reader for the format in a file's name; the ending of a compression is not part of it."""
    suffix = Path(Path(path).stem if is_compressed(path) else path).suffix.lower()
    if suffix in _JSON_LINES:
        return _read_json_lines
    if suffix != ".parquet":
        return _read_text
    if is_compressed(path):
        raise ValueError(
            f"{path}: parquet files are compressed inside, and are not read from {Path(path).suffix} files."
        )
    return _read_parquet


def _read_text(path: str, text_field: str) -> Iterator[str]:
    with _open(path) as file:
        data = file.read()
    if b"\0" in data[:_NUM_BYTES_LOOKED_AT]:
        raise ValueError(
            f"{path} is not text in UTF-8: there are zero bytes in it, as in archives, in binary formats and in UTF-16. What "
            f"can be read: text, JSON lines ({', '.join(_JSON_LINES)}), both also compressed ({', '.join(_COMPRESSIONS)}), "
            "and .parquet."
        )
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
            yield row if isinstance(row, str) else _text_of(row, text_field, f"{path}, line {number}")


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed."""
    suffix = Path(path).suffix.lower()
    try:
        with _opened(path, suffix) as file:
            yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # An error of the system, such as a missing right, not one of the format.
            raise
        raise ValueError(f"{path} cannot be decompressed as its ending {suffix} says: {error}.") from None


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
        for batch in file.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield str(text)


def _text_of(row: object, text_field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        raise _no_text_error(where, text_field, list(row) if isinstance(row, dict) else [])
    return str(row[text_field])


def _no_text_error(where: str, text_field: str, fields: Sequence[str]) -> ValueError:
    has = f"it has {', '.join(map(repr, fields))}" if fields else "it has no fields"
    return ValueError(
        f"{where} has no text in field {text_field!r}; {has}. Set data.text_field to the one to train on."
    )


def _require(module: str, path: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"Reading {path!r} needs the package {package!r}: pip install {package}") from None
