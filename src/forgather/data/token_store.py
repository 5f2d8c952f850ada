"""From documents to arrays of tokens, in memory or in files that the next run finds again."""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import ArrayLike

from forgather.data.byte_tokenizer import encode_bytes, is_byte_tokenizer

SPLITS = ("train", "eval")
_FORMAT = 1
_DOCUMENTS_AT_ONCE = 64


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that makes tokens of text."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a document."""

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up sequences."""

    def __len__(self) -> int:
        """The size of the vocabulary."""

    def __call__(self, text: list[str], **options: bool) -> Mapping[str, list[list[int]]]:
        """The token ids of each text, under the key "input_ids"."""


@dataclass(frozen=True)
class TokenArray:
    """The tokens of documents end to end, and where each document begins."""

    tokens: np.ndarray
    document_starts: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.document_starts)


@dataclass(frozen=True)
class EvaluationShare:
    """Which documents are kept from training: the same ones for the same seed, whatever the texts."""

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"eval_fraction={self.fraction} cannot be used: it is a share from 0 to below 1.")

    def takes(self, number: int) -> bool:
        """Whether the document of this number is for evaluation; documents that come later change nothing for it."""
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") < self.fraction * 2**64


def tokenize(documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare) -> dict[str, TokenArray]:
    """The tokens of both splits, in memory."""
    parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for split, tokens in _tokenized(documents, tokenizer, share):
        parts[split].append(tokens)
    return {split: _joined(parts[split], token_dtype(tokenizer)) for split in SPLITS}


def tokenize_to_files(
    documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare, folder: str, sources: Sequence[str]
) -> dict[str, TokenArray]:
    """The same in files below `folder`, memory-mapped; found again as long as sources, tokenizer and share are the same."""
    key = store_key(tokenizer, share, sources)
    path = Path(folder) / f"tokens-{key}"
    if not path.is_dir():
        os.makedirs(folder, exist_ok=True)
        _write_store(documents, tokenizer, share, path)
    return {split: _mapped(path, split, token_dtype(tokenizer)) for split in SPLITS}


def split_by_tokens(array: TokenArray, fraction: float) -> dict[str, TokenArray]:
    """The tokens in front for training, the last `fraction` of them for evaluation: for documents too few to choose from."""
    num_tokens = len(array.tokens)
    num_kept = max(math.ceil(num_tokens * fraction), 2)
    if num_tokens < num_kept + 2:
        raise ValueError(
            f"{num_tokens} token(s) are too few to train and to evaluate on. Give more text, or data.eval_files; or turn "
            "evaluations off by args.eval_strategy='no'."
        )
    split = num_tokens - num_kept
    starts = array.document_starts
    later = starts[starts > split] - split
    return {
        "train": TokenArray(_cut(array.tokens, 0, split), starts[starts < split]),
        "eval": TokenArray(_cut(array.tokens, split, num_tokens), np.concatenate([np.zeros(1, dtype=np.int64), later])),
    }


def _cut(tokens: np.ndarray, begin: int, end: int) -> np.ndarray:
    """A piece of an array; of a file, a mapping of its own, which knows its place."""
    if not isinstance(tokens, np.memmap):
        return tokens[begin:end]
    offset = tokens.offset + begin * tokens.itemsize
    assert tokens.filename is not None
    return np.memmap(tokens.filename, dtype=tokens.dtype, mode="r", offset=offset, shape=(end - begin,))


def store_key(tokenizer: TextTokenizer, share: EvaluationShare, sources: Sequence[str]) -> str:
    """Changes with anything that the tokens depend on."""
    identity = [_FORMAT, _tokenizer_identity(tokenizer), share.fraction, share.seed, *sources]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def file_identity(path: str) -> str:
    """Name, size and time of a file: what changes when it is edited."""
    status = os.stat(path)
    return f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"


def token_dtype(tokenizer: TextTokenizer) -> np.dtype[Any]:
    """The smallest type that holds all token ids."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def _tokenized(
    documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare
) -> Iterator[tuple[str, np.ndarray]]:
    """Split and tokens of each document that is not empty."""
    numbered = enumerate(documents)
    while chunk := list(itertools.islice(numbered, _DOCUMENTS_AT_ONCE)):
        texts = [text for _, text in chunk]
        for (number, text), tokens in zip(chunk, _encode(tokenizer, texts), strict=True):
            if text:
                yield ("eval" if share.takes(number) else "train"), tokens


def _encode(tokenizer: TextTokenizer, texts: list[str]) -> list[np.ndarray]:
    """The tokens of each text, with the token that ends a document if the tokenizer has one."""
    if is_byte_tokenizer(tokenizer):
        encoded: Sequence[ArrayLike] = [encode_bytes(text) for text in texts]
    else:
        # Documents are longer than what models take at once, which tokenizers would warn of; they are cut later.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = token_dtype(tokenizer)
    return [np.concatenate([np.asarray(ids, dtype=dtype), np.asarray(end, dtype=dtype)]) for ids in encoded]


def _joined(parts: list[np.ndarray], dtype: np.dtype[Any]) -> TokenArray:
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
    return TokenArray(tokens, _starts([len(part) for part in parts]))


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else np.zeros(0, dtype=np.int64)


def _write_store(documents: Iterable[str], tokenizer: TextTokenizer, share: EvaluationShare, path: Path) -> None:
    """Write beside the final place and move there: a run that is killed leaves nothing that looks complete."""
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-tokens-", dir=path.parent))
    try:
        lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
        files: dict[str, BinaryIO] = {split: open(temporary / f"{split}.bin", "wb") for split in SPLITS}  # noqa: SIM115
        try:
            for split, tokens in _tokenized(documents, tokenizer, share):
                tokens.tofile(files[split])
                lengths[split].append(len(tokens))
        finally:
            for file in files.values():
                file.close()
        for split in SPLITS:
            np.save(temporary / f"{split}_starts.npy", _starts(lengths[split]))
        _move_into_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError:
        # Another process was first; it wrote the same.
        if not path.is_dir():
            raise


def _mapped(path: Path, split: str, dtype: np.dtype[Any]) -> TokenArray:
    starts = np.load(path / f"{split}_starts.npy")
    if len(starts) == 0:
        # An empty file cannot be mapped.
        return TokenArray(np.zeros(0, dtype=dtype), starts)
    return TokenArray(np.memmap(path / f"{split}.bin", dtype=dtype, mode="r"), starts)


def _tokenizer_identity(tokenizer: TextTokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    return f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')} {len(tokenizer)}"
