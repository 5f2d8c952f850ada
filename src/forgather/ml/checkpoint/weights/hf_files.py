"""Hugging Face files beside the weights (configuration, generation defaults, tokenizer), and expected tensor names.

`from_pretrained` initialises missing tensors with random weights. `expected_weights` lists the names that it will look
for, so that a save can detect this. Snapshots and weight plans call this module.
"""

import copy
import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers
from forgather.ml.checkpoint.weights.index import create_sharing_metadata
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.utils import class_of

logger = logging.getLogger(__name__)

CONFIG_FILES = ("config.json", "generation_config.json")
"""Configuration files that `from_pretrained` reads to choose and build the class."""


@dataclass(frozen=True)
class ExpectedWeights:
    """Tensor names that a class of transformers looks for; for a group of tied names, any one name is enough."""

    class_name: str
    names: tuple[str, ...]
    tied: tuple[frozenset[str], ...]

    def missing_from(self, stored: Collection[str]) -> list[str]:
        """Return the tensors that `from_pretrained` would initialise with random weights."""
        present = set(stored)
        supplied = present.union(*(group for group in self.tied if group & present))
        return [name for name in self.names if name not in supplied]


def describe_model(model: nn.Module, preprocessor: object = None) -> dict[str, bytes]:
    """Return name and content of each Hugging Face file; an empty dict for a model that is not from transformers."""
    # `save_pretrained` only writes to a directory, so the files are read back from a temporary directory.
    with tempfile.TemporaryDirectory() as folder:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            _complete(config, model).save_pretrained(folder)
        generation_config: Any = getattr(model, "generation_config", None)
        if hasattr(generation_config, "save_pretrained"):
            generation_config.save_pretrained(folder)
        if hasattr(preprocessor, "save_pretrained"):
            preprocessor.save_pretrained(folder)
        return read_files(folder)


def expected_weights(model: nn.Module) -> ExpectedWeights | None:
    """Return the tensors that `from_pretrained` will look for in a directory of this model; None if unknown.

    The model class is built once on the meta device, from the configuration as it will be read. The result is cached.
    """
    # Looked up instead of imported: without transformers in memory the model cannot be from it.
    config: Any = getattr(model, "config", None)
    transformers = sys.modules.get("transformers.configuration_utils")
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    if getattr(config, "quantization_config", None) is not None:
        # The quantiser chooses the tensor names of a quantised weight.
        return None
    reader: Any = class_of(model)
    config_class: Any = type(config)
    if not _is_pretrained(reader):
        reader = _class_that_reads(config)
        config_class = None if reader is None else reader.config_class
    # As text, because the cache needs a hashable key, and `from_pretrained` reads the configuration from text as well.
    return None if reader is None else _expected_by(reader, config_class, config.to_json_string())


def _is_pretrained(model_class: type) -> bool:
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and issubclass(model_class, transformers.PreTrainedModel)


def _class_that_reads(config: Any) -> object:
    """Return the class that `from_pretrained` builds for a configuration; None for an unknown model type."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.model_type not in CONFIG_MAPPING:
        return None
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    known = [one for one in named if isinstance(one, type) and _is_pretrained(one)]
    if known:
        return known[0]
    config_class = CONFIG_MAPPING[config.model_type]
    for chooser in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        found = chooser._model_mapping.get(config_class, None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    return None


# Cached, because every save needs the names and building a large model costs time, even on the meta device.
@functools.lru_cache(maxsize=16)
def _expected_by(model_class: Any, config_class: Any, config_text: str) -> ExpectedWeights | None:
    try:
        # Constructors draw random numbers, which must not change training.
        config = config_class.from_dict(json.loads(config_text))
        with undisturbed_random_numbers(), no_init_weights(), torch.device("meta"):
            reference = model_class(config)
    except Exception as error:  # noqa: BLE001 - somebody else's class: what it needs beside a configuration is unknown
        logger.debug("The names that %s expects are unknown: %s: %s", model_class, type(error).__name__, error)
        return None
    tied = [frozenset(group) for group in create_sharing_metadata(reference)]
    # Pairs of names that transformers ties. On the meta device they may still be separate tensors.
    pairs = getattr(reference, "all_tied_weights_keys", None) or {}
    tied += [frozenset(pair) for pair in pairs.items()]
    # Missing tensors with these names are no problem: the class recomputes them.
    optional = [re.compile(pattern) for pattern in reference._keys_to_ignore_on_load_missing or ()]
    names = [name for name in reference.state_dict() if not any(one.search(name) for one in optional)]
    return ExpectedWeights(model_class.__name__, tuple(names), tuple(tied))


def _complete(config: Any, model: nn.Module) -> Any:
    """Return a copy of the configuration with the class name and dtype of the model, for `from_pretrained`."""
    # A copy, because the configuration belongs to the user's model.
    config = copy.deepcopy(config)
    config.architectures = [class_of(model).__name__]
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    if dtype is not None:
        config.dtype = dtype
    return config


def read_files(folder: str) -> dict[str, bytes]:
    """Return the content of all files below a folder by relative path."""
    files = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                files[os.path.relpath(path, folder)] = file.read()
    return files
