"""Shared types of trainers, callbacks and users: trainer state, control, callback base class, type aliases.

The module imports no other module of the trainer package, so that all of them can import it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forgather.ml.checkpoint.components import StateComponent

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments as MinimalTrainingArguments

NO_STEP_LIMIT = 2**62
"""Value of `TrainerState.max_steps` for a run without a step limit."""

BaseDataset = Any
"""Map-style dataset, iterable dataset, or dataloader that yields batches."""

OptimizerT = Optimizer
"""Optimizer. Wrappers such as Accelerate's, and objects with the same methods, are accepted too."""
LRSchedulerT = LRScheduler
"""Learning-rate scheduler. Wrappers such as Accelerate's, and objects with the same methods, are accepted too."""
DataCollatorT = Callable[[list[Any]], Mapping[str, Any]]
LossFunctionT = Callable[[Tensor, Tensor], Tensor]
ComputeMetricsT = Callable[..., Mapping[str, Any]]
"""`compute_metrics(prediction)`, or with `batch_eval_metrics` `compute_metrics(prediction, compute_result=...)`."""
OptimizerFactoryT = Callable[[Iterable[Any]], OptimizerT]
LRSchedulerFactoryT = Callable[[OptimizerT], LRSchedulerT]
FusedLossFactoryT = Callable[[nn.Module], LossFunctionT]
EnableCheckpointFnT = Callable[[int, nn.Module], None]


class TrainOutput(NamedTuple):
    """Return value of `train`. `metrics` contains `train_loss`."""

    global_step: int
    metrics: dict[str, Any]


class IntervalStrategy(Enum):
    """How often a recurring action (logging, evaluation, saving) runs."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"

    @classmethod
    def _missing_(cls, value: object) -> "IntervalStrategy":
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not an interval strategy; choose one of {choices}.")


# Settings come from the arguments of the resumed run. Paths would be wrong after a move of the output directory.
_RESUMED_FIELDS = (
    "epoch",
    "global_step",
    "raw_epoch",
    "epoch_start_step",
    "epoch_train_steps",
    "log_history",
    "best_metric",
    "best_global_step",
    "num_input_tokens_seen",
    "total_flos",
)


@dataclass(kw_only=True)
class TrainerState:
    """Progress of training, for callbacks. Field names follow Hugging Face, so that its callbacks work."""

    logging_steps: int
    eval_steps: int
    train_batch_size: int
    max_steps: int
    num_train_epochs: float
    max_eval_steps: int
    epoch: float = 0.0
    """Completed epochs, plus the completed fraction of the current epoch."""
    global_step: int = 0
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    log_history: list[dict[str, Any]] = field(default_factory=list)
    save_steps: int = 0
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: list[Any] = field(default_factory=list)
    epoch_start_step: int = 0
    raw_epoch: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that a resume needs, without settings and paths."""
        return {name: getattr(self, name) for name in _RESUMED_FIELDS if hasattr(self, name)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name in _RESUMED_FIELDS:
            if name in state_dict:
                setattr(self, name, state_dict[name])


@dataclass(slots=True)
class TrainerControl:
    """Requests of callbacks to the training loop."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    """Ends only the current epoch."""
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False


class TrainerCallback:
    """Base class of callbacks. It is optional: handlers are found by name, so any object may be a callback.

    A handler is a method named after an event (`on_step_end`, `on_log`, ...). It is called as
    `handler(args, state, control, **rest)`. The first three arguments are positional. The keywords are model,
    processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader, trainer, and the keywords of the event.
    A handler without `**kwargs` receives only the keywords that it declares. It may return a control or None.
    """

    changes_control = True
    """Whether handlers may set flags of `control`. False spares the ranks an all-reduce of the flags at every step."""
    reads_final_metrics = False
    """Whether logs and evaluations are dispatched here last, after other callbacks have added their metrics."""

    @property
    def name(self) -> str:
        return type(self).__name__


@runtime_checkable
class CheckpointInterface(Protocol):
    """Checkpoint manager methods that a trainer calls."""

    def save_checkpoint(self, checkpoint_path: str | None = None, checkpoint_id: str | int | None = None) -> str: ...

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None: ...

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None: ...

    def resolve_checkpoint_path(self, path: str | bool | None = None) -> str | None: ...


@runtime_checkable
class StatefulProvider(Protocol):
    """Trainer methods that a checkpoint manager calls."""

    def get_state_components(self) -> list[StateComponent]: ...

    def get_process_groups(self) -> dict[str, ProcessGroup]: ...


def __getattr__(name: str) -> object:
    """Import `MinimalTrainingArguments` on first use. Its module imports this one, so an import above would be a cycle."""
    if name != "MinimalTrainingArguments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments

    return MinimalTrainingArguments
