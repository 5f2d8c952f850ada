"""Pages of the documentation: their commands and programs run, and their YAML is valid.

`make test` runs pages of Python blocks and a few commands. `make test-docs` (TEST_DOCS=1) runs every command too.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

from forgather.cli.main import COMMANDS
from tests.docs import preparation
from tests.docs.blocks import DOCS, PAGES, REPOSITORY, RUN, SHOWN, blocks_of, has_shell
from tests.docs.running import run_page
from tests.docs.test_documents import NUM_RANKS
from tests.support.ranks import run_on_ranks

RUNS_ALL = os.environ.get("TEST_DOCS") == "1"
PAGE_SECONDS = 1500
# Pages with commands that take a few seconds together.
SHORT = ("exit-codes", "crash-recovery")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.is_run for one in blocks_of(page)) and not has_shell(page)],
    ids=lambda page: page.stem,
)
def test_programs_of_a_page_run(tmp_path: Path, page: Path) -> None:
    if page.stem in NUM_RANKS:
        pytest.skip("test_documents.py runs it")
    run_on_ranks(run_page, 1, str(page), str(tmp_path), timeout=100)


@pytest.mark.parametrize("page", [page for page in PAGES if has_shell(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_run(tmp_path: Path, page: Path) -> None:
    if not RUNS_ALL and page.stem not in SHORT:
        pytest.skip("make test-docs runs it")
    command = [sys.executable, "-m", "tests.docs.running", str(page), str(tmp_path)]
    if page.stem in NUM_RANKS:
        command.append("--without-python")
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PAGE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    """Blocks that are neither run nor parsed are `text`, or give the reason in a comment."""
    for block in blocks_of(page):
        assert block.language in (*RUN, *SHOWN, "yaml"), f"{page}:{block.line}: language {block.language!r}"
        assert (
            block.language not in SHOWN
            or not re.match(r"(\$|forgather|torchrun|python|make) ", block.text)
            or ("OUTPUT_DIR" in block.text)
        ), f"{page}:{block.line}: commands belong to a bash or console block"
        assert block.prepare is None or hasattr(preparation, block.prepare), block.prepare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_of_a_page_is_valid(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "yaml":
            assert yaml.safe_load(block.text) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page: Path) -> None:
    for block in blocks_of(page):
        for command in re.findall(r"^forgather ([a-z]+)\b", block.text, flags=re.MULTILINE):
            assert block.language == "python" or command in COMMANDS, command


@functools.cache
def nodes_of_source() -> tuple[ast.AST, ...]:
    paths = (REPOSITORY / "src").rglob("*.py")
    return tuple(node for path in paths for node in ast.walk(ast.parse(path.read_text())))


@functools.cache
def strings_of_source() -> tuple[str, ...]:
    """Return the texts in the source; a value inside of an f-string is a space."""
    nodes = nodes_of_source()
    plain = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    formatted = [
        "".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return tuple(plain + formatted)


def test_messages_of_troubleshooting_exist() -> None:
    page = DOCS / "help" / "troubleshooting.md"
    headings = re.findall(r"^### (.*)", page.read_text(), flags=re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    assert messages
    for message in messages:
        for part in filter(None, (piece.strip(" .,").lower() for piece in message.split("..."))):
            assert len(part) < 3 or any(part in text.lower() for text in strings_of_source()), part


def test_variables_of_the_source_are_documented() -> None:
    page = (DOCS / "reference" / "environment-variables.md").read_text()
    found = {text for text in strings_of_source() if re.fullmatch(r"(FORGATHER|SLURM|PET)_[A-Z_]+", text)}
    found.update(read_names(nodes_of_source()))
    assert "FORGATHER_WATCH" in found
    assert sorted(name for name in found if f"`{name}`" not in page) == []


def read_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the literal names in `os.environ[...]`, `os.environ.get(...)`, `... in os.environ` and similar."""
    for node in nodes:
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            arguments = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("os.environ.", "os.getenv", "read_int")):
            arguments = node.args[:1]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            arguments = [node.left]
        yield from (one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str))
