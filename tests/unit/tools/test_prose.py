"""Prose measurements: extraction of sentences, each rule, the figures, and sentences before and after a change."""

import subprocess
import sys
from pathlib import Path

import prose
import pytest
from prose_rules import (
    CLAUSE,
    LENGTH,
    LONG,
    MARKER,
    MOOD,
    SPELLING,
    STOP,
    TERM,
    faults_of,
    has_term,
    is_clause,
    markers_in,
)
from prose_text import COMMENT, DOCSTRING, HEADING, MESSAGE, PAGE, TEST_NAME, Passage, read_file, split_sentences

MODULE = '''"""Checkpoint rotation: delete old checkpoints.

Called by the manager after each save.
"""

import os  # noqa: F401


class Store:
    """Directory of checkpoints."""

    @property
    def newest(self):
        """The newest checkpoint."""
        # The manifest is written last,
        # so a directory without it is incomplete.
        return self.names[-1]  # Names are sorted.

    def delete(self, name):
        """The deletion of that of which nobody knows."""
        raise ValueError(f"Checkpoint {name!r} does not exist. Choose one of {self.names}.")


# --- tests


def test_it_deletes_old_ones():
    assert run("import os\\nprint(1)")
'''
PAGE_TEXT = """# What is refused, and why

The first paragraph
has two lines. And `code that is whose`.

```python
whose = 1
```

## Refused combinations

- An item, see [the page](other-whose.md).
| a | b |
|---|---|
| cell | whose cell |
"""


def written(folder: Path, text: str, name: str = "src/module.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def passage(text: str, kind: str = COMMENT, **options: object) -> Passage:
    return Passage(kind, "src/module.py", 1, str(options.get("owner", "f")), text, bool(options.get("is_verbal")))


def rules(faulty: Passage) -> list[str]:
    return [fault.rule for fault in faults_of(faulty)]


def test_python_prose_is_found_with_its_kind_line_and_owner(tmp_path: Path) -> None:
    source = read_file(written(tmp_path, MODULE), "src/module.py")
    found = [(each.kind, each.line, each.owner) for each in source.passages]
    assert found == [
        (DOCSTRING, 1, ""),
        (DOCSTRING, 10, "Store"),
        (DOCSTRING, 14, "Store.newest"),
        (COMMENT, 15, "Store.newest"),
        (COMMENT, 17, "Store.newest"),
        (DOCSTRING, 20, "Store.delete"),
        (MESSAGE, 21, ""),
        (TEST_NAME, 27, "test_it_deletes_old_ones"),
    ]
    assert (source.num_lines, source.num_comment_lines) == (28, 3)
    assert [each.owner for each in source.passages if each.is_verbal] == ["Store.delete"]
    assert source.passages[3].text == "The manifest is written last,\nso a directory without it is incomplete."
    assert source.passages[6].text == "Checkpoint CODE does not exist. Choose one of CODE."
    assert source.passages[7].text == "it deletes old ones"


def test_pages_are_headings_paragraphs_items_and_rows_without_code(tmp_path: Path) -> None:
    source = read_file(written(tmp_path, PAGE_TEXT, "docs/page.md"), "docs/page.md")
    assert [(each.kind, each.line, each.sentences()) for each in source.passages] == [
        (HEADING, 1, ["What is refused, and why"]),
        (PAGE, 3, ["The first paragraph has two lines.", "And CODE."]),
        (HEADING, 10, ["Refused combinations"]),
        (PAGE, 12, ["An item, see the page."]),
        (PAGE, 13, ["a", "b"]),
        (PAGE, 15, ["cell", "whose cell"]),
    ]
    assert [each.text for each in source.passages if CLAUSE in rules(each)] == ["What is refused, and why"]


def test_link_targets_yaml_and_patterns_are_no_prose(tmp_path: Path) -> None:
    page = written(tmp_path, "Read [tests].\n\n[tests]: tests/whose_folder\n", "docs/page.md")
    assert [each.text for each in read_file(page, "docs/page.md").passages] == ["Read [tests]."]
    strings = [r"add before loading: this\.Color$", "model:\n  type: llama\ndata:\n  files: whose texts\n"]
    module = written(tmp_path, "".join(f"text = {text!r}\n" for text in strings))
    assert read_file(module, "src/module.py").passages == ()


def test_each_option_of_a_help_text_is_a_sentence() -> None:
    text = "usage: train [OPTION]\n\n  --nproc N   number of processes\n  -d 0,1      devices, one for\n        each process"
    assert split_sentences(text) == [
        "usage: train [OPTION]",
        "nproc N number of processes",
        "d 0,1 devices, one for each process",
    ]


def test_faulty_examples_of_this_file_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tests/unit/tools/test_prose.py", "tests/unit/tools/test_other.py"):
        written(tmp_path, 'EXAMPLE = "A scheduler whose rates change."\n', name)
    prose.main(["--root", str(tmp_path), "tests"])
    printed = capsys.readouterr().out
    assert "tests/unit/tools/test_other.py:1 (message)" in printed and "test_prose.py" not in printed


def test_closed_pipe_ends_the_report_without_a_traceback(tmp_path: Path) -> None:
    written(tmp_path, MODULE)
    command = [sys.executable, prose.__file__, "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_sentences_end_at_full_stops_but_not_in_abbreviations() -> None:
    text = "Use a sampler, e.g. Torch's. It shuffles! (Does it?) Values are 0.5.\n\nNext\n- item one\n- item two"
    assert split_sentences(text) == [
        "Use a sampler, e.g. Torch's.",
        "It shuffles!",
        "(Does it?",
        "Values are 0.5.",
        "Next",
        "item one",
        "item two",
    ]


@pytest.mark.parametrize(
    ("sentence", "markers"),
    [
        ("The norm of which nobody knows.", ["of which", "nobody"]),
        ("Its state is that of a run that goes on.", ["that of", "goes on"]),
        ("What a rank needs, in place of one that failed.", ["What a", "in place of", "one that"]),
        ("Return the newest complete checkpoint.", []),
    ],
)
def test_markers_are_found_in_any_case(sentence: str, markers: list[str]) -> None:
    assert markers_in(sentence) == markers


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (passage("A scheduler whose rates change."), [MARKER]),
        (passage("word " * 36 + "end."), [LONG, STOP]),
        (passage("Word " * 34 + "end."), []),
        (passage("Synchronized buffers have a color."), [SPELLING, SPELLING]),
        (passage("The optimizer and the tokenizer."), []),
        (passage("no capital letter."), [STOP]),
        (passage("No full stop"), [STOP]),
        (passage("`name` comes first."), []),
        (passage("The newest checkpoint.", DOCSTRING, is_verbal=True), [MOOD]),
        (passage("Return the newest checkpoint.", DOCSTRING, is_verbal=True), []),
        (passage("The newest checkpoint.", DOCSTRING), []),
        (passage("All things considered.\nLine two.", DOCSTRING, owner=""), [TERM]),
        (passage("Sampler.", DOCSTRING, owner=""), [LENGTH]),
        (passage("Sampler.\n\nA, b.\nC, d.\nE, f.\nG, h.\nI, j.\nK, l.", DOCSTRING, owner=""), [LENGTH]),
        (passage("Sampler for ranks.\n\nEvery rank draws the same order.", DOCSTRING, owner=""), []),
    ],
)
def test_each_rule_names_its_fault(faulty: Passage, expected: list[str]) -> None:
    assert rules(faulty) == expected


def test_headings_and_terms() -> None:
    assert is_clause("How it works") and is_clause("A rank fails when it can") and is_clause("Which trainer?")
    assert not is_clause("Refused combinations") and not is_clause("Gradient accumulation")
    assert (
        has_term("Prefetch of the next thing.")
        and has_term("The trainer's own.")
        and not has_term("A thing of beauty.")
    )


def test_report_has_figures_the_worst_passages_and_long_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, MODULE)
    written(tmp_path, PAGE_TEXT + "x" * 121 + "\n", "docs/page.md")
    prose.main(["--root", str(tmp_path), "--worst", "1"])
    printed = capsys.readouterr().out
    assert "src: 1 files, 54 words of prose" in printed
    assert "docs/page.md: 1 lines over 120 characters, the first is line 16" in printed
    (worst,) = (line for line in printed.splitlines() if line.endswith("(docstring)"))
    assert worst == "src/module.py:20 (docstring)"
    prose.main(["--root", str(tmp_path), "docs", "--rule", "clause", "--worst", "9"])
    printed = capsys.readouterr().out
    assert "given paths: 1 files" in printed and printed.count("docs/page.md:") == 2
    prose.main(["--beside", str(tmp_path / "src")])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "src 487.8 markers in 10,000 words, 10.7% comment lines"


def test_sentences_of_a_commit_are_shown_beside_their_successors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, MODULE)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Add a module"]):
        subprocess.run([*git, *arguments], check=True)
    path.write_text(MODULE.replace("The deletion of that of which nobody knows.", "Delete the checkpoint `name`."))
    passages = read_file(path, "src/module.py").passages
    number = 1 + sum(prose.is_sentence(each, text) for each in passages for text in each.sentences())
    prose.main(["--root", str(tmp_path), "--sample", str(number), "--before", "HEAD"])
    printed = capsys.readouterr().out
    assert printed.count("before:") == number
    pair = "  before: The deletion of that of which nobody knows.\n  after:  Delete the checkpoint CODE.\n"
    assert pair in printed
