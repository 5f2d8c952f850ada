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
    """A Hugging Face model type, such as "llama", to build from scratch."""
    config_class: str | None = None
    """The same by a configuration class, such as "transformers.LlamaConfig"."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values of that configuration, or of the one stored with a pretrained model; of a new one, vocab_size and the
    ids of special tokens follow the tokenizer unless given."""
    auto_class: str = "AutoModelForCausalLM"
    """The class of transformers that builds or loads the model."""
    pretrained: str | None = None
    """A local directory with a pretrained model."""
    class_path: str | None = None
    """A callable that returns the model."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keywords of that callable, or of from_pretrained."""


@dataclass(kw_only=True)
class TokenizerSection:
    """The tokenizer: one token per byte, unless a directory or a callable is given."""

    path: str | None = None
    """A local directory with a Hugging Face tokenizer."""
    class_path: str | None = None
    """A callable that returns the tokenizer."""
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DataSection:
    """The data: files, a dataset on disk, or the result of a callable."""

    # Exactly one of files, dataset and class_path must be set; `data_builders` checks it.
    files: list[str] = field(default_factory=list)
    """Paths and globs of text files (each a document), JSON lines (.jsonl) or parquet files (each row a document); text and
    JSON lines also as .gz, .bz2, .xz or .zst."""
    eval_files: list[str] = field(default_factory=list)
    """The same for evaluation; without them eval_fraction of the documents are kept from training."""
    dataset: str | None = None
    """The directory of a Hugging Face dataset, as save_to_disk wrote it."""
    eval_split: str | None = None
    """Its split for evaluation, such as "validation"; without it eval_fraction of the documents."""
    class_path: str | None = None
    """A callable that returns documents (texts), or a dict of datasets "train" and "eval", used as they are."""
    init_args: dict[str, Any] = field(default_factory=dict)
    text_field: str = "text"
    """The field of JSON lines, parquet files and datasets that holds the text."""
    sequence_length: int = 512
    """Tokens of a training sequence."""
    eval_fraction: float = 0.05
    """The share of documents that is kept from training."""
    seed: int = 0
    """Chooses these documents."""
    cache_dir: str | None = None
    """Where the tokens of files are kept; None is the folder "tokens" of the output directory."""


@dataclass(kw_only=True)
class FactorySection:
    """Callable that replaces the default."""

    class_path: str | None = None
    """A class or function, such as "torch.optim.SGD"."""
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainerSection:
    """Distribution of training over devices."""

    kind: str = "single"
    """The strategy; --trainer KIND says the same."""
    schedule: str | None = None
    """Of a pipeline: gpipe (the default), 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbv or dualpipev."""
    splitter: FactorySection = field(default_factory=FactorySection)
    """Of a pipeline: called with init_args, makes what divides the model into stages; for most models none is needed."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the trainer's constructor."""
    default_callbacks: bool = True
    """Progress, run summary, speed and JSON log, beside the callbacks of the configuration."""


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
    """Called with the parameters; without one AdamW, with the learning rate and so on of args."""
    optimizer_groups: dict[str, Any] | None = None
    """Groups of parameters by name: {group: {regex, config, factory}}; factory is a class_path and init_args."""
    lr_scheduler: FactorySection = field(default_factory=FactorySection)
    """Called with the optimizer; without one the schedule that args.lr_scheduler_type names."""
    loss: FactorySection = field(default_factory=FactorySection)
    """A function of logits and labels, a class of such, or one that is fused with the head of the model, such as
    forgather.ml.loss.LinearCrossEntropyLoss; without one the loss of the next token."""
    callbacks: list[Factory] = field(default_factory=list)
    """Each a class_path and init_args; a name without dots is one of forgather.ml.trainer.callbacks."""


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "tokenizer": TokenizerSection,
    "data": DataSection,
    "trainer": TrainerSection,
    "optimizer": FactorySection,
    "lr_scheduler": FactorySection,
    "loss": FactorySection,
}
"""The sections with fields of their own, beside `args`, whose class needs torch."""

PLAIN_KEYS = ("optimizer_groups", "callbacks")
"""Keys at the top that have no fields."""
