"""Configuration schema: the sections of a configuration file as plain dataclasses.

Docstrings of classes and fields are the help texts of `forgather train --help`. Imports no torch, so that the help page
appears quickly; `parser` fills the dataclasses.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.training_arguments import TrainingArguments


class Factory(TypedDict):
    """Callable and the keyword arguments to call it with."""

    class_path: str
    init_args: NotRequired[dict[str, Any]]


@dataclass(kw_only=True)
class ModelSection:
    """The model: new from a Hugging Face configuration, pretrained, or returned by a callable."""

    # Exactly one of model_type, config_class, pretrained and class_path must be set; `model_builders` checks it.
    model_type: str | None = None
    """Hugging Face model type to build from scratch, such as "llama"."""
    config_class: str | None = None
    """The same by configuration class, such as "transformers.LlamaConfig"."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values of the configuration, or overrides of the one stored with a pretrained model. For a new model, vocab_size
    and the ids of special tokens come from the tokenizer unless set here."""
    auto_class: str = "AutoModelForCausalLM"
    """Class of transformers that builds or loads the model."""
    pretrained: str | None = None
    """Local directory of a pretrained model."""
    class_path: str | None = None
    """Callable that returns the model."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable, or of from_pretrained."""


@dataclass(kw_only=True)
class TokenizerSection:
    """The tokenizer: one token per byte, unless a directory or a callable is set."""

    path: str | None = None
    """Local directory of a Hugging Face tokenizer."""
    class_path: str | None = None
    """Callable that returns the tokenizer."""
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DataSection:
    """The data: files, a dataset on disk, or the result of a callable."""

    # Exactly one of files, dataset and class_path must be set; `data_builders` checks it.
    files: list[str] = field(default_factory=list)
    """Paths and globs of text files (one document each), JSON lines (.jsonl) or parquet files (one document per row).
    Text and JSON lines may be compressed: .gz, .bz2, .xz or .zst."""
    eval_files: list[str] = field(default_factory=list)
    """The same for evaluation; without them, eval_fraction of the documents are kept for evaluation."""
    dataset: str | None = None
    """Directory of a Hugging Face dataset, written by save_to_disk."""
    eval_split: str | None = None
    """Split of the dataset for evaluation, such as "validation"; without it, eval_fraction of the documents."""
    class_path: str | None = None
    """Callable that returns documents (strings), or a dict with the datasets "train" and "eval", which are used
    unchanged."""
    init_args: dict[str, Any] = field(default_factory=dict)
    text_field: str = "text"
    """Field with the text in JSON lines, parquet files and datasets."""
    sequence_length: int = 512
    """Number of tokens per training sequence."""
    eval_fraction: float = 0.05
    """Fraction of the documents that is kept for evaluation."""
    seed: int = 0
    """Seed for the choice of these documents."""
    cache_dir: str | None = None
    """Directory for the tokens of files; None is the folder "tokens" in the output directory."""


@dataclass(kw_only=True)
class FactorySection:
    """Callable that replaces the default."""

    class_path: str | None = None
    """Class or function, such as "torch.optim.SGD"."""
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainerSection:
    """Distribution of training over devices."""

    kind: str = "single"
    """Strategy of the trainer; same as --trainer KIND."""
    schedule: str | None = None
    """Pipeline schedule: gpipe (the default), 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbv or
    dualpipev."""
    splitter: FactorySection = field(default_factory=FactorySection)
    """Callable that returns the model splitter of a pipeline, called with init_args; most models need none."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of the trainer's constructor."""
    default_callbacks: bool = True
    """Adds progress, run summary, speed and JSON log to the configured callbacks."""


@dataclass(kw_only=True)
class Configuration:
    """Configuration of a run."""

    model: ModelSection = field(default_factory=ModelSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    data: DataSection = field(default_factory=DataSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    # No default: the parser always builds it, with the class of the chosen trainer.
    args: "TrainingArguments"
    optimizer: FactorySection = field(default_factory=FactorySection)
    """Called with the parameters; default: AdamW with the learning rate and other values of args."""
    optimizer_groups: dict[str, Any] | None = None
    """Parameter groups by name: {group: {regex, config, factory}}; factory has class_path and init_args."""
    lr_scheduler: FactorySection = field(default_factory=FactorySection)
    """Called with the optimizer; default: the schedule in args.lr_scheduler_type."""
    loss: FactorySection = field(default_factory=FactorySection)
    """Function of logits and labels, a class of such functions, or a loss fused with the output layer, such as
    forgather.ml.loss.LinearCrossEntropyLoss; default: next-token cross-entropy."""
    callbacks: list[Factory] = field(default_factory=list)
    """Each with class_path and init_args; names without dots are in forgather.ml.trainer.callbacks."""


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "tokenizer": TokenizerSection,
    "data": DataSection,
    "trainer": TrainerSection,
    "optimizer": FactorySection,
    "lr_scheduler": FactorySection,
    "loss": FactorySection,
}
"""Sections with fields. `args` is missing, because its class imports torch."""

PLAIN_KEYS = ("optimizer_groups", "callbacks")
"""Top-level keys without fields."""
