"""Pages in the parts of the documentation: their commands and programs run, and their YAML is valid."""

import ast
import contextlib
import functools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgather.cli.main import COMMANDS, main
from tests.support.ranks import run_on_ranks

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent != DOCS and not path.parent.name.startswith("_"))
EVERY_PAGE = [*sorted(DOCS.glob("*.md")), *PAGES]
ON_TWO_RANKS = ("several-gpus",)

_BLOCK = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """Code block of a page. A block with a file name is saved, other Python and bash blocks are run."""

    language: str
    text: str
    file: str | None


def blocks_of(page: Path) -> list[Block]:
    return [Block(found["language"], found["text"], found["file"]) for found in _BLOCK.finditer(page.read_text())]


def runs(page: Path) -> bool:
    return any(block.file or block.language in ("python", "bash") for block in blocks_of(page))


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_page(page: str, folder: str) -> None:
    """Run the blocks of a page in order, in one folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with inside(folder):
        for block in blocks_of(Path(page)):
            if block.file is not None:
                Path(block.file).write_text(block.text)
            elif block.language == "python":
                exec(compile(block.text, page, "exec"), names)
            elif block.language == "bash":
                for line in commands_of(block):
                    run_command(line)


def commands_of(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


def run_in(folder: str, line: str) -> None:
    with inside(folder):
        run_command(line)


def run_command(line: str) -> None:
    """Run a command; `# exit code N` at its end states the expected code. Forgather runs in this process."""
    words = shlex.split(line, comments=True)
    expected = re.search(r"# exit code (\d+)", line)
    if words[:1] == ["forgather"]:
        code = main(without_launcher(words[1:]))
    else:
        code = subprocess.run(["bash", "-c", line], check=False).returncode
    assert code == (int(expected[1]) if expected else 0), line


def without_launcher(words: list[str]) -> list[str]:
    """Remove `--nproc N`: the ranks of the test run already, as under torchrun."""
    place = words.index("--nproc") if "--nproc" in words else None
    return words if place is None else words[:place] + words[place + 2 :]


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.stem)
def test_page_runs(tmp_path: Path, page: Path) -> None:
    if page.stem not in ON_TWO_RANKS:
        run_on_ranks(run_page, 1, str(page), str(tmp_path), timeout=100)
        return
    for block in blocks_of(page):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "bash":
            for line in commands_of(block):
                run_on_ranks(run_in, 2 if "--nproc 2" in line else 1, str(tmp_path), line, timeout=100)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.stem)
def test_yaml_of_a_page_is_valid(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "yaml":
            assert yaml.safe_load(block.text) is not None


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page: Path) -> None:
    for block in blocks_of(page):
        for command in re.findall(r"^forgather ([a-z]+)\b", block.text, flags=re.MULTILINE):
            assert block.language == "python" or command in COMMANDS, command


@functools.cache
def strings_of_source() -> tuple[str, ...]:
    """Return the texts in the source; a value inside of an f-string is a space."""
    nodes = [node for path in (REPOSITORY / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
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
    found = {text for text in strings_of_source() if re.fullmatch(r"FORGATHER_[A-Z_]+", text)}
    found |= {name for path in (REPOSITORY / "src").rglob("*.py") for name in read_names(ast.parse(path.read_text()))}
    assert "FORGATHER_WATCH" in found
    assert sorted(name for name in found if f"`{name}`" not in page) == []


def read_names(tree: ast.Module) -> Iterator[str]:
    """Yield the literal names in `os.environ[...]`, `os.environ.get(...)`, `... in os.environ` and similar."""
    for node in ast.walk(tree):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            arguments = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("os.environ.", "os.getenv", "read_int")):
            arguments = node.args[:1]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            arguments = [node.left]
        yield from (one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str))
