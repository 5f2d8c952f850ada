"""Tables of results, for a terminal and for the documentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class ResultTable:
    """A table that can be shown on a terminal and in Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    highlighted: str
    """The row that the others are compared with."""

    def as_rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row, style="bold" if row[0] == self.highlighted else "")
        return table

    def as_markdown(self) -> str:
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def write_markdown(path: Path, facts: Sequence[str], tables: Sequence[ResultTable], notes: Sequence[str]) -> None:
    """Everything a benchmark says, in a file."""
    text = [*(f"- {fact}" for fact in facts), "", *(table.as_markdown() for table in tables)]
    path.write_text("\n".join([*text, *(f"- {note}" for note in notes)]) + "\n")
