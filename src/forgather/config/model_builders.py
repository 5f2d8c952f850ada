"""Builder of the model of a run: new from a Hugging Face configuration, pretrained, or returned by a callable.

Checks the `model` section before training starts; the trainer calls the returned function when it needs the model.
Nothing is downloaded.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from forgather._suggestions import did_you_mean
from forgather.config import class_paths
from forgather.config.errors import UsageError
from forgather.config.schema import ModelSection
from forgather.data.token_store import TextTokenizer
from forgather.ml.checkpoint.weights.trial_build import MODEL_CONFIG, require_plausible_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_NUM_NAMES_SHOWN = 5
_NO_FIELDS = ("attn_implementation", "dtype")
"""Values that transformers configurations accept, although `to_dict` does not list them."""


def model_builder(section: ModelSection, tokenizer: TextTokenizer | None) -> Callable[[], nn.Module]:
    """Return a function that builds the model; mistakes in the section raise UsageError here, not when it is called."""
    ways = ("model_type", "config_class", "pretrained", "class_path")
    given = [name for name in ways if getattr(section, name) is not None]
    if len(given) != 1:
        said = f"it has {' and '.join(given)}" if given else "it has none of them"
        raise UsageError(f"The model needs exactly one of {', '.join(f'model.{name}' for name in ways)}; {said}.")
    _refuse_unused(section, given[0])
    if section.class_path is not None:
        function = class_paths.find_object(section.class_path, "model.class_path")
        class_paths.check_keywords(function, section.init_args, "model", num_positional=0)
        return lambda: function(**section.init_args)
    auto_class = class_paths.find_object(section.auto_class, "model.auto_class", "transformers")
    if section.pretrained is not None:
        path = class_paths.require_directory(section.pretrained, "model.pretrained")
        _require_plausible(auto_class, path)
        return _pretrained_builder(section, auto_class, path)
    config = _model_config(section, tokenizer)
    return lambda: auto_class.from_config(config)


def check_positions(section: ModelSection, tokenizer: TextTokenizer, sequence_length: int) -> str | None:
    """Raise UsageError for sequences longer than the model's table of positions.

    Return a warning if they are longer than the positions of a model that computes them, such as rotary ones.
    """
    if section.class_path is not None:
        return None
    config = (
        _model_config(section, tokenizer)
        if section.pretrained is None
        else _changed_config(section.config, section.pretrained)
    )
    number = getattr(config, "max_position_embeddings", None)
    if not isinstance(number, int) or not 0 < number < sequence_length:
        return None
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    text = f"data.sequence_length={sequence_length} is more than the {number} positions of the model ({name})"
    auto_class = class_paths.find_object(section.auto_class, "model.auto_class", "transformers")
    if _has_position_table(auto_class, config, number):
        more = "" if section.pretrained is not None else f", or model.config.{name} to {sequence_length}"
        raise UsageError(
            f"{text}, which has no embeddings for more. Set data.sequence_length to {number} or less{more}."
        )
    return f"{text}. It computes positions beyond them, but programs that use the model may cut off texts there."


def _has_position_table(auto_class: Any, config: "PretrainedConfig", number: int) -> bool:
    """Return whether a model has an embedding for each position; builds it without memory."""
    with torch.device("meta"):
        model = auto_class.from_config(config)
    words = model.get_input_embeddings()
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one is not words]
    # Some models have additional rows, such as two in OPT.
    return any(number <= one.num_embeddings <= number + 2 for one in tables)


def _refuse_unused(section: ModelSection, way: str) -> None:
    """Raise UsageError for values that the chosen way to build a model does not use."""
    users = {
        "config": ("model_type", "config_class", "pretrained"),
        "init_args": ("class_path", "pretrained"),
    }
    for name, ways in users.items():
        value = getattr(section, name)
        if value and way not in ways:
            raise UsageError(
                f"model.{name}={value!r} has no effect with model.{way}: it belongs to "
                f"{' or '.join(f'model.{one}' for one in ways)}. Remove it, or use one of these."
            )


def _pretrained_builder(section: ModelSection, auto_class: Any, path: str) -> Callable[[], nn.Module]:
    """Return a function that loads a model, with values of `model.config` overriding the stored ones."""
    options = dict(section.init_args)
    if section.config:
        if "config" in options:
            raise UsageError("model.config and model.init_args.config are two configurations: remove one of the two.")
        options["config"] = _changed_config(section.config, path)
    if not callable(getattr(auto_class, "from_pretrained", None)):
        raise UsageError(
            f"model.auto_class={section.auto_class!r} has no from_pretrained, which model.pretrained needs."
        )
    # Only classes of transformers support output_loading_info.
    can_report = str(getattr(auto_class, "__module__", "")).startswith("transformers.")

    def build() -> nn.Module:
        try:
            if not can_report:
                loaded: nn.Module = auto_class.from_pretrained(path, local_files_only=True, **options)
                return loaded
            model, info = auto_class.from_pretrained(path, local_files_only=True, output_loading_info=True, **options)
        except (RuntimeError, ValueError) as error:
            if not section.config:
                raise
            raise ValueError(
                f"model.pretrained={section.pretrained!r} cannot be loaded with model.config={section.config!r}, which "
                f"overrides values stored with the weights. Remove values that change shapes. {error}"
            ) from error
        _check_loaded(info, section)
        return cast(nn.Module, model)

    return build


def _require_plausible(auto_class: Any, path: str) -> None:
    """Raise CheckpointLoadError if the config.json of a directory cannot belong to its weights."""
    from transformers import AutoConfig

    def build() -> nn.Module:
        model: nn.Module = auto_class.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
        return model

    description = os.path.join(path, MODEL_CONFIG)
    if hasattr(auto_class, "from_config") and os.path.exists(description):
        require_plausible_model(build, description, path)


def _changed_config(values: Mapping[str, object], path: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    _check_names(type(config).__name__, config.to_dict(), values)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def _check_loaded(info: Mapping[str, Any], section: ModelSection) -> None:
    """Report weights that were missing or unused: the program silences transformers' own report."""
    missing, unused = sorted(info.get("missing_keys", ())), sorted(info.get("unexpected_keys", ()))
    if section.config and (missing or unused):
        raise ValueError(
            f"model.config={section.config!r} does not fit the weights in {section.pretrained!r}. Missing in the files: "
            f"{_some(missing)}. Not used by the model: {_some(unused)}. Remove values that change the layers."
        )
    if missing:
        logger.warning(
            "%s has no weights for %s of the model: these start at random values.", section.pretrained, _some(missing)
        )
    if unused:
        logger.warning("%s has weights that the model does not use: %s.", section.pretrained, _some(unused))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    more = len(names) - _NUM_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def _model_config(section: ModelSection, tokenizer: TextTokenizer | None) -> "PretrainedConfig":
    """Return the Hugging Face configuration; raise UsageError for unknown values, which transformers would ignore."""
    cls = _config_class(section)
    # `to_dict` of a default instance lists all fields, inherited ones included.
    _check_names(cls.__name__, cls().to_dict(), section.config)
    # `finalize` passes no tokenizer, but only for models with a class_path.
    assert tokenizer is not None
    values: dict[str, Any] = {"vocab_size": len(tokenizer)}
    # The defaults of a model class belong to another vocabulary.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = getattr(tokenizer, name, None)
    return cls(**(values | section.config))


def _config_class(section: ModelSection) -> "type[PretrainedConfig]":
    if section.config_class is not None:
        config_class: type[PretrainedConfig] = class_paths.find_object(
            section.config_class, "model.config_class", "transformers"
        )
        return config_class
    from transformers import CONFIG_MAPPING

    assert section.model_type is not None
    if section.model_type not in CONFIG_MAPPING:
        hint = did_you_mean(section.model_type, CONFIG_MAPPING.keys())
        raise UsageError(f"model.model_type={section.model_type!r}: transformers has no such type.{hint}")
    return CONFIG_MAPPING[section.model_type]


def _check_names(config_name: str, known: Mapping[str, object], values: Mapping[str, object]) -> None:
    for name in values:
        if name not in known and name not in _NO_FIELDS:
            raise UsageError(f"model.config: {config_name} has no value {name!r}.{did_you_mean(name, known)}")
