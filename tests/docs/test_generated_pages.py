"""Generated pages of the site: complete, and every page of the documentation is in the navigation."""

from pathlib import Path

import pytest
from docsite import api, argument_page, command_page, navigation, source_code

from forgather.cli.main import COMMANDS
from forgather.config.help import arguments_of
from forgather.config.trainer_kinds import TRAINERS


def test_every_page_is_in_the_navigation() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert navigation.unlisted(docs) == []


def test_every_argument_of_every_trainer_is_on_the_page() -> None:
    page = argument_page.page()
    names = {field.name for kind in TRAINERS for field in arguments_of(kind)}
    assert "ddp.bucket_cap_mb" in names
    assert [name for name in names if f"{{confval}} {name}\n" not in page] == []


def test_every_command_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = command_page.page()
    assert [name for name in COMMANDS if f"usage: forgather {name}" not in page] == []


def test_every_public_name_of_the_package_is_described(tmp_path: Path) -> None:
    api.write_pages(tmp_path)
    pages = "".join(path.read_text() for path in tmp_path.iterdir())
    names = source_code.public_names("forgather")
    assert "Trainer" in names
    missing = [
        name
        for name in names
        if not any(f"{{py:{kind}}} {name}{end}" in pages for kind in ("class", "function") for end in "(\n")
    ]
    assert missing == []
