"""Fixture that undoes the process-wide set-up of the command line after each test."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    environment, root, own = dict(os.environ), logging.getLogger(), logging.getLogger("forgather")
    handlers, levels, path = list(root.handlers), (root.level, own.level), list(sys.path)
    yield
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
