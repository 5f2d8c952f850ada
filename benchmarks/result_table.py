"""Result tables of benchmarks, for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class ResultTable:
    """Table for the terminal and for Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    highlighted: str
    """Name of the row that is printed in bold."""

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
    """Write facts, tables and notes of a benchmark to a Markdown file."""
    text = [*(f"- {fact}" for fact in facts), "", *(table.as_markdown() for table in tables)]
    path.write_text("\n".join([*text, *(f"- {note}" for note in notes)]) + "\n")
