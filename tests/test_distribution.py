"""Distribution: versions, dependencies, and the files of wheel and source distribution.

`make dist` builds both and sets DIST to their folder. Without it, setuptools lists the files that it would take.
"""

import os
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml
from setuptools import find_packages

import forgather
from forgather._extras import EXTRAS
from forgather.tools.doctor.packages import REQUIRED

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
DATA = {"py.typed", "config/demo.yaml"}
"""Files of the package that are no Python."""
ROOT_FILES = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
}
"""Files of the source distribution outside of the package; setuptools writes PKG-INFO and setup.cfg."""

needs_archives = pytest.mark.skipif("DIST" not in os.environ, reason="`make dist` builds the archives")


def project() -> dict[str, object]:
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        return dict(tomllib.load(file))


def name_of(requirement: str) -> str:
    return requirement.partition("[")[0].partition(">")[0].partition("<")[0].partition("=")[0]


def package_files() -> set[str]:
    """Return all files in the folder of the package, except caches."""
    root = SOURCE / "forgather"
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix() for path in files}


def test_core_has_at_most_eight_direct_dependencies() -> None:
    names = tuple(name_of(line) for line in project()["project"]["dependencies"])
    assert names == REQUIRED and len(names) <= 8


def test_messages_name_the_extras_of_the_project() -> None:
    extras = {name: lines for name, lines in project()["project"]["optional-dependencies"].items() if name != "dev"}
    assert {name: [extra.package] for name, extra in EXTRAS.items()} == {
        name: [name_of(line) for line in lines] for name, lines in extras.items()
    }


def test_version_is_written_in_one_place() -> None:
    settings = project()
    assert settings["project"]["dynamic"] == ["version"] and "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "forgather.__version__"}}
    assert (SOURCE / "forgather" / "__init__.py").read_text().count(f'"{forgather.__version__}"') == 1
    assert "version" not in yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())


def test_changelog_begins_with_unreleased_changes() -> None:
    headings = [line for line in (REPOSITORY / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"


def test_wheel_would_contain_every_file_of_the_package_and_no_other() -> None:
    settings = project()["tool"]["setuptools"]
    packages = find_packages(
        str(SOURCE), **{key: value for key, value in settings["packages"]["find"].items() if key != "where"}
    )
    folders = {package.replace(".", "/") for package in packages}
    assert all(folder == "forgather" or folder.startswith("forgather/") for folder in folders)
    root = SOURCE / "forgather"
    # A folder without __init__.py would be left out in silence.
    assert {f"forgather/{Path(name).parent}".removesuffix("/.") for name in package_files()} == folders
    data = {
        path.relative_to(root).as_posix()
        for pattern in settings["package-data"]["forgather"]
        for path in root.glob(pattern)
    }
    assert data == DATA
    assert {name for name in package_files() if not name.endswith(".py")} == DATA


@needs_archives
def test_wheel_contains_every_file_of_the_package_and_no_other() -> None:
    (path,) = Path(os.environ["DIST"]).glob("*.whl")
    assert path.name == f"forgather-{forgather.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        names = {PurePosixPath(name) for name in archive.namelist()}
    info = {name for name in names if name.parts[0] == f"forgather-{forgather.__version__}.dist-info"}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"} <= {name.name for name in info}
    assert {str(name.relative_to("forgather")) for name in names - info} == package_files()


@needs_archives
def test_source_distribution_contains_the_package_and_its_description_only() -> None:
    (path,) = Path(os.environ["DIST"]).glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {PurePosixPath(*PurePosixPath(one.name).parts[1:]) for one in archive.getmembers() if one.isfile()}
    written = {name for name in names if name.parts[:2] == ("src", "forgather.egg-info")}
    package = {name for name in names - written if name.parts[:2] == ("src", "forgather")}
    assert {str(name.relative_to("src/forgather")) for name in package} == package_files()
    assert {str(name) for name in names - written - package} == ROOT_FILES
