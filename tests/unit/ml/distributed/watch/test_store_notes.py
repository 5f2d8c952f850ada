"""Notes of ranks on other nodes travel through the store of the job, and those of strangers are ignored."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from forgather._watch.board import PUBLISHED, STACKS_DONE, STEP, Board, asked_stacks_path
from forgather.ml.distributed.watch.stacks_on_request import _of_others
from forgather.ml.distributed.watch.store_notes import NoteStore, StoreNotes, ask_for_stacks


@pytest.fixture
def other_node(tmp_path: Path) -> Iterator[Board]:
    """Board of a node with rank 1 of a job with two ranks."""
    board = Board(str(tmp_path / "board"), 2)
    board.register(1, "elsewhere")
    yield board
    board.close()


def exchange(notes: StoreNotes, board: Board, store: NoteStore) -> None:
    # The store threads of a node take turns by this time.
    board.published_at = 0
    notes._exchange(store)


def test_stacks_of_another_node_arrive(other_node: Board) -> None:
    store = NoteStore(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), b"key")
    notes = StoreNotes(other_node)
    exchange(notes, other_node, store)
    assert other_node.stacks_asked == 0
    ask_for_stacks(store.sealed, 3)
    exchange(notes, other_node, store)
    assert other_node.stacks_asked == 3
    # The sentry of rank 1 writes its stacks, and the next exchange sends them.
    Path(asked_stacks_path(other_node, 1)).write_text("Thread MainThread: far away")
    other_node.cells[1][STACKS_DONE] = 3
    thread = threading.Thread(target=exchange, args=(notes, other_node, store))
    thread.start()
    assert _of_others(store.sealed, [1], 3) == {1: "Thread MainThread: far away"}
    thread.join()


@pytest.fixture
def this_node(tmp_path: Path) -> Iterator[Board]:
    """Board of a node with rank 0 of the same job."""
    board = Board(str(tmp_path / "this"), 2)
    board.register(0, "here")
    yield board
    board.close()


def test_messages_of_strangers_are_ignored(this_node: Board, other_node: Board) -> None:
    torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, stranger = NoteStore(torchs, b"key"), NoteStore(torchs, b"another")
    here, there = StoreNotes(this_node), StoreNotes(other_node)
    other_node.cells[1][STEP] = 7
    exchange(there, other_node, ours)
    exchange(here, this_node, ours)
    assert this_node.cells[1][STEP] == 7
    recorded = torchs.get("1")
    other_node.cells[1][STEP] = 8
    exchange(there, other_node, ours)
    exchange(here, this_node, ours)
    published = this_node.cells[1][PUBLISHED]
    forged = {"text": "\x1b[2Jall is lost", "culprits": [0], "at": 0}
    # Signed with another key, not signed at all, played back, and signed under another name.
    for attack in (
        lambda: stranger.sealed.set("verdict", json.dumps(forged)),
        lambda: torchs.set("verdict", json.dumps(forged)),
        lambda: stranger.publish({1: other_node.slot(1)}),
        lambda: torchs.set("1", recorded),
        lambda: torchs.set("1", torchs.get("0")),
        lambda: torchs.set("verdict", recorded),
        lambda: torchs.set("stacks_asked", "9"),
    ):
        attack()
        exchange(here, this_node, ours)
        assert this_node.verdict is None and this_node.stacks_asked == 0
        assert (this_node.cells[1][STEP], this_node.cells[1][PUBLISHED]) == (8, published)
    # The true note replaces the forged one, and a true verdict is believed.
    exchange(there, other_node, ours)
    exchange(here, this_node, ours)
    assert this_node.cells[1][PUBLISHED] == published + 1
    other_node.set_verdict({"text": "rank 1 died\x1b[2J", "culprits": [1]})
    exchange(there, other_node, ours)
    exchange(here, this_node, ours)
    assert this_node.verdict is not None and this_node.verdict["text"] == "rank 1 died\u241b[2J"
