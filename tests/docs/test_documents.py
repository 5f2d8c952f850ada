"""Documentation: code examples run, and links point to existing targets."""

import os
import re
from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
# `make docs` writes these pages.
GENERATED = [DOCS / "reference" / name for name in ("arguments.md", "commands.md")]


def run_program(document: str, folder: str) -> int:
    blocks = re.findall(r"^```python\n(.*?)^```", Path(document).read_text(), flags=re.DOTALL | re.MULTILINE)
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile("\n".join(blocks), document, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return len(blocks)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_blocks"),
    [
        ("checkpointing", 1, 7),
        ("custom-trainers", 2, 4),
        ("installation", 1, 1),
        ("trainer", 1, 2),
        ("distributed", 2, 2),
        ("pipeline", 2, 3),
        ("recipes", 1, 1),
        ("importing", 1, 1),
        ("metrics", 1, 2),
    ],
)
def test_examples_of_a_document_run(tmp_path: Path, name: str, num_ranks: int, num_blocks: int) -> None:
    document = str(DOCS / f"{name}.md")
    assert run_on_ranks(run_program, num_ranks, document, str(tmp_path)) == [num_blocks] * num_ranks


@pytest.mark.parametrize(
    "document",
    [REPOSITORY / "README.md", *sorted(DOCS.glob("[!_]*.md")), *sorted(DOCS.glob("[!_]*/*.md"))],
    ids=lambda path: path.name,
)
def test_links_have_targets(document: Path) -> None:
    text = document.read_text()
    inline = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    for target in [*inline, *re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, flags=re.MULTILINE)]:
        path = (document.parent / target).resolve()
        assert target.startswith("http") or path in GENERATED or path.exists(), target
