"""Stacks of ranks on other nodes: the request and the answers travel through the store of the job."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from forgather._watch.board import STACKS_DONE, Board, asked_stacks_path
from forgather.ml.distributed.watch.stacks_on_request import _of_others
from forgather.ml.distributed.watch.store_notes import StoreNotes, ask_for_stacks


@pytest.fixture
def other_node(tmp_path: Path) -> Iterator[Board]:
    """Board of a node with rank 1 of a job with two ranks."""
    board = Board(str(tmp_path / "board"), 2)
    board.register(1, "elsewhere")
    yield board
    board.close()


def exchange(notes: StoreNotes, board: Board, store: TCPStore) -> None:
    # The store threads of a node take turns by this time.
    board.published_at = 0
    notes._exchange(store)


def test_stacks_of_another_node_arrive(other_node: Board) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notes = StoreNotes(other_node)
    exchange(notes, other_node, store)
    assert other_node.stacks_asked == 0
    ask_for_stacks(store, 3)
    exchange(notes, other_node, store)
    assert other_node.stacks_asked == 3
    # The sentry of rank 1 writes its stacks, and the next exchange sends them.
    Path(asked_stacks_path(other_node, 1)).write_text("Thread MainThread: far away")
    other_node.cells[1][STACKS_DONE] = 3
    thread = threading.Thread(target=exchange, args=(notes, other_node, store))
    thread.start()
    assert _of_others(store, [1], 3) == {1: "Thread MainThread: far away"}
    thread.join()
