"""The files that make a directory of weights a Hugging Face model: configuration, generation defaults, tokenizer."""

import copy
import os
import tempfile
from typing import Any

from torch import nn


def describe_model(model: nn.Module, preprocessor: Any = None) -> dict[str, bytes]:
    """Name and content of each such file; nothing for a model that is not from transformers."""
    with tempfile.TemporaryDirectory() as folder:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            _complete(config, model).save_pretrained(folder)
        generation_config: Any = getattr(model, "generation_config", None)
        if hasattr(generation_config, "save_pretrained"):
            generation_config.save_pretrained(folder)
        if hasattr(preprocessor, "save_pretrained"):
            preprocessor.save_pretrained(folder)
        return _read_files(folder)


def _complete(config: Any, model: nn.Module) -> Any:
    """A copy of the configuration with what `from_pretrained` needs to know about the model itself."""
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    if dtype is not None:
        config.dtype = dtype
    return config


def _read_files(folder: str) -> dict[str, bytes]:
    files = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                files[os.path.relpath(path, folder)] = file.read()
    return files
