"""Configurations stored in runs and checkpoints: reading, and refusal of settings that would run code.

A run directory is untrusted data. Classes and functions that it names are imported and called only if the user passes
the configuration file with `--config`. Every command that rebuilds a part of a run from its stored configuration asks here.
"""

import os
import re
from collections.abc import Collection, Mapping

from forgather.config.errors import UsageError
from forgather.config.parser import ConfigurationParser, Option, trainer_kind
from forgather.config.schema import Configuration
from forgather.config.yaml_reader import CONFIG_NAME

_OWN_DOCUMENTS = "forgather.data.standard_library.standard_library_documents"
# Classes directly in these modules. A longer path could reach functions that the modules import.
_HARMLESS = re.compile(
    r"(torch\.optim|forgather\.ml\.loss)\.[A-Z]\w*|transformers\.(Adafactor|AutoModel\w*|[A-Z]\w*Config)"
)


def read_configuration(folder: str, path: str | None = None, options: Collection[Option] = ()) -> Configuration | None:
    """Return the configuration in a file, or the one stored in a run or checkpoint, or None; `options` override it."""
    path = path or os.path.join(folder, CONFIG_NAME)
    # Only the stored configuration is optional: `read_file` reports a missing file that the user named.
    if not os.path.exists(path) and path == os.path.join(folder, CONFIG_NAME):
        return None
    parser = ConfigurationParser(trainer_kind(path, list(options)))
    parser.read_file(path)
    for option in options:
        parser.override(option)
    return parser.configuration()


def refuse_code(configuration: Configuration, *sections: str, remedy: str, given: Collection[str] = ()) -> None:
    """Raise UsageError if a stored configuration names code, or files to write, in sections that would be built.

    `remedy` says how to use it all the same. `given` are keys that the user set, who may name code.
    """
    named = {key: value for section in sections for key, value in _SETTINGS[section](configuration).items()}
    used = sorted(key for key, value in named.items() if value and not _is_given(key, given))
    if used:
        raise UsageError(
            f"The configuration in the checkpoint sets {', '.join(used)}, and using it would run code that the checkpoint "
            f"names. If you trust it, {remedy}"
        )


def config_option(folder: str) -> str:
    """Return the remedy for commands with the option --config."""
    return f"pass --config {os.path.join(folder, CONFIG_NAME)}."


def _is_given(name: str, given: Collection[str]) -> bool:
    """Return whether the user set this key, or replaced its section."""
    return any(name == key or name.startswith(f"{key}.") for key in given)


def _model(configuration: Configuration) -> Mapping[str, object]:
    section = configuration.model
    return {
        "model.class_path": section.class_path,
        # Names without dots are classes of transformers.
        "model.config_class": _foreign(section.config_class),
        "model.auto_class": _foreign(section.auto_class),
        # They may enable trust_remote_code.
        "model.init_args": section.init_args if section.class_path is None else None,
    }


def _tokenizer(configuration: Configuration) -> Mapping[str, object]:
    section = configuration.tokenizer
    # init_args may enable trust_remote_code.
    return {"tokenizer.class_path": section.class_path, "tokenizer.init_args": section.init_args}


def _data(configuration: Configuration) -> Mapping[str, object]:
    section = configuration.data
    return {
        # The documents of the demo are Forgather's own code.
        "data.class_path": None if section.class_path == _OWN_DOCUMENTS else section.class_path,
        # Files would be written to it.
        "data.cache_dir": section.cache_dir,
    }


def _loss(configuration: Configuration) -> Mapping[str, object]:
    return {"loss.class_path": _foreign(configuration.loss.class_path)}


def _optimizer(configuration: Configuration) -> Mapping[str, object]:
    groups = configuration.optimizer_groups or {}
    has_factory = any(isinstance(group, Mapping) and group.get("factory") for group in groups.values())
    return {
        "optimizer.class_path": _foreign(configuration.optimizer.class_path),
        "lr_scheduler.class_path": configuration.lr_scheduler.class_path,
        "optimizer_groups": has_factory,
    }


EVALUATED_SECTIONS = ("model", "tokenizer", "loss", "data")
"""Sections that an evaluation builds."""
_SETTINGS = {"model": _model, "tokenizer": _tokenizer, "data": _data, "loss": _loss, "optimizer": _optimizer}


def _foreign(name: str | None) -> str | None:
    is_own = name is None or "." not in name or _HARMLESS.fullmatch(name)
    return None if is_own else name
