"""Types that trainers, callbacks and users share: state, control, callback, and aliases."""

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
"""`TrainerState.max_steps` of a run without a limit."""

BaseDataset = Any
"""A map-style dataset, an iterable one, or a loader that yields batches by itself."""

OptimizerT = Optimizer
"""An optimizer; wrappers such as Accelerate's, and objects with its methods, serve as well."""
LRSchedulerT = LRScheduler
"""A learning-rate schedule; wrappers such as Accelerate's, and objects with its methods, serve as well."""
DataCollatorT = Callable[[list[Any]], Mapping[str, Any]]
LossFunctionT = Callable[[Tensor, Tensor], Tensor]
OptimizerFactoryT = Callable[[Iterable[Any]], OptimizerT]
LRSchedulerFactoryT = Callable[[OptimizerT], LRSchedulerT]
FusedLossFactoryT = Callable[[nn.Module], LossFunctionT]
EnableCheckpointFnT = Callable[[int, nn.Module], None]


class TrainOutput(NamedTuple):
    """What `train` returns; `metrics` has `train_loss`."""

    global_step: int
    metrics: dict[str, Any]


class IntervalStrategy(Enum):
    """When something happens that happens again and again."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"

    @classmethod
    def _missing_(cls, value: object) -> "IntervalStrategy":
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not an interval strategy; choose one of {choices}.")


_RESUMED_FIELDS = (
    "epoch",
    "global_step",
    "raw_epoch",
    "epoch_start_step",
    "epoch_train_steps",
    "log_history",
    "best_metric",
    "num_input_tokens_seen",
    "total_flos",
)


@dataclass(kw_only=True)
class TrainerState:
    """Where training is; callbacks read it, and Hugging Face callbacks find the names they know."""

    logging_steps: int
    eval_steps: int
    train_batch_size: int
    max_steps: int
    num_train_epochs: float
    max_eval_steps: int
    epoch: float = 0.0
    """Continuous: whole epochs done, plus the share of the present one's steps."""
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
        """What a resume needs; settings come from the arguments, and paths are stored elsewhere."""
        return {name: getattr(self, name) for name in _RESUMED_FIELDS if hasattr(self, name)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name in _RESUMED_FIELDS:
            if name in state_dict:
                setattr(self, name, state_dict[name])


@dataclass(slots=True)
class TrainerControl:
    """What callbacks ask the loop to do next."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    """Ends the present epoch only."""
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False


class TrainerCallback:
    """Marks a class as a callback; handlers are found by their names, so any object may be one.

    A handler is a method named after an event (`on_step_end`, `on_log`, ...). It is called as
    `handler(args, state, control, **rest)`: three arguments by position, and by keyword model, processing_class, optimizer,
    lr_scheduler, train_dataloader, eval_dataloader, trainer and the keywords of the event. A handler without `**kwargs` gets
    the keywords that it names. It may return a control or None.
    """

    changes_control = True
    """False: no handler ever asks for anything, so that ranks need not settle at every step what was asked for."""
    reads_final_metrics = False
    """True: told of logs and evaluations last, so that it sees the metrics that other callbacks add."""

    @property
    def name(self) -> str:
        return type(self).__name__


@runtime_checkable
class CheckpointInterface(Protocol):
    """What a trainer needs of a checkpoint manager."""

    def save_checkpoint(self, checkpoint_path: str | None = None, checkpoint_id: str | int | None = None) -> str: ...

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None: ...

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None: ...

    def resolve_checkpoint_path(self, path: str | bool | None = None) -> str | None: ...


@runtime_checkable
class StatefulProvider(Protocol):
    """What a checkpoint manager needs of a trainer."""

    def get_state_components(self) -> list[StateComponent]: ...

    def get_process_groups(self) -> dict[str, ProcessGroup]: ...


def __getattr__(name: str) -> object:
    """`MinimalTrainingArguments`, imported on first use: the module of the arguments imports this one."""
    if name != "MinimalTrainingArguments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments

    return MinimalTrainingArguments
