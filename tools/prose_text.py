"""Prose extraction: docstrings, comments, messages, test names and Markdown of a source tree, as sentences.

`prose.py` counts the passages. Code blocks, inline code, links and doctest lines are not prose, so they are removed
first. The rest of each passage is split into sentences.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCSTRING, COMMENT, MESSAGE, TEST_NAME, PAGE, HEADING = (
    "docstring",
    "comment",
    "message",
    "test name",
    "page",
    "heading",
)
KINDS = (DOCSTRING, COMMENT, MESSAGE, TEST_NAME, PAGE, HEADING)

# Comments for tools (type checkers, linters, formatters), and rulers that divide a file ("--- writing").
_DIRECTIVE = re.compile(r"#\s*(type:|noqa|pragma|fmt:|ruff:|mypy:|!|-{2,}|={2,})")
_FENCE = re.compile(r"^\s*(```|~~~)")
_LINK_TARGET = re.compile(r"^\[[^\]]+\]: \S+$")
# An option in a help text, such as "  --nproc N". It starts a new sentence, like an item of a list.
_OPTION = re.compile(r"\n {1,3}(?=--?\w)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`*]*[A-Z0-9`\"'{])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|incl|No|Fig)|\b[A-Z])\.$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_PLACEHOLDER = "CODE"
# A shorter text is a name or a fragment of a larger message.
_MIN_MESSAGE_WORDS = 4
# A text with more lines that start with a key and a colon is a YAML file.
_MAX_MESSAGE_KEYS = 2


@dataclasses.dataclass(frozen=True)
class Passage:
    """Text that belongs together: one docstring, block of comments, message, test name, paragraph or heading."""

    kind: str
    file: str
    line: int
    owner: str  # Qualified name of the function or class around it, or the heading above a paragraph.
    text: str
    is_verbal: bool = False  # True for the docstring of a function, which starts with a verb.

    @property
    def is_module_docstring(self) -> bool:
        return self.kind == DOCSTRING and not self.owner

    def sentences(self) -> list[str]:
        return split_sentences(plain(self.text))


@dataclasses.dataclass(frozen=True)
class Source:
    """The passages of one file, with its numbers of lines."""

    file: str
    num_lines: int
    num_comment_lines: int
    passages: tuple[Passage, ...]


def read_tree(root: Path, folders: Iterable[str]) -> Iterator[Source]:
    """Read all Python and Markdown files of the given folders (or files) below `root`."""
    for folder in folders:
        top = root / folder
        paths = [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.md")])
        for path in paths:
            if not any(part.startswith(".") for part in path.relative_to(root).parts):
                yield read_file(path, path.relative_to(root).as_posix())


def read_file(path: Path, name: str) -> Source:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".py":
        return Source(name, len(text.splitlines()), 0, tuple(markdown_passages(text, name)))
    comments = list(_comment_tokens(text))
    passages = [*python_passages(text, name), *_comment_passages(text, name, comments)]
    passages.sort(key=lambda passage: passage.line)
    return Source(name, len(text.splitlines()), len({line for line, _, _ in comments}), tuple(passages))


# --- Python


def python_passages(source: str, name: str) -> Iterator[Passage]:
    """Yield docstrings, messages and test names."""
    tree = ast.parse(source)
    docstrings: set[ast.AST] = set()
    for owner, node in _owners(tree):
        docstring = _docstring(node)
        if docstring is not None:
            docstrings.add(docstring)
            text = ast.get_docstring(node) or ""
            yield Passage(DOCSTRING, name, docstring.lineno, owner, text, _is_verbal(node))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Passage(TEST_NAME, name, node.lineno, owner, node.name.removeprefix("test_").replace("_", " "))
    yield from _messages(tree, name, docstrings)


_Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _owners(tree: ast.Module) -> Iterator[tuple[str, _Owner]]:
    waiting: list[tuple[str, _Owner]] = [("", tree)]
    while waiting:
        owner, node = waiting.pop()
        yield owner, node
        for child in _definitions(node):
            waiting.append((f"{owner}.{child.name}".lstrip("."), child))


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _definitions(child)


def _docstring(node: _Owner) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def _is_verbal(node: _Owner) -> bool:
    """Return whether this is a function that somebody calls: no property, test, fixture or class."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    names = {
        part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        for each in node.decorator_list
        for part in ast.walk(each)
    }
    return not names & {"property", "cached_property", "fixture", "setter"}


def _messages(tree: ast.Module, name: str, docstrings: set[ast.AST]) -> Iterator[Passage]:
    """Yield the strings of several words that are not docstrings: errors, warnings, log lines and help texts."""
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        text = _string(node)
        if text is None or node in docstrings or (node in inside and not isinstance(node, ast.JoinedStr)):
            continue
        if len(words(text)) >= _MIN_MESSAGE_WORDS and not _is_code(text):
            yield Passage(MESSAGE, name, getattr(node, "lineno", 0), "", text)


def _string(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
    return None


def _is_code(text: str) -> bool:
    """Return whether a string is a script, a pattern, a YAML file or a listing, and not a message."""
    if len(re.findall(r"^\s*\w+:(?: |$)", text, re.MULTILINE)) > _MAX_MESSAGE_KEYS:
        return True
    return bool(re.search(r"^\s*(import|from|def|class|for|with) .*$|\(\?|\\[wdsb.]|::|==", text, re.MULTILINE))


def _comment_tokens(text: str) -> Iterator[tuple[int, bool, str]]:
    """Yield line number, whether the line holds nothing else, and the text."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            yield token.start[0], not token.line[: token.start[1]].strip(), token.string.lstrip("#").strip()


def _comment_passages(text: str, name: str, comments: list[tuple[int, bool, str]]) -> Iterator[Passage]:
    """Join comments on consecutive lines without code to one passage."""
    blocks: list[tuple[int, list[str]]] = []
    previous = -1
    for line, is_alone, comment in comments:
        if is_alone and line == previous + 1:
            blocks[-1][1].append(comment)
        else:
            blocks.append((line, [comment]))
        previous = line if is_alone else -1
    places = _places(ast.parse(text))
    for line, lines in blocks:
        yield Passage(COMMENT, name, line, _place_of(line, places), "\n".join(lines))


def _places(tree: ast.Module) -> list[tuple[int, int, str]]:
    return [
        (node.lineno, node.end_lineno or 0, owner) for owner, node in _owners(tree) if not isinstance(node, ast.Module)
    ]


def _place_of(line: int, places: list[tuple[int, int, str]]) -> str:
    around = [(end - start, owner) for start, end, owner in places if start <= line <= end]
    return min(around)[1] if around else ""


# --- Markdown


def markdown_passages(text: str, name: str) -> Iterator[Passage]:
    """Yield headings and paragraphs; each list item and table row is a separate paragraph."""
    heading = ""
    paragraph: list[str] = []
    first = 0
    for number, line in enumerate([*_without_code(text), ""], start=1):
        is_heading = line.startswith("#")
        if paragraph and (not line.strip() or is_heading or re.match(r"\s*([-*|]|\d+\.)\s?", line)):
            yield Passage(PAGE, name, first, heading, "\n".join(paragraph))
            paragraph = []
        if is_heading:
            heading = line.lstrip("#").strip()
            yield Passage(HEADING, name, number, "", heading)
        elif line.strip() and not re.fullmatch(r"[\s|:-]+", line):
            first = first if paragraph else number
            paragraph.append(line)


def _without_code(text: str) -> Iterator[str]:
    """Yield the lines with code blocks, HTML comments and link targets emptied, so that line numbers stay."""
    is_code = False
    for line in text.splitlines():
        is_fence = bool(_FENCE.match(line))
        is_code = is_code != is_fence
        yield "" if is_code or is_fence or line.strip().startswith("<") or _LINK_TARGET.match(line) else line


# --- sentences


def plain(text: str) -> str:
    """Remove code and markup: indented blocks after a blank line, doctests, inline code, link targets."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith((">>>", "...", "    ")))
    text = re.sub(r"``[^`]+``|`[^`]*`", _PLACEHOLDER, text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", _PLACEHOLDER, text)
    return re.sub(r"[*]{1,2}([^*]+)[*]{1,2}", r"\1", text)


def split_sentences(text: str) -> list[str]:
    """Split at full stops, semicolons, blank lines, items of lists and cells of tables."""
    sentences = []
    for block in re.split(r"\n\s*\n|\n\s*[-*]\s+|\s*\|\s*|\n\s*\d+\.\s+", _OPTION.sub("\n\n", text)):
        sentences += _join_abbreviations(_SENTENCE_END.split(" ".join(block.split())))
    cleaned = (sentence.strip().lstrip("-*# ").strip() for sentence in sentences)
    return [sentence for sentence in cleaned if words(sentence)]


def _join_abbreviations(parts: list[str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and _ABBREVIATION.search(joined[-1]):
            joined[-1] += " " + part
        else:
            joined.append(part)
    return joined


def words(text: str) -> list[str]:
    return _WORD.findall(text)
