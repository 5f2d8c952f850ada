"""The program sets up its process; tests that call it in theirs undo that."""

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    environment, root, own = dict(os.environ), logging.getLogger(), logging.getLogger("forgather")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    os.environ.clear()
    os.environ.update(environment)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
