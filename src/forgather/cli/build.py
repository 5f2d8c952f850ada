"""The parts of a run, made as its configuration says."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forgather.cli import objects
from forgather.cli.configuration import (
    Configuration,
    DataSection,
    FactorySection,
    ModelSection,
    TokenizerSection,
    TrainerSection,
)
from forgather.cli.errors import UsageError, nearest_hint
from forgather.cli.trainers import TRAINERS, find_kind
from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.data.documents import find_files, read_documents, read_saved_dataset
from forgather.data.packed import PackedTokens
from forgather.data.token_store import EvaluationShare, TokenArray, file_identity, tokenize, tokenize_to_files
from forgather.ml.trainer.loss_weighting import parameters_of

_CALLBACKS_MODULE = "forgather.ml.trainer.callbacks"


@dataclass(frozen=True)
class Datasets:
    """What to train and evaluate on."""

    train: Any
    eval: Any | None


def build_tokenizer(section: TokenizerSection) -> Any:
    """The tokenizer of the configuration; without one, one token per byte."""
    if section.path is not None and section.class_path is not None:
        raise UsageError("tokenizer.path and tokenizer.class_path exclude each other: remove one of the two.")
    if section.class_path is not None:
        return objects.call(section.class_path, section.init_args, "tokenizer")
    if section.path is None:
        return byte_tokenizer()
    _require_directory(section.path, "tokenizer.path")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(section.path, local_files_only=True, **section.init_args)


def model_builder(section: ModelSection, tokenizer: Any) -> Callable[[], Any]:
    """A function that builds the model; what is wrong with the section shows now, not when it is called."""
    ways = ("model_type", "config_class", "pretrained", "class_path")
    given = [name for name in ways if getattr(section, name) is not None]
    if len(given) != 1:
        said = f"it has {' and '.join(given)}" if given else "it has none of them"
        raise UsageError(f"The model needs exactly one of {', '.join(f'model.{name}' for name in ways)}; {said}.")
    if section.class_path is not None:
        function = objects.find_object(section.class_path, "model.class_path")
        objects.check_keywords(function, section.init_args, "model", num_positional=0)
        return lambda: function(**section.init_args)
    auto_class = objects.find_object(section.auto_class, "model.auto_class", "transformers")
    if section.pretrained is not None:
        path = _require_directory(section.pretrained, "model.pretrained")
        return lambda: auto_class.from_pretrained(path, local_files_only=True, **section.init_args)
    config = _model_config(section, tokenizer)
    return lambda: auto_class.from_config(config)


def build_datasets(section: DataSection, tokenizer: Any, output_dir: str) -> Datasets:
    """Datasets of packed sequences, or those that the callable of the section returns."""
    ways = {"files": bool(section.files), "dataset": section.dataset is not None, "class_path": section.class_path}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) != 1:
        said = f"it has {' and '.join(given)}" if given else "it has none of them"
        raise UsageError(f"The data needs exactly one of {', '.join(f'data.{name}' for name in ways)}; {said}.")
    if section.class_path is not None:
        made = objects.call(section.class_path, section.init_args, "data")
        if isinstance(made, Mapping):
            return _ready_datasets(made)
        return _packed(tokenize(made, tokenizer, _share(section)), section, tokenizer)
    if section.dataset is not None:
        return _from_saved_dataset(section, section.dataset, tokenizer)
    return _from_files(section, tokenizer, section.cache_dir or os.path.join(output_dir, "tokens"))


def build_callbacks(configuration: Configuration) -> list[Any]:
    """The callbacks of the configuration; the trainer adds its default ones, if wanted."""
    callbacks: list[Any] = []
    for number, entry in enumerate(configuration.callbacks):
        key = f"callbacks[{number}]"
        callbacks.append(objects.call(entry["class_path"], entry.get("init_args", {}), key, _CALLBACKS_MODULE))
    return callbacks


def build_stage_options(section: TrainerSection) -> dict[str, Any]:
    """The keywords by which a trainer divides the model, for those trainers that do."""
    options: dict[str, Any] = {}
    if section.schedule is not None:
        options["pipe_schedule_factory"] = section.schedule
    if section.splitter.class_path is not None:
        options["model_splitter"] = objects.call(
            section.splitter.class_path, section.splitter.init_args, "trainer.splitter"
        )
    if options and not find_kind(section.kind).has_stages:
        asked = "trainer.schedule" if section.schedule is not None else "trainer.splitter"
        able = " or ".join(f"--trainer {name}" for name, kind in TRAINERS.items() if kind.has_stages)
        raise UsageError(
            f"{asked} is for {able}, but trainer.kind is {section.kind!r}, which does not divide the model."
        )
    return options


def build_loss(section: FactorySection) -> dict[str, Any]:
    """The keyword by which a trainer gets its loss function; a class is one of such functions and is instantiated.

    What takes the head of the model first (`output_embeddings`) makes a fused loss.
    """
    if section.class_path is None:
        return {"compute_loss_func": objects.partial(section, "loss")}
    function: Any = objects.find_object(section.class_path, "loss.class_path")
    if next(iter(parameters_of(function)), None) == "output_embeddings":
        return {"fused_loss_factory": objects.partial(section, "loss")}
    if isinstance(function, type):
        return {"compute_loss_func": objects.call(section.class_path, section.init_args, "loss")}
    return {"compute_loss_func": objects.partial(section, "loss") if section.init_args else function}


def build_optimizer_groups(groups: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The groups with their factories in place of their paths."""
    if groups is None:
        return None
    built: dict[str, Any] = {}
    for name, group in groups.items():
        built[name] = group
        if isinstance(group, Mapping) and group.get("factory") is not None:
            key = f"optimizer_groups.{name}.factory"
            built[name] = {**group, "factory": objects.partial(_factory_section(group["factory"], key), key)}
    return built


def _factory_section(value: Any, key: str) -> FactorySection:
    if not isinstance(value, Mapping) or "class_path" not in value or set(value) - {"class_path", "init_args"}:
        raise UsageError(f"{key}={value!r}: expected class_path, and init_args if it has any.")
    return FactorySection(**value)


def _model_config(section: ModelSection, tokenizer: Any) -> Any:
    """The Hugging Face configuration; a value that it does not know, and would only carry along, is refused."""
    cls = _config_class(section)
    known = cls().to_dict()
    for name in section.config:
        if name not in known and name not in ("attn_implementation", "dtype"):
            raise UsageError(f"model.config: {cls.__name__} has no value {name!r}.{nearest_hint(name, known)}")
    values: dict[str, Any] = {"vocab_size": len(tokenizer)}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = getattr(tokenizer, name, None)
    return cls(**(values | section.config))


def _config_class(section: ModelSection) -> Any:
    if section.config_class is not None:
        return objects.find_object(section.config_class, "model.config_class", "transformers")
    from transformers import CONFIG_MAPPING

    assert section.model_type is not None
    if section.model_type not in CONFIG_MAPPING:
        hint = nearest_hint(section.model_type, CONFIG_MAPPING.keys())
        raise UsageError(f"model.model_type={section.model_type!r}: transformers has no such type.{hint}")
    return CONFIG_MAPPING[section.model_type]


def _share(section: DataSection, fraction: float | None = None) -> EvaluationShare:
    return EvaluationShare(section.eval_fraction if fraction is None else fraction, section.seed)


def _from_files(section: DataSection, tokenizer: Any, folder: str) -> Datasets:
    def tokens_of(patterns: list[str], share: EvaluationShare) -> dict[str, TokenArray]:
        files = find_files(patterns)
        sources = [section.text_field, *(file_identity(path) for path in files)]
        return tokenize_to_files(read_documents(files, section.text_field), tokenizer, share, folder, sources)

    if not section.eval_files:
        return _packed(tokens_of(section.files, _share(section)), section, tokenizer)
    everything = _share(section, 0.0)
    train, evaluation = tokens_of(section.files, everything), tokens_of(section.eval_files, everything)
    return _packed({"train": train["train"], "eval": evaluation["train"]}, section, tokenizer)


def _from_saved_dataset(section: DataSection, path: str, tokenizer: Any) -> Datasets:
    def tokens_of(split: str, share: EvaluationShare) -> dict[str, TokenArray]:
        return tokenize(read_saved_dataset(path, section.text_field, split), tokenizer, share)

    if section.eval_split is None:
        return _packed(tokens_of("train", _share(section)), section, tokenizer)
    everything = _share(section, 0.0)
    train, evaluation = tokens_of("train", everything), tokens_of(section.eval_split, everything)
    return _packed({"train": train["train"], "eval": evaluation["train"]}, section, tokenizer)


def _packed(tokens: Mapping[str, TokenArray], section: DataSection, tokenizer: Any) -> Datasets:
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0

    def packed(split: str) -> PackedTokens:
        one = tokens[split]
        return PackedTokens(one.tokens, one.document_starts, section.sequence_length, padding)

    train, evaluation = packed("train"), packed("eval")
    if len(train) == 0:
        raise _no_text_error(tokens["eval"].num_documents, section.eval_fraction)
    return Datasets(train, evaluation if len(evaluation) else None)


def _no_text_error(num_kept: int, fraction: float) -> ValueError:
    reason = "the documents are empty, or there are none."
    if num_kept:
        reason = (
            f"all {num_kept} documents are kept for evaluation (data.eval_fraction={fraction}). Give more documents, or a "
            "smaller share."
        )
    return ValueError(f"There is no text to train on: {reason}")


def _ready_datasets(made: Mapping[str, Any]) -> Datasets:
    if "train" not in made or set(made) - {"train", "eval"}:
        raise ValueError(
            f'data.class_path returned a dict of {list(made)}; it is to have "train", and may have "eval".'
        )
    return Datasets(made["train"], made.get("eval"))


def _require_directory(path: str, key: str) -> str:
    if not os.path.isdir(os.path.expanduser(path)):
        raise UsageError(f"{key}={path!r}: there is no such directory (nothing is downloaded; give a local one).")
    return os.path.expanduser(path)


def describe_data(datasets: Datasets) -> str | None:
    """How much there is to train on; None for datasets that are not ours."""
    if not isinstance(datasets.train, PackedTokens):
        return None
    parts = [f"{_sequences(datasets.train)} for training"]
    if isinstance(datasets.eval, PackedTokens):
        parts.append(f"{_sequences(datasets.eval)} for evaluation")
    return f"{' and '.join(parts)}, in sequences of {datasets.train.sequence_length}"


def _sequences(dataset: PackedTokens) -> str:
    from forgather.ml.trainer.callbacks.formatting import format_count

    return f"{format_count(len(dataset.tokens))} tokens of {len(dataset.document_starts):,} documents"
