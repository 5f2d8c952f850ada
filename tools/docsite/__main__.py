"""Build of the site: `python -m docsite [OUTPUT]`. Exits with Sphinx's code, which is not 0 after any warning.

The pages of `docs/` are copied to a folder for Sphinx, and the generated pages are written beside them.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from sphinx.cmd.build import main as sphinx_main

from docsite import api, argument_page, command_page, navigation
from docsite.source_code import REPOSITORY

_DOCS = REPOSITORY / "docs"
_STAGE = REPOSITORY / "build" / "docs-source"
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sub": "bash", ".toml": "toml", ".sh": "bash", ".md": "markdown"}
_INTRODUCTION = """\
# Forgather

A PyTorch training library whose trainers share one loop and one checkpoint system. A run that is killed and started
again ends with the same bits as a run that was never interrupted.

Start with the [first run](tutorials/first-run.md). An error message is best looked up in
[troubleshooting](help/troubleshooting.md), an unknown word in the [glossary](help/glossary.md).
"""


def main(output: Path) -> int:
    """Build the site in `output`; returns the exit code."""
    shutil.rmtree(_STAGE, ignore_errors=True)
    shutil.copytree(_DOCS, _STAGE, ignore=shutil.ignore_patterns("_*"))
    forgotten = navigation.unlisted(_STAGE)
    if forgotten:
        print(f"No part of tools/docsite/navigation.py lists: {', '.join(forgotten)}", file=sys.stderr)
        return 1
    _link_source_files(list(_STAGE.rglob("*.md")))
    api.write_pages(_STAGE / "reference" / "api")
    (_STAGE / "reference" / "arguments.md").write_text(argument_page.page(), encoding="utf-8")
    (_STAGE / "reference" / "commands.md").write_text(command_page.page(), encoding="utf-8")
    (_STAGE / "index.md").write_text(_index(), encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    doctrees = REPOSITORY / "build" / "docs-trees"
    shutil.rmtree(doctrees, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-c", str(Path(__file__).parent), "-d", str(doctrees)]
    return int(sphinx_main([*options, str(_STAGE), str(output)]))


def _index() -> str:
    parts = [_INTRODUCTION]
    for part in navigation.PARTS:
        pages = list(part.pages)
        listed = "\n".join(f"- [{_title(page)}]({page}.md)" for page in pages)
        toctree = "\n".join(pages)
        parts.append(f"## {part.title}\n\n{part.about}\n\n````{{container}} page-list\n{listed}\n````\n")
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {part.title}\n\n{toctree}\n```\n")
    return "\n".join(parts)


def _title(page: str) -> str:
    text = (_STAGE / f"{page}.md").read_text(encoding="utf-8")
    return text.partition("# ")[2].partition("\n")[0]


def _link_source_files(pages: list[Path]) -> None:
    """Point links to files outside of `docs/` to pages that show these files."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        depth = len(page.relative_to(_STAGE).parts) - 1
        for target in set(_outside_links(text, depth)):
            file = "/".join(Path(target).parts[depth + 1 :])
            shown = _file_page(file)
            text = text.replace(f"]({target})", f"]({'../' * depth}{shown})")
        page.write_text(text, encoding="utf-8")


def _outside_links(text: str, depth: int) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if target.startswith("../" * (depth + 1)):
            yield target


def _file_page(file: str) -> str:
    """Write a page with the content of a file or the list of a folder; returns its path from the root of the site."""
    source = REPOSITORY / file
    if source.is_dir():
        names = sorted(path.name for path in source.iterdir() if path.is_file())
        content = "\n".join(f"- [`{name}`](/{_file_page(f'{file}/{name}')})" for name in names)
    else:
        language = _LANGUAGES.get(source.suffix, "text")
        content = f"``````{language}\n{source.read_text(encoding='utf-8').rstrip()}\n``````"
    page = f"files/{file}.md"
    path = _STAGE / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\norphan: true\n---\n\n# `{file}`\n\n{content}\n", encoding="utf-8")
    return page


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "site"))
