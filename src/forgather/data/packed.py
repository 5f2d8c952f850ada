"""Packing: the tokens of many documents as a dataset of sequences of equal length.

Built by the data builders of the command line over arrays of `token_store`, which may be memory-mapped.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from forgather.data.sources import DocumentSources, SourceSpan

IGNORED = -100


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Dataset of packed sequences: sequence i is the i-th slice of the concatenated tokens; the last one is padded.

    `document_starts` are the positions of the first tokens of documents. They get the label -100, since the beginning
    of a document cannot be predicted from the previous document. A sample is sliced on access, so the array may be
    memory-mapped and resuming at any sample costs nothing.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        sequence_length: int,
        padding_token: int = 0,
        sources: DocumentSources | None = None,
    ) -> None:
        if sequence_length < 2:
            raise ValueError(
                f"sequence_length={sequence_length} cannot be used: tokens are predicted from earlier tokens, so a "
                "sequence needs at least 2."
            )
        self.tokens = tokens
        self.document_starts = document_starts
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self.sources = sources

    def __len__(self) -> int:
        # Ceiling division: the last sequence may be incomplete.
        return -(-len(self.tokens) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)} sequences")
        begin = index * self.sequence_length
        end = min(begin + self.sequence_length, len(self.tokens))
        input_ids = torch.full((self.sequence_length,), self.padding_token)
        labels = torch.full((self.sequence_length,), IGNORED)
        # Embeddings and losses need int64. The array has the smallest dtype that fits.
        piece = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        input_ids[: end - begin] = piece
        labels[: end - begin] = piece
        # The starts are sorted, so a binary search finds those inside this slice.
        first, last = np.searchsorted(self.document_starts, (begin, end))
        labels[torch.from_numpy(self.document_starts[first:last] - begin)] = IGNORED
        return {"input_ids": input_ids, "labels": labels}

    def source_of(self, index: int) -> list[SourceSpan]:
        """Return the documents that a sample contains parts of, in order."""
        begin = index * self.sequence_length
        end = min(begin + self.sequence_length, len(self.tokens))
        # The document of the first token has begun at or before it.
        first, last = np.searchsorted(self.document_starts, (begin, end - 1), side="right") - 1
        spans = []
        for document in range(max(int(first), 0), int(last) + 1):
            start = int(self.document_starts[document])
            stop = int(self.document_starts[document + 1]) if document + 1 < len(self.document_starts) else end
            here = max(start, begin)
            place = None if self.sources is None else self.sources.place_of(document)
            spans.append(SourceSpan(place, here - start, here - begin, min(stop, end) - here))
        return spans

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a memory-mapped array by its file name, so that spawned workers map the file instead of copying it."""
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = (self.tokens.filename, self.tokens.dtype.str, self.tokens.offset, self.tokens.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], tuple):
            path, dtype, offset, shape = state["tokens"]
            state["tokens"] = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
        self.__dict__.update(state)
