"""Installed packages: versions of the required packages with their permitted ranges, and of the extras."""

import importlib.metadata
import re
from dataclasses import dataclass

from forgather._extras import EXTRAS, install_command

REQUIRED = ("torch", "numpy", "safetensors", "xxhash", "transformers", "pyyaml", "rich", "jsonargparse")
"""Direct dependencies, by the names in `pyproject.toml`."""
# Requirement without a marker, such as "torch<2.16,>=2.13". Packages of extras have a marker.
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+?)\s*(?P<range>[<>=!~][^;]*)?")


@dataclass(frozen=True)
class RequiredPackage:
    """Required package; `version` is None if it is missing, and `permitted` is empty if the range is not known."""

    name: str
    version: str | None
    permitted: str
    is_permitted: bool

    @property
    def problem(self) -> str | None:
        """What is wrong with the package, as a sentence; None if it fits."""
        wanted = f"{self.name}{self.permitted}"
        if self.version is None:
            return f"The package {self.name} is not installed: pip install '{wanted}'."
        if not self.is_permitted:
            return f"{self.name} {self.version} does not fit, Forgather needs {wanted}: pip install '{wanted}'."
        return None


@dataclass(frozen=True)
class ExtraPackage:
    """Package of an extra; `version` is None if it is missing."""

    extra: str
    package: str
    version: str | None
    feature: str
    install: str


def required_packages() -> tuple[RequiredPackage, ...]:
    """Return the required packages in the order of `REQUIRED`."""
    ranges = _permitted_ranges()
    return tuple(_required(name, ranges.get(name, "")) for name in REQUIRED)


def extra_packages() -> tuple[ExtraPackage, ...]:
    """Return the packages of all extras."""
    return tuple(
        ExtraPackage(name, extra.package, version_of(extra.package), extra.feature, install_command(extra.package))
        for name, extra in EXTRAS.items()
    )


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(name: str, permitted: str) -> RequiredPackage:
    version = version_of(name)
    return RequiredPackage(name, version, permitted, version is not None and _fits(version, permitted))


def _permitted_ranges() -> dict[str, str]:
    """Return the range of each required package from the metadata of Forgather; empty if it is not installed.

    Reads the lines without `packaging`, which comes with transformers: both may be missing.
    """
    try:
        lines = importlib.metadata.requires("forgather") or []
    except importlib.metadata.PackageNotFoundError:
        # A copy that is only on the import path has no metadata.
        return {}
    found = (_REQUIREMENT.fullmatch(line) for line in lines)
    return {one["name"].lower(): one["range"] or "" for one in found if one is not None}


def _fits(version: str, permitted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:
        # The missing package that brings `packaging` is reported as a problem.
        return True
    # Builds such as 2.13.0+cpu and pre-releases of the range count.
    return SpecifierSet(permitted).contains(version, prereleases=True)
