"""Output shared by the commands: versioned JSON documents, tables, lines, and progress of long work on stderr.

Control characters become visible: text of a file, a peer or a job never reaches the terminal as it is.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from forgather._terminal_text import printable, printable_line
from forgather.cli.json_output import print_json as print_json
from forgather.ml.trainer.callbacks.display import can_draw, get_console

_WIDEST = 100_000


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str] = ()) -> None:
    """Print a table. `numeric` names the columns that are aligned to the right.

    Text from a checkpoint is never read as markup.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        header = Text(printable_line(name))
        table.add_column(header, justify="right" if name in numeric else "left", overflow="fold", no_wrap=False)
    for row in rows:
        table.add_row(*(Text("" if cell is None else printable_line(str(cell))) for cell in row))
    console = get_console()
    if console.is_terminal:
        console.print(table)
        return
    # A file or pipe has no width: a row stays on one line, so that `grep` and `awk` work.
    width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    Console(file=console.file, width=max(console.width, width), color_system=None).print(table)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress in bytes on stderr while the body runs, on terminals only; yields the function that advances it."""
    console = Console(stderr=True)
    if not can_draw(console):
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


def format_bytes(num_bytes: float) -> str:
    """Format a size with one decimal: 1.2 GB, 3.4 kB, 12 B."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def show_line(text: str) -> None:
    """Print a line of the result to stdout, without styles and wrapping."""
    print(printable_line(text))


def note(message: str) -> None:
    """Print a message for the user to stderr, where it does not mix with the result."""
    print(printable(message), file=sys.stderr, flush=True)
