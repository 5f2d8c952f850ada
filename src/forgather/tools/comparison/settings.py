"""Settings of runs as flat mappings, and the differences between two of them.

`forgather train` lists the changed settings of a resumed run, and `compare_runs` compares the configurations of two runs.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forgather._run_files import open_in_run, read_at_most
from forgather.config import yaml_reader
from forgather.config.yaml_reader import CONFIG_NAME

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**20


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
        with open_in_run(folder, CONFIG_NAME) as file:
            stored = yaml_reader.load_value(read_at_most(file, _MOST_BYTES).decode())
    except FileNotFoundError:
        # Runs that were started from Python have no stored configuration.
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s cannot be read: %s", os.path.join(folder, CONFIG_NAME), error)
        return None
    return stored if isinstance(stored, Mapping) else None
