"""Sources of documents: the file and the place in it that each document of a token array came from.

Recorded when documents are tokenised, so that a sample can be traced to its text without reading the data again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Place of a document."""

    file: str | None
    """File as it was named in the configuration; None if the documents did not come from files."""
    number: int
    """Number of the document in its file, from 0; without a file, among all documents."""


class SourceSpan(NamedTuple):
    """Part of a sample that comes from one document."""

    place: Place | None
    """None if the token files were written by an earlier version, which did not record it."""
    offset: int
    """Tokens of the document before this part."""
    begin: int
    """First token of the part in the sample."""
    num_tokens: int


@dataclass(frozen=True)
class DocumentSources:
    """Numbers of the documents of a token array, and the files that they were read from."""

    numbers: np.ndarray
    """Number of each document among all documents that were read, including those of the other split."""
    files: Sequence[str] = ()
    counts: Sequence[int] = ()
    """Documents in each file."""

    def place_of(self, document: int) -> Place:
        """Return the place of a document of the array."""
        number = int(self.numbers[document])
        ends = np.cumsum(self.counts, dtype=np.int64)
        file = int(np.searchsorted(ends, number, side="right"))
        if file >= min(len(ends), len(self.files)):
            return Place(None, number)
        return Place(self.files[file], number - int(ends[file]) + int(self.counts[file]))

    def chosen(self, documents: np.ndarray) -> "DocumentSources":
        """Return the sources of some documents, by their position in the array."""
        return DocumentSources(self.numbers[documents], self.files, self.counts)
