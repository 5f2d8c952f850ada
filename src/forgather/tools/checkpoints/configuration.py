"""Configuration that `forgather train` stores in each checkpoint (config.yaml), read as data: it names code, never runs it.

Changing it goes through the parser of the command line, which checks keys and types.
"""

import os
from collections.abc import Iterator, Mapping

import yaml

from forgather.config import yaml_reader
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.regular_files import read_small_file

# A configuration has a few kilobytes. YAML aliases could inflate a larger one.
_MOST_BYTES = 2**20


def stored_settings(checkpoint: str) -> dict[str, object] | None:
    """Return the settings of a checkpoint's configuration by key, such as "args.max_steps"; None without one."""
    path = os.path.join(checkpoint, CONFIG_NAME)
    if not os.path.lexists(path):
        return None
    text = read_small_file(path, _MOST_BYTES)
    try:
        if _has_aliases(text):
            raise CheckpointCorruptError(f"{path} is damaged: it has YAML aliases, which no stored configuration has")
        content = yaml_reader.load_value(text.decode(errors="replace"))
    except RecursionError:
        raise CheckpointCorruptError(f"{path} is damaged: it is nested too deeply") from None
    if not isinstance(content, Mapping):
        raise CheckpointCorruptError(f"{path} is damaged: it is not a mapping of sections")
    return dict(_flat(content, ""))


def _has_aliases(text: bytes) -> bool:
    """Return whether YAML text has aliases, which could inflate a small file; False for text that is no YAML."""
    try:
        return any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False


def _flat(content: Mapping[object, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
