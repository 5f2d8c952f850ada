"""Writer of lock files: exact versions of installed packages, with the hashes of all their files in the index.

torch and the libraries of its CUDA builds are omitted. Set-up installs torch by version, so each machine gets the build
of its package index. `make lock` and `make lock-docs` run this script in the environment to lock.
"""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pip._internal.models.index import PyPI

OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")
HEADERS = {
    "requirements.lock": "# Written by `make lock`. Set-up installs torch first, by the version in the Makefile.\n",
    "requirements-docs.lock": "# Written by `make lock-docs`: packages that build the documentation.\n",
}


class Links(HTMLParser):
    """Parser of an index page: file names with their hashes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.hashes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        parts = urlsplit(dict(attrs).get("href") or "")
        if tag == "a" and parts.fragment.startswith("sha256="):
            self.hashes.append((unquote(parts.path).rpartition("/")[2], parts.fragment.replace("=", ":")))


def index_url() -> str:
    """Return the index URL of pip's configuration, or pip's default."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return os.environ.get("PIP_INDEX_URL") or configured.stdout.strip() or str(PyPI.simple_url)


def installed() -> Iterator[tuple[str, str]]:
    freeze = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable", "--exclude", "forgather"]
    lines = subprocess.run([*freeze, "--exclude", "pip"], capture_output=True, text=True, check=True).stdout.split()
    for name, _, version in (line.partition("==") for line in lines):
        if not version:
            sys.exit(f"{name} is not installed from the index, so its version cannot be locked.")
        if not OF_TORCH.match(name.lower()):
            yield name, version


def version_of(file_name: str) -> Version | None:
    try:
        if file_name.endswith(".whl"):
            return parse_wheel_filename(file_name)[1]
        return parse_sdist_filename(file_name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def locked(index: str, name: str, version: str) -> str:
    """Return the lines of one requirement."""
    page_url = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    with urllib.request.urlopen(page_url, timeout=180) as page:
        links = Links(page.read().decode())
    hashes = sorted({digest for file_name, digest in links.hashes if version_of(file_name) == Version(version)})
    if not hashes:
        sys.exit(f"The package index has no file of {name} {version} with a sha256 hash.")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash={digest}" for digest in hashes)]) + "\n"


def main() -> None:
    index = index_url()
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda one: locked(index, *one), installed()))
    Path(sys.argv[1]).write_text(HEADERS[sys.argv[1]] + "".join(entries))


if __name__ == "__main__":
    main()
