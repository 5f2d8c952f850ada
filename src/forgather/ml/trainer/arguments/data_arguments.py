"""Arguments of samples, loss and optimizer by name: columns, sampling, label smoothing, `optim`, batch size, reports.

Field names follow `transformers.TrainingArguments`. `BaseTrainingArguments` inherits them. An invalid value raises
ValueError in `__post_init__`.
"""

from dataclasses import dataclass, field

from forgather.ml.optim.named_optimizers import OPTIMIZER_NAMES, parsed_options
from forgather.ml.trainer.arguments.checks import checked_numbers
from forgather.ml.trainer.arguments.field_values import Numbers
from forgather.ml.trainer.arguments.minimal_arguments import MinimalTrainingArguments

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")


@dataclass(kw_only=True)
class DataArguments(MinimalTrainingArguments):
    """Arguments of columns, sampling, label smoothing, the optimizer by name, the batch size and reports."""

    remove_unused_columns: bool = False
    """Drop the columns of a dataset that are no argument of the model's forward, before the data_collator runs."""
    train_sampling_strategy: str = "random"
    """"random", "sequential" (the same as shuffle=False), or "group_by_length": samples of similar length together."""
    length_column_name: str = "length"
    """Column with the length of a sample, for group_by_length. Without it the length of input_ids counts."""
    data_is_sharded: bool | None = None
    """Map-style datasets that every rank reads itself (dispatch_batches=False). True: each rank has its own shard. False: all
    ranks have the same dataset, and the trainer shards it. None: samples of the ranks decide, and a doubt is an error."""
    skip_samples: Numbers = field(default_factory=tuple)
    """Indices of training samples to leave out. Their batches get smaller; other batches stay the same."""
    skip_steps: Numbers = field(default_factory=tuple)
    """Steps without an update: their batches are read and passed over. Step number and schedule advance."""
    label_smoothing_factor: float = 0.0
    """Part of the target probability that is spread over all classes, in training and evaluation. 0: none."""
    optim: str = "adamw_torch"
    """Optimizer by the names of transformers, such as "adamw_torch", "sgd", "adafactor" or "adamw_torch_8bit"."""
    optim_args: str | None = None
    """Options of the optimizer: "momentum=0.9, nesterov=true"."""
    auto_find_batch_size: bool = False
    """After out-of-memory, repeat the step with half the samples per forward pass. The step's samples stay the same."""
    report_to: list[str] | str | None = None  # HfArgumentParser supports this order of types only.
    """Services to report to, by the names of transformers: "tensorboard", "wandb", "mlflow", ... None or "none": none."""
    disable_tqdm: bool | None = None
    """True: no progress bars; log records are still printed as lines."""

    def __post_init__(self) -> None:
        # Enums of transformers are accepted.
        for name in ("optim", "train_sampling_strategy"):
            setattr(self, name, getattr(getattr(self, name), "value", getattr(self, name)))
        super().__post_init__()
        self.report_to = _as_names(self.report_to)
        self._choose("train_sampling_strategy", SAMPLING_STRATEGIES)
        self.skip_samples = checked_numbers("skip_samples", self.skip_samples, least=0)
        self.skip_steps = checked_numbers("skip_steps", self.skip_steps, least=1)
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} cannot be used: it must be at least 0 and less than 1."
            )
        self._choose("optim", OPTIMIZER_NAMES)
        parsed_options(self.optim_args)
        self._check_sampling()
        self._check_batch_size()

    @property
    def shuffles(self) -> bool:
        """Whether the training data are shuffled."""
        return getattr(self, "shuffle", True) and self.train_sampling_strategy != "sequential"

    def _check_sampling(self) -> None:
        if self.train_sampling_strategy == "group_by_length" and not self.shuffles:
            raise ValueError(
                "train_sampling_strategy='group_by_length' cannot be combined with shuffle=False: groups of similar length "
                "are drawn from a shuffled order. Set shuffle=True, or train_sampling_strategy='sequential'."
            )

    def _check_batch_size(self) -> None:
        if not self.auto_find_batch_size:
            return
        if getattr(self, "fuse_optim_with_backward", False):
            raise ValueError(
                "auto_find_batch_size=True cannot be combined with fuse_optim_with_backward=True: parameters are updated "
                "during the backward pass, so a step that runs out of memory cannot be repeated. Turn one of the two off."
            )
        if not getattr(self, "token_weighted_loss", True):
            raise ValueError(
                "auto_find_batch_size=True cannot be combined with token_weighted_loss=False: parts of a batch with different "
                "numbers of targets would have the same weight. Set token_weighted_loss=True, or auto_find_batch_size=False."
            )


def _as_names(report_to: list[str] | str | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    return [] if names == ["none"] else names
