"""What every trainer is: arguments, model, data, callbacks, and a state that is declared."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.components import SharingPattern, StateComponent, select_components
from forgather.ml.trainer.arguments.training_arguments import (
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    arguments_from,
)
from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.setup.given_objects import check_given
from forgather.ml.trainer.setup.model_construction import checked_builder, refuse_adapters
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    DataCollatorT,
    LossFunctionT,
    TrainerControl,
    TrainOutput,
)

__all__ = ["BaseTrainer", "BaseTrainingArguments"]

logger = logging.getLogger(__name__)


class BaseTrainer(ABC):
    """The interface of all trainers, and the parts of it that do not depend on how one trains.

    A subclass says how to train and evaluate, and declares its state; `Trainer` is the one to start from unless the
    loop itself is to be different. The caller's arguments object is never changed: the trainer works on a copy.
    """

    arguments_class: ClassVar[type[MinimalTrainingArguments]] = TrainingArguments

    def __init__(
        self,
        args: MinimalTrainingArguments | Mapping[str, Any],
        model: nn.Module | None = None,
        *,
        data_collator: DataCollatorT | None = None,
        train_dataset: BaseDataset | None = None,
        eval_dataset: BaseDataset | None = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        default_callbacks: bool = True,
        compute_loss_func: LossFunctionT | None = None,
    ) -> None:
        check_given(type(self).__name__, args, model, model_init, data_collator, compute_loss_func, callbacks)
        if model is not None:
            refuse_adapters(model)
        self.args: Any = arguments_from(self.arguments_class, args)
        if isinstance(self.args, BaseTrainingArguments):
            self.args = self.args.under_both_names()
        self.model = model
        # Here rather than where it is called: every strategy builds the model in a place of its own.
        self.model_init = None if model_init is None else checked_builder(model_init)
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func = compute_loss_func
        self.control = TrainerControl()
        self.state: Any = None
        defaults = self._default_callbacks() if default_callbacks else ()
        self._callback_handler = CallbackHandler(() if callbacks is None else callbacks, defaults)

    @abstractmethod
    def train(self, **kwargs: Any) -> TrainOutput:
        """Train to the end, or from where a checkpoint left off."""

    @abstractmethod
    def evaluate(self, eval_dataset: BaseDataset | None = None) -> dict[str, Any]:
        """The evaluation loss, and what comes with it."""

    @abstractmethod
    def save_checkpoint(self, path: str | None = None) -> str:
        """Save everything a resume needs, and return where."""

    @abstractmethod
    def load_checkpoint(self, path: str | None = None) -> str | None:
        """Load what `save_checkpoint` saved, and return from where."""

    @abstractmethod
    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model alone, as a Hugging Face directory."""

    @abstractmethod
    def get_state_components(self) -> list[StateComponent]:
        """Everything that can be checkpointed, and how ranks share it."""

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        """The families of groups that PER_GROUP components name."""
        return {}

    def get_active_state_components(self) -> list[StateComponent]:
        """The components that `args.checkpoint_components` names, or all."""
        return select_components(self.get_state_components(), getattr(self.args, "checkpoint_components", None))

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL

    def unwrapped_model(self) -> nn.Module:
        """The model itself, without what a strategy or compiler wrapped around it."""
        if self.model is None:
            raise RuntimeError("The model is not built yet: it is when training or evaluation begins.")
        return self.model

    # --- callbacks

    @property
    def callbacks(self) -> list[Any]:
        return self._callback_handler.callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an instance of a callback class."""
        self._callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any | None:
        """Remove a callback, given itself or its class, and return it."""
        return self._callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callback_handler.pop(callback)

    def log(self, logs: dict[str, Any]) -> None:
        """Add a record to the history and tell the callbacks."""
        if "epoch" not in logs:
            logs["epoch"] = self.state.epoch
        record = {**logs, "step": self.state.global_step}
        self.state.log_history.append(record)
        self._dispatch("on_log", logs=logs)
        # Numbers that callbacks added; the history is checkpointed, and need not be able to hold anything else.
        added = {name: value for name, value in logs.items() if type(value) in (bool, int, float)}
        record.update({**added, **record})

    def _dispatch(self, event: str, **details: Any) -> None:
        self._callback_handler.dispatch(event, self.control, **details)

    def _default_callbacks(self) -> list[Any]:
        from forgather.ml.trainer.callbacks import default_callbacks

        return default_callbacks()
