"""Settings of runs as flat mappings, and the differences between two of them.

`forgather train` lists the changed settings of a resumed run, and `compare_runs` compares the configurations of two runs.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forgather.config import yaml_reader
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.regular_files import open_regular


@dataclass(frozen=True)
class SettingChange:
    """Setting with two different values; None if it is not set."""

    key: str
    first: object
    second: object

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.first)} -> {_shown(self.second)}"


def flat_settings(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested settings by dotted key; an empty mapping is equivalent to a missing key."""
    return dict(_leaves(data, prefix))


def _leaves(data: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if isinstance(value, Mapping) else value


def changed_settings(first: Mapping[str, object], second: Mapping[str, object]) -> list[SettingChange]:
    """Return the settings that differ between two flat mappings, in the order of the second, then of the first."""
    keys = dict.fromkeys([*second, *first])
    return [SettingChange(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def read_settings(folder: str) -> Mapping[str, object] | None:
    """Return the configuration that a run has stored, as data; None without a readable one."""
    try:
        with open(open_regular(os.path.join(folder, CONFIG_NAME), follow=True), encoding="utf-8") as file:
            stored = yaml_reader.load_value(file.read())
    except (OSError, UnicodeDecodeError, CheckpointCorruptError):
        # Runs that were started from Python have no stored configuration.
        return None
    return stored if isinstance(stored, Mapping) else None
