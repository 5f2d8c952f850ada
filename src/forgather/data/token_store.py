"""Tokenisation of documents into token arrays, in memory or in memory-mapped files that later runs reuse.

Files are keyed by a hash of the sources, the tokenizer and the evaluation split, and created by an atomic rename. Ranks
that tokenise the same documents get the same arrays. Called by the data builders of the command line.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import ArrayLike

from forgather._run_files import open_in_run
from forgather.data.byte_tokenizer import encode_bytes, is_byte_tokenizer
from forgather.data.documents import FileDocuments
from forgather.data.sources import DocumentSources

SPLITS = ("train", "eval")
# Part of the cache key: increase it when the stored tokens change.
_FORMAT = 1
_DOCUMENTS_AT_ONCE = 64
_NUMBERS = "documents.npy"
_COUNTS = "documents_of_files.npy"


class TextTokenizer(Protocol):
    """Interface of a Hugging Face tokenizer that tokenisation needs."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a document."""

    @property
    def pad_token_id(self) -> int | None:
        """Token that pads sequences."""

    def __len__(self) -> int:
        """Return the size of the vocabulary."""

    def __call__(self, text: list[str], **options: bool) -> Mapping[str, list[list[int]]]:
        """Return the token ids of each text under the key "input_ids"."""


@dataclass(frozen=True)
class TokenArray:
    """Concatenated tokens of documents, and the position of each document's first token."""

    tokens: np.ndarray
    document_starts: np.ndarray
    sources: DocumentSources | None = None
    """Where the documents came from; None for token files of an earlier version."""

    @property
    def num_documents(self) -> int:
        return len(self.document_starts)


@dataclass(frozen=True)
class EvaluationShare:
    """Choice of the documents that are kept for evaluation; depends on the seed and on document numbers only."""

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"eval_fraction={self.fraction} cannot be used: it must be at least 0 and less than 1.")

    def takes(self, number: int) -> bool:
        """Return whether the document with this number is for evaluation."""
        # Hash each number instead of sampling from all: documents appended later do not change the choice.
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") < self.fraction * 2**64


def tokenize(documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare) -> dict[str, TokenArray]:
    """Return the tokens of both splits, in memory."""
    parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
    for split, number, tokens in _tokenized(documents, tokenizer, share):
        parts[split].append(tokens)
        numbers[split].append(number)
    return {split: _joined(parts[split], numbers[split], token_dtype(tokenizer)) for split in SPLITS}


def tokenize_to_files(
    documents: Iterable[str],
    tokenizer: TextTokenizer,
    share: EvaluationShare,
    folder: str,
    sources: Sequence[str],
    *,
    scratch: str | None = None,
    may_write: bool = True,
) -> dict[str, TokenArray]:
    """Return the tokens of both splits, memory-mapped from files below `folder`.

    Existing files are reused as long as sources, tokenizer and share are the same. New files are written below
    `scratch`, if it is given: `folder` is then only read. `may_write=False` raises FileNotFoundError instead of reading
    the documents.
    """
    name = f"tokens-{store_key(tokenizer, share, sources)}"
    path = Path(folder) / name
    if not path.is_dir() and scratch is not None:
        path = Path(scratch) / name
    if not path.is_dir():
        if not may_write:
            raise FileNotFoundError(
                f"{folder} has no tokens of these files: they were changed or moved since training."
            )
        os.makedirs(path.parent, exist_ok=True)
        _write_store(documents, tokenizer, share, path)
    files = documents.files if isinstance(documents, FileDocuments) else ()
    return {split: _mapped(path, split, token_dtype(tokenizer), files) for split in SPLITS}


def split_by_tokens(array: TokenArray, fraction: float) -> dict[str, TokenArray]:
    """Split by position: the last `fraction` of the tokens is for evaluation, the rest for training.

    For sets of documents that are too small to choose documents from.
    """
    num_tokens = len(array.tokens)
    # A sequence needs 2 tokens: one to predict from and one to predict.
    num_kept = max(math.ceil(num_tokens * fraction), 2)
    if num_tokens < num_kept + 2:
        raise ValueError(
            f"{num_tokens} token(s) are too few for training and evaluation. Add text or data.eval_files, or turn "
            "evaluation off with args.eval_strategy='no'."
        )
    split = num_tokens - num_kept
    starts = array.document_starts
    later = starts[starts > split] - split
    sources = array.sources
    return {
        "train": TokenArray(
            _cut(array.tokens, 0, split),
            starts[starts < split],
            None if sources is None else sources.chosen(np.flatnonzero(starts < split)),
        ),
        # The first document may have begun before the split, so offsets in it are unknown.
        "eval": TokenArray(_cut(array.tokens, split, num_tokens), np.concatenate([np.zeros(1, dtype=np.int64), later])),
    }


def _cut(tokens: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return a slice of an array; for a memory-mapped file, a new mapping with its own offset."""
    if not isinstance(tokens, np.memmap):
        return tokens[begin:end]
    # A numpy slice of a memmap keeps the offset of the full file, and `PackedTokens` pickles by offset.
    offset = tokens.offset + begin * tokens.itemsize
    assert tokens.filename is not None
    return np.memmap(tokens.filename, dtype=tokens.dtype, mode="r", offset=offset, shape=(end - begin,))


def store_key(tokenizer: TextTokenizer, share: EvaluationShare, sources: Sequence[str]) -> str:
    """Return a hash of everything that the tokens depend on."""
    identity = [_FORMAT, _tokenizer_identity(tokenizer), share.fraction, share.seed, *sources]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def file_identity(path: str) -> str:
    """Return path, size and modification time of a file; an edit changes at least one of them."""
    status = os.stat(path)
    return f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"


def token_dtype(tokenizer: TextTokenizer) -> np.dtype[Any]:
    """Return the smallest dtype that holds all token ids."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def _tokenized(
    documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield split, number and tokens of each document that is not empty."""
    numbered = enumerate(documents)
    while chunk := list(itertools.islice(numbered, _DOCUMENTS_AT_ONCE)):
        texts = [text for _, text in chunk]
        for (number, text), tokens in zip(chunk, _encode(tokenizer, texts), strict=True):
            # Empty documents keep their number, so that filling one in does not move other documents between the
            # splits.
            if text:
                yield ("eval" if share.takes(number) else "train"), number, tokens


def _encode(tokenizer: TextTokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the tokens of each text, followed by the end-of-document token if the tokenizer has one."""
    if is_byte_tokenizer(tokenizer):
        encoded: Sequence[ArrayLike] = [encode_bytes(text) for text in texts]
    else:
        # verbose=False: documents longer than a model's context are fine, since they are cut later. Special tokens are
        # off because the end-of-document token is added below.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = token_dtype(tokenizer)
    return [np.concatenate([np.asarray(ids, dtype=dtype), np.asarray(end, dtype=dtype)]) for ids in encoded]


def _joined(parts: list[np.ndarray], numbers: list[int], dtype: np.dtype[Any]) -> TokenArray:
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
    sources = DocumentSources(np.asarray(numbers, dtype=np.int64))
    return TokenArray(tokens, _starts([len(part) for part in parts]), sources)


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else np.zeros(0, dtype=np.int64)


def _write_store(documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare, path: Path) -> None:
    """Write into a temporary sibling directory, then rename it: a killed run leaves nothing that looks complete."""
    # In the same folder, since a rename cannot cross file systems.
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-tokens-", dir=path.parent))
    try:
        lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
        numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
        files: dict[str, BinaryIO] = {split: open(temporary / f"{split}.bin", "wb") for split in SPLITS}  # noqa: SIM115
        try:
            for split, number, tokens in _tokenized(documents, tokenizer, share):
                tokens.tofile(files[split])
                lengths[split].append(len(tokens))
                numbers[split].append(number)
        finally:
            for file in files.values():
                file.close()
        for split in SPLITS:
            np.save(temporary / f"{split}_starts.npy", _starts(lengths[split]))
            np.save(temporary / f"{split}_{_NUMBERS}", np.asarray(numbers[split], dtype=np.int64))
        counts = documents.counts if isinstance(documents, FileDocuments) else []
        np.save(temporary / _COUNTS, np.asarray(counts, dtype=np.int64))
        _move_into_place(temporary, path)
    finally:
        # After a successful rename there is nothing left to remove.
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError:
        # Another process finished first. It wrote the same tokens, since the name is a hash of all inputs.
        if not path.is_dir():
            raise


def _mapped(path: Path, split: str, dtype: np.dtype[Any], files: Sequence[str]) -> TokenArray:
    starts = _array_in(path, f"{split}_starts.npy", _read_npy)
    sources = None
    # Earlier versions did not write these files.
    if os.path.lexists(path / _COUNTS):
        numbers, counts = _array_in(path, f"{split}_{_NUMBERS}", _read_npy), _array_in(path, _COUNTS, _read_npy)
        sources = DocumentSources(numbers, files, counts.tolist())
    if len(starts) == 0:
        # Empty files cannot be memory-mapped.
        return TokenArray(np.zeros(0, dtype=dtype), starts, sources)
    tokens = _array_in(path, f"{split}.bin", lambda file: np.memmap(file, dtype=dtype, mode="r"))
    return TokenArray(tokens, starts, sources)


def _read_npy(file: IO[bytes]) -> np.ndarray:
    # Not np.load: it reads archives and pickles too.
    found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _array_in(folder: Path, name: str, read: Callable[[IO[bytes]], np.ndarray]) -> np.ndarray:
    # Tokens in a run of somebody else may be links, FIFOs or damaged.
    with open_in_run(os.fspath(folder), name) as file:
        try:
            return read(file)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            raise ValueError(
                f"{folder / name} holds no tokens of an earlier run: {error}. Delete the folder {folder}; the tokens are then "
                "made again."
            ) from error


def _tokenizer_identity(tokenizer: TextTokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # The JSON of a fast tokenizer describes it completely. A slow one has no such form, so its name and size must
        # do.
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    return f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')} {len(tokenizer)}"
