"""Notes of the training loop: step, phase and progress, written to the slot of this rank.

A note is two stores into mapped memory. Without a watch it goes to a dummy slot, so that callers need no condition.
"""

import contextlib
from array import array
from collections.abc import Iterator

from forgather._watch.board import BATCHES, COUNT, NUM_CELLS, PHASE, STEP

_dummy: "array[int] | memoryview" = array("Q", [0] * NUM_CELLS)
_cells = _dummy


def note(phase: int) -> None:
    """Note that this rank is in `phase` and makes progress."""
    cells = _cells
    cells[PHASE] = phase
    cells[COUNT] += 1


def note_progress() -> None:
    """Note progress within the phase. Another thread than that of training may call it."""
    _cells[COUNT] += 1


def enter(phase: int) -> int:
    """Note a phase; return the phase before, for `note` at its end."""
    before = _cells[PHASE]
    note(phase)
    return before


def note_step(step: int) -> None:
    """Note the number of the step that begins."""
    _cells[STEP] = step


def note_batch(phase: int) -> None:
    """Note the end of an evaluation batch."""
    _cells[BATCHES] += 1
    note(phase)


@contextlib.contextmanager
def in_phase(phase: int) -> Iterator[None]:
    """Note a phase for the body, and the phase before after it."""
    before = enter(phase)
    try:
        yield
    finally:
        note(before)


def write_to(cells: memoryview | None) -> None:
    """Send later notes to these cells, or to the dummy slot."""
    global _cells
    _cells = _dummy if cells is None else cells
