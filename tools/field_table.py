"""Write the tables of docs/moving-from-transformers.md from the field map.

    python tools/field_table.py

replaces the text between the markers of the page. A test compares the page with the result.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from forgather.hf.fields.field_map import SEQ2SEQ, TRAINING, table
from forgather.hf.fields.kinds import Row

_TABLES: Mapping[str, Mapping[str, Row]] = {"training": TRAINING, "seq2seq": SEQ2SEQ}


def page() -> Path:
    """Return the path of the page."""
    return Path(__file__).resolve().parent.parent / "docs" / "moving-from-transformers.md"


def generated_page() -> str:
    """Return the text of the page with tables of the current field map."""
    text = page().read_text(encoding="utf-8")
    for name, rows in _TABLES.items():
        marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)", re.DOTALL)
        content = table(rows)
        text, count = marked.subn(lambda found, content=content: f"{found[1]}{content}{found[2]}", text)
        assert count == 1, f"the page has no markers for the table {name!r}"
    return text


if __name__ == "__main__":
    page().write_text(generated_page(), encoding="utf-8")
