"""Documentation: code examples run, and links point to existing targets."""

import os
import re
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.support.ranks import run_on_ranks

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
# `make docs` writes these pages.
GENERATED = [DOCS / "reference" / name for name in ("arguments.md", "commands.md")]


def run_program(document: str, folder: str) -> int:
    blocks = [block.text for block in blocks_of(Path(document)) if block.language == "python" and block.is_run]
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile("\n".join(blocks), document, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return len(blocks)


# Pages with programs that belong together: number of ranks.
NUM_RANKS = {
    "checkpointing": 1,
    "custom-trainers": 2,
    "installation": 1,
    "trainer": 1,
    "distributed": 2,
    "pipeline": 2,
    "recipes": 1,
    "importing": 1,
    "metrics": 1,
}


@pytest.mark.parametrize("name", NUM_RANKS)
def test_examples_of_a_document_run(tmp_path: Path, name: str) -> None:
    document = str(DOCS / f"{name}.md")
    assert all(run_on_ranks(run_program, NUM_RANKS[name], document, str(tmp_path)))


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
