"""Code blocks of the documentation, and what the tests do with each. `python -m tests.docs.blocks` lists them.

HTML comments above a block, which the site does not show, tell the tests about it:

- `<!-- file: NAME -->`: the block is saved as this file.
- `<!-- prepare: NAME -->`: the function NAME of `tests/docs/preparation.py` makes what its commands need.
- `<!-- not run: REASON -->`: one machine cannot run the block.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [
    REPOSITORY / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if not path.parent.name.startswith("_")),
]
# Blocks that tests run or parse. A `console` block has commands behind `$ `, and the output below each.
RUN = ("python", "bash", "console")
# Output, pictures and fragments of text. {glossary} is a directive of the site.
SHOWN = ("text", "{glossary}")

_BLOCK = re.compile(
    r"(?P<notes>(?:^<!--[^>]*-->\n+)*)^```(?P<language>\S*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
_NOTE = re.compile(r"<!-- (file|prepare|not run): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """Code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None
    prepare: str | None
    not_run: str | None

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.file and not self.not_run

    @property
    def is_shell(self) -> bool:
        return self.is_run and self.language != "python"

    @property
    def use(self) -> str:
        """What the tests do with this block."""
        if self.not_run:
            return f"not run: {self.not_run}"
        if self.file:
            return f"saved as {self.file}"
        return "run" if self.is_run else {"yaml": "parsed"}.get(self.language, "shown only")


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        notes = dict(_NOTE.findall(match["notes"]))
        line = text.count("\n", 0, match.start("text"))
        parts = (notes.get(name) for name in ("file", "prepare", "not run"))
        found.append(Block(page, line, match["language"], match["text"], *parts))
    return found


def has_shell(page: Path) -> bool:
    return any(block.is_shell for block in blocks_of(page))


def main() -> None:
    """Print every block with its place, its language, and what the tests do with it."""
    found = [block for page in PAGES for block in blocks_of(page)]
    for block in found:
        place = f"{block.page.relative_to(REPOSITORY)}:{block.line}"
        print(f"{place:45} {block.language:10} {block.use}")
    print(dict(Counter(block.use.partition(":")[0].partition(" as ")[0] for block in found)))


if __name__ == "__main__":
    main()
