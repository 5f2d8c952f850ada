"""Builders of tokenizer, callbacks, loss and optimizer groups from a configuration.

`model_builders` and `data_builders` build the model and the datasets. Called by `work/train.py` and `work/finalize.py`.
Bad values raise `UsageError` with their key.
"""

from collections.abc import Mapping
from typing import Any

from forgather.config import class_paths
from forgather.config.errors import UsageError
from forgather.config.schema import Configuration, FactorySection, TokenizerSection, TrainerSection
from forgather.config.trainer_kinds import TRAINERS, find_kind
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.token_store import TextTokenizer
from forgather.ml.trainer.step_loss.token_weighting import parameters_of

_CALLBACKS_MODULE = "forgather.ml.trainer.callbacks"


def build_tokenizer(section: TokenizerSection) -> TextTokenizer:
    """Return the tokenizer of the configuration; the byte tokenizer if none is set."""
    if section.path is not None and section.class_path is not None:
        raise UsageError("tokenizer.path and tokenizer.class_path cannot be combined: remove one of the two.")
    if section.class_path is not None:
        tokenizer: TextTokenizer = class_paths.call(section.class_path, section.init_args, "tokenizer")
        return tokenizer
    if section.path is None:
        if section.init_args:
            raise UsageError(
                f"tokenizer.init_args={section.init_args!r} needs tokenizer.class_path or tokenizer.path: set one of them, "
                "or remove tokenizer.init_args."
            )
        return byte_tokenizer()
    path = class_paths.require_directory(section.path, "tokenizer.path")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, **section.init_args)


def build_callbacks(configuration: Configuration) -> list[Any]:
    """Return the callbacks of the configuration; the trainer adds its defaults unless they are disabled."""
    callbacks: list[Any] = []
    for number, entry in enumerate(configuration.callbacks):
        key = f"callbacks[{number}]"
        callbacks.append(class_paths.call(entry["class_path"], entry.get("init_args", {}), key, _CALLBACKS_MODULE))
    return callbacks


def build_stage_options(section: TrainerSection) -> dict[str, Any]:
    """Return trainer keywords for splitting the model into pipeline stages; raise UsageError for other trainers."""
    options: dict[str, Any] = {}
    if section.schedule is not None:
        options["pipe_schedule_factory"] = section.schedule
    if section.splitter.class_path is not None:
        options["model_splitter"] = class_paths.call(
            section.splitter.class_path, section.splitter.init_args, "trainer.splitter"
        )
    if options and not find_kind(section.kind).has_stages:
        asked = "trainer.schedule" if section.schedule is not None else "trainer.splitter"
        able = " or ".join(f"--trainer {name}" for name, kind in TRAINERS.items() if kind.has_stages)
        raise UsageError(
            f"{asked} is for {able}, but trainer.kind is {section.kind!r}, which does not split the model."
        )
    return options


def build_loss(section: FactorySection) -> dict[str, Any]:
    """Return the trainer keyword for the loss function: `compute_loss_func` or `fused_loss_factory`.

    A class is instantiated with `init_args`. A callable with `output_embeddings` as its first parameter is a factory of
    fused losses.
    """
    if section.class_path is None:
        # Rejects init_args without class_path; otherwise None selects the trainer's default loss.
        return {"compute_loss_func": class_paths.partial(section, "loss")}
    function: object = class_paths.find_object(section.class_path, "loss.class_path")
    # The trainer calls a fused loss factory with the output layer of the model.
    if next(iter(parameters_of(function)), None) == "output_embeddings":
        return {"fused_loss_factory": class_paths.partial(section, "loss")}
    if isinstance(function, type):
        return {"compute_loss_func": class_paths.call(section.class_path, section.init_args, "loss")}
    return {"compute_loss_func": class_paths.partial(section, "loss") if section.init_args else function}


def build_optimizer_groups(groups: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the groups with each factory's `class_path` replaced by the callable."""
    if groups is None:
        return None
    built: dict[str, Any] = {}
    for name, group in groups.items():
        built[name] = group
        # A group may be None, which disables it. The trainer reports other mistakes in groups.
        if isinstance(group, Mapping) and group.get("factory") is not None:
            key = f"optimizer_groups.{name}.factory"
            built[name] = {**group, "factory": class_paths.partial(_factory_section(group["factory"], key), key)}
    return built


def _factory_section(value: object, key: str) -> FactorySection:
    if not isinstance(value, Mapping) or "class_path" not in value or set(value) - {"class_path", "init_args"}:
        raise UsageError(f"{key}={value!r}: expected class_path and, optionally, init_args.")
    return FactorySection(**value)
