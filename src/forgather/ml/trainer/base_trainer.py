"""BaseTrainer: what every trainer has, and what people subclass for a trainer with a loop of its own.

A subclass writes three methods, `_prepare`, `_train_loop` and `_eval_loop`. Events, callbacks, declared state, exact
checkpoints, resuming and exporting are here. `Trainer` is the subclass with our own loop.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, get_args

from torch import nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.components import SharingPattern, StateComponent, select_components
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.checkpoint.state.rng import RNGState, undisturbed_random_numbers
from forgather.ml.distributed import (
    DistributedEnvInterface,
)
from forgather.ml.trainer.arguments.training_arguments import (
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    arguments_from,
)
from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.loop.scheduler_state import SchedulerState
from forgather.ml.trainer.setup import base_parts
from forgather.ml.trainer.setup.declared_state import (
    GLOBAL,
    PER_RANK,
    Shared,
    Unbuilt,
    declare,
    is_left_out,
    warn_of_left_out,
    with_dictionaries,
)
from forgather.ml.trainer.setup.given_objects import check_given, merged_documentation, merged_signature
from forgather.ml.trainer.setup.hook_checks import check_hooks, is_overridden
from forgather.ml.trainer.setup.model_construction import checked_builder, refuse_adapters
from forgather.ml.trainer.setup.requirements import Given
from forgather.ml.trainer.step_loss.model_outputs import (
    logits_from_outputs,
    loss_and_logits_from_outputs,
    loss_from_outputs,
)
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    DataCollatorT,
    LossFunctionT,
    LRSchedulerT,
    OptimizerT,
    TrainerCallback,
    TrainerControl,
    TrainOutput,
)
from forgather.ml.utils import unwrap_model

__all__ = [
    "BaseTrainer",
    "BaseTrainingArguments",
    "logits_from_outputs",
    "loss_and_logits_from_outputs",
    "loss_from_outputs",
]

logger = logging.getLogger(__name__)

TArgs = TypeVar("TArgs", bound=MinimalTrainingArguments)

_ONCE_PER_RUN = ("on_init_end", "on_train_begin", "on_train_end")


class BaseTrainer(ABC, Generic[TArgs]):
    """The interface of all trainers, and the parts of it that do not depend on how one trains.

    `class MyTrainer(BaseTrainer[MyArgs])` makes an `args` dict a `MyArgs`. The caller's arguments object is never changed:
    the trainer works on a copy.

    Args:
        args: the arguments, or a dict of their fields.
        model: the model to train; or give `model_init`.
        data_collator: makes a batch (a dict of tensors) from a list of samples.
        train_dataset: map-style dataset, iterable dataset, or a loader that yields batches.
        eval_dataset: as `train_dataset`, for evaluations.
        processing_class: tokenizer or processor; it is saved beside the weights.
        model_init: function without arguments that builds the model.
        callbacks: callbacks, in the order in which they are told of events.
        default_callbacks: also use `default_callbacks()`: progress, run summary, speed, JSON log.
        compute_loss_func: loss function of (logits, labels).
        loss_fn: another name of `compute_loss_func`.
        optimizer: a ready optimizer.
        lr_scheduler: a ready learning-rate schedule; one that is a `TrainerCallback` is registered as a callback.
        distributed_env: the place of this process in the job; by default read from the environment.
    """

    arguments_class: ClassVar[type[MinimalTrainingArguments]] = TrainingArguments
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": GLOBAL,
        "optimizer": GLOBAL,
        "scheduler": GLOBAL,
        "trainer": GLOBAL,
        "dataset": GLOBAL,
        "rng": PER_RANK,
    }
    """The components of this trainer and how ranks share them; each strategy states its own table."""
    # Set in preparation.
    do_train: bool | None = None
    do_eval: bool | None = None
    max_steps: int | None = None
    epoch_train_steps: int | None = None
    num_processes: int | None = None
    is_local_process_zero: bool | None = None
    is_world_process_zero: bool | None = None
    _flops_per_token: float | None = None
    gradient_accumulation_step: int | None = None
    """The number of the present micro-batch within its step, from 1."""
    model_splitter: Any = None
    pipe_schedule_factory: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):
            for argument in get_args(base):
                is_arguments = isinstance(argument, type) and issubclass(argument, MinimalTrainingArguments)
                if is_arguments and "arguments_class" not in vars(cls):
                    cls.arguments_class = argument
        if "__init__" in vars(cls):
            cls.__signature__ = merged_signature(cls)  # type: ignore[attr-defined]
        if cls.__module__.startswith("forgather.") and cls.__doc__:
            cls.__doc__ = merged_documentation(cls)

    def __init__(
        self,
        args: TArgs | Mapping[str, Any],
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
        loss_fn: LossFunctionT | None = None,
        optimizer: OptimizerT | None = None,
        lr_scheduler: LRSchedulerT | None = None,
        distributed_env: DistributedEnvInterface | None = None,
    ) -> None:
        if loss_fn is not None and compute_loss_func is not None:
            raise ValueError("loss_fn is another name of compute_loss_func: give one of the two.")
        loss_fn = compute_loss_func if loss_fn is None else loss_fn
        check_given(type(self).__name__, args, model, model_init, data_collator, loss_fn, callbacks)
        check_hooks(type(self))
        if model is not None:
            refuse_adapters(model)
        self.args: TArgs = self._own_arguments(args)
        self.model: Any = model
        # Here rather than where it is called: every strategy builds the model in a place of its own.
        self.model_init = None if model_init is None else checked_builder(model_init)
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.loss_fn: Any = loss_fn
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self.distributed_env = distributed_env
        self.control = TrainerControl()
        self.state: Any = None
        self.checkpoint_manager: Any = None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.amp_context: Any = None
        self.rng = RNGState()
        self.given = Given(optimizer, lr_scheduler, None, loss_fn)
        self._env: DistributedEnvInterface | None = None
        self._resume_setting: bool | str = getattr(self.args, "resume_from_checkpoint", False)
        self._loaded_path: str | None = None
        self._has_loaded = False
        self._is_prepared = False
        self._is_preparing = False
        self._fired: set[str] = set()
        self._told: tuple[int, ...] = ()
        self._prepared_for: BaseDataset | None = None
        self._made_by_base: list[object] = []
        self._has_warned_of_left_out = False
        defaults = self.default_callbacks() if default_callbacks else ()
        self._callback_handler = CallbackHandler(() if callbacks is None else callbacks, defaults)
        if isinstance(lr_scheduler, TrainerCallback):
            self.add_callback(lr_scheduler)

    def _own_arguments(self, args: Any) -> Any:
        own = arguments_from(self.arguments_class, args)
        return own.under_both_names() if isinstance(own, BaseTrainingArguments) else own

    # --- to be written by a subclass

    @abstractmethod
    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Build what training and evaluation need; `train_dataset` is None if only an evaluation follows."""

    @abstractmethod
    def _train_loop(self) -> TrainOutput:
        """Train to the end, from where `state` is."""

    @abstractmethod
    def _eval_loop(self) -> dict[str, float]:
        """Evaluate on `eval_dataloader` or `eval_dataset`, and return the metrics, such as `eval_loss`."""

    # --- the place of this process

    @property
    def dist(self) -> DistributedEnvInterface:
        """The place of this process in the job; made when it is first asked for, which may initialise torch.distributed."""
        if self._env is None:
            self._env = base_parts.find_environment(self.distributed_env, self.args)
        return self._env

    @dist.setter
    def dist(self, env: DistributedEnvInterface) -> None:
        self._env = env

    # --- training and evaluation

    def train(self, **kwargs: Any) -> TrainOutput:
        """Train, from the checkpoint that `resume_from_checkpoint` names, or from the start.

        `resume_from_checkpoint` may be given here too, and then overrides the argument.
        """
        resume = kwargs.pop("resume_from_checkpoint", None)
        if kwargs:
            raise TypeError(f"train() got unknown arguments: {', '.join(kwargs)}; it takes resume_from_checkpoint.")
        self.do_train, self.do_eval = True, self.eval_dataset is not None
        with self._run_context():
            self._prepare_to_train(self._default_resume() if resume is None else resume)
            self._enter_training(resume is True)
            self._dispatch_event("on_train_begin")
            output = self._train_loop()
            self._dispatch_event("on_train_end")
        return output

    def evaluate(self, eval_dataset: BaseDataset | None = None) -> dict[str, Any]:
        """The evaluation metrics of the present weights."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self._prepare_to_evaluate(dataset)
        count = self.num_dispatched("on_evaluate")
        with self._evaluating_on(dataset):
            metrics = self._eval_loop()
        if self.num_dispatched("on_evaluate") == count:
            self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    @contextlib.contextmanager
    def _evaluating_on(self, dataset: BaseDataset | None) -> Iterator[None]:
        """`eval_dataset` and `eval_dataloader` for one evaluation; `_prepare` makes the loader of another dataset."""
        own_dataset, own_loader = self.eval_dataset, self.eval_dataloader
        if dataset is not self._prepared_for:
            # Whatever else `_prepare` makes is dropped: training continues with the objects that it has.
            kept = dict(vars(self))
            with undisturbed_random_numbers():
                self._prepare(None, dataset)
            loader = self.eval_dataloader
            vars(self).clear()
            vars(self).update(kept, eval_dataloader=loader)
        self.eval_dataset = dataset
        try:
            yield
        finally:
            self.eval_dataset, self.eval_dataloader = own_dataset, own_loader

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        """Everything that holds from before preparation to the end of training."""
        try:
            yield
        finally:
            # The output directory is free for other processes once training has ended.
            if self.checkpoint_manager is not None:
                self.checkpoint_manager.close()

    def _enter_training(self, was_asked_to_resume: bool) -> None:
        """Called once preparation is done, before on_train_begin."""

    def _default_resume(self) -> bool | str:
        """What `train` resumes from unless it is told: a checkpoint that was loaded by hand, else as the arguments say."""
        loaded, self._loaded_path = self._loaded_path, None
        return loaded or self._resume_setting

    def _prepare_to_train(self, resume: bool | str) -> None:
        """`_prepare`, then what a subclass left to the base: state, manager, restoring, on_init_end."""
        if hasattr(self.args, "resume_from_checkpoint"):
            self.args.resume_from_checkpoint = resume
        self._has_loaded = False
        with self._preparation():
            self._prepare(self.train_dataset, self.eval_dataset)
            self._prepared_for = self.eval_dataset
            self._complete_state()
            self._complete_manager()
            self._warn_of_left_out()
            if not self._has_loaded:
                self._restore(
                    self.args.resume_from_checkpoint if hasattr(self.args, "resume_from_checkpoint") else False
                )
        self._dispatch_event("on_init_end")

    def _prepare_to_evaluate(self, eval_dataset: BaseDataset | None) -> None:
        """Prepare an unprepared trainer for an evaluation alone; its weights stay as they were given."""
        if self._is_prepared:
            return
        self.do_eval = True
        with self._preparation():
            self._prepare(None, eval_dataset)
            self._prepared_for = eval_dataset
            self._complete_state()
            self._complete_manager(read_only=True)
        self._dispatch_event("on_init_end")

    @contextlib.contextmanager
    def _preparation(self) -> Iterator[None]:
        if "on_train_begin" in self._fired:
            self._fired.clear()
        self._told = ()
        self._forget_made()
        self._callback_handler.stop_requested_by = None
        self._is_preparing = True
        try:
            yield
            self._is_prepared = True
        finally:
            self._is_preparing = False

    def _complete_state(self) -> None:
        if self.state is None:
            self.state = base_parts.new_state(self.args, self.dist)
            self._made_by_base.append(self.state)

    def _complete_manager(self, **options: Any) -> None:
        if self.checkpoint_manager is None:
            self.checkpoint_manager = self._make_manager(**options)
            self._made_by_base.append(self.checkpoint_manager)

    def _forget_made(self) -> None:
        """Let go of the state and the manager that an earlier preparation made: both describe its objects."""
        if any(self.checkpoint_manager is one for one in self._made_by_base):
            self.checkpoint_manager.close()
            self.checkpoint_manager = None
        if any(self.state is one for one in self._made_by_base):
            self.state = None
        self._made_by_base.clear()

    # --- checkpoints

    def save_checkpoint(self, checkpoint_path: str | None = None) -> str:
        """Save everything a resume needs, by default as the checkpoint of the present step; returns its path."""
        if self.checkpoint_manager is None or self.checkpoint_manager.is_read_only:
            self._prepare_to_train(False)
        count = self.num_dispatched("on_save")
        path = self._save_now(checkpoint_path)
        if path and self.num_dispatched("on_save") == count:
            self._dispatch_event("on_save", checkpoint_path=path)
        return path

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Load a checkpoint, by default the newest complete one; returns its path. `train` continues from there."""
        manager = self.checkpoint_manager
        if not self._is_preparing and (manager is None or manager.is_read_only):
            self._prepare_to_load(True if checkpoint_path is None else checkpoint_path)
        elif manager is None:
            self._complete_state()
            self._complete_manager()
        self._loaded_path = self._load_state(checkpoint_path)
        self._has_loaded = True
        return self._loaded_path

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model alone, as a Hugging Face directory, by default into the output directory."""
        self._prepare_to_evaluate(self.eval_dataset)
        exporter = base_parts.model_exporter(self, self._model_to_save())
        exporter.export_model(output_dir or self.args.output_dir, overwrite=True)

    def _save_now(self, checkpoint_path: str | None) -> str:
        self._require_whole_state()
        step = None if checkpoint_path else self.state.global_step
        saved: str = self.checkpoint_manager.save_checkpoint(checkpoint_path, step)
        return saved

    def _prepare_to_load(self, wanted: bool | str) -> None:
        self._prepare_to_train(False)

    def _load_state(self, path: str | None) -> str | None:
        loaded: str | None = self.checkpoint_manager.load_checkpoint(path)
        return loaded

    def _restore(self, resume: bool | str) -> None:
        """Load what is to be resumed; a damaged checkpoint gives way to an older one only if none was named."""
        path = self.checkpoint_manager.resolve_checkpoint_path(resume)
        if path is None:
            self.checkpoint_manager.begin_fresh_run()
            return
        self._load_to_resume(None if resume is True else str(resume))

    def _load_to_resume(self, path: str | None) -> None:
        logger.info("Resumed from %s", self._load_state(path))

    def _make_manager(self, **options: Any) -> CheckpointManager:
        """A manager of the declared state, for the output directory of the arguments."""
        return base_parts.make_manager(self, self._model_to_save(), options)

    def checkpoint_config(self) -> CheckpointConfig:
        return base_parts.checkpoint_config(self.args)

    def _model_to_save(self) -> dict[str, Any]:
        """The model as coordinator and manager take it; more than one argument where ranks have parts of it."""
        return {"model": self.unwrapped_model()}

    # --- declared state

    def get_state_components(self) -> list[StateComponent]:
        """Everything that can be checkpointed, and how ranks share it: the rows of `state_sharing`."""
        pattern = self._get_dataset_sharing_pattern()
        components = declare(self.state_sharing, self._statefuls(), pattern, self._dataset_group())
        return with_dictionaries(self, components, self._is_prepared or self._is_preparing)

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        """The families of groups that PER_GROUP components name."""
        return {}

    def get_active_state_components(self) -> list[StateComponent]:
        """The components that `args.checkpoint_components` names, or all."""
        return select_components(self.get_state_components(), getattr(self.args, "checkpoint_components", None))

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        """How ranks share the position in the data, decided from how batches are loaded."""
        return SharingPattern.GLOBAL

    def _dataset_group(self) -> str | None:
        """The family of groups that share a data stream, if the dataset is PER_GROUP."""
        return None

    def _statefuls(self) -> dict[str, object]:
        """The object behind each component; a placeholder where preparation has yet to build it."""
        built = {name: value for name, value in self._built_statefuls().items() if not is_left_out(name, self.args)}
        if self._is_prepared or self._is_preparing:
            return built
        return {name: Unbuilt(name) if value is None else value for name, value in built.items()}

    def _built_statefuls(self) -> dict[str, object]:
        """By component; None for one that does not exist (yet)."""
        loader = self.train_dataloader
        has_schedule = self.lr_scheduler is not None and self.optimizer is not None
        return {
            "model": self.unwrapped_model() if self.model is not None else None,
            "optimizer": self.optimizer,
            "scheduler": SchedulerState(self.lr_scheduler, self.optimizer) if has_schedule else None,
            "trainer": self,
            "dataset": loader if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None,
            "rng": self.rng,
        }

    def state_dict(self) -> dict[str, Any]:
        """The component "trainer". Overrides add keys to what `super().state_dict()` returns."""
        state = {"state": self.state.state_dict()}
        if hasattr(self.amp_context, "state_dict"):
            state["amp"] = self.amp_context.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; overrides call `super().load_state_dict(state_dict)`."""
        self.state.load_state_dict(state_dict["state"])
        if hasattr(self.amp_context, "load_state_dict") and "amp" in state_dict:
            self.amp_context.load_state_dict(state_dict["amp"])

    def import_progress(self, global_step: int, epoch: float) -> None:
        """Take over step and epoch from a checkpoint of another program."""
        self.state.global_step, self.state.epoch = global_step, epoch
        self.state.raw_epoch = int(epoch)

    def _own_state_keys(self) -> set[str]:
        """The keys that the component "trainer" must have."""
        return set(BaseTrainer.state_dict(self))

    def _require_whole_state(self) -> None:
        """Refuse to save a `state_dict` override that dropped keys of the base."""
        if is_overridden(self, "state_dict"):
            base_parts.require_keys(type(self).__name__, self.state_dict(), self._own_state_keys())

    def _warn_of_left_out(self) -> None:
        """Say once what a `get_state_components` written by hand leaves out for ever."""
        if self._has_warned_of_left_out or not is_overridden(self, "get_state_components"):
            return
        self._has_warned_of_left_out = True
        usual = [component.key for component in BaseTrainer.get_state_components(self)]
        declared = [component.key for component in self.get_state_components()]
        warn_of_left_out(type(self).__name__, usual, declared)

    def unwrapped_model(self) -> nn.Module:
        """The model itself, without the wrappers of DDP, torch.compile and fused losses: what is checkpointed."""
        if self.model is None:
            raise RuntimeError("The model is not built yet: it is when training or evaluation begins.")
        return unwrap_model(self.model)

    # --- callbacks

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """The callbacks that a trainer uses beside those it is given."""
        from forgather.ml.trainer.callbacks import default_callbacks

        return default_callbacks()

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
        self._dispatch_event("on_log", logs=logs)
        # Numbers that callbacks added; the history is checkpointed, and need not be able to hold anything else.
        added = {name: value for name, value in logs.items() if type(value) in (bool, int, float)}
        record.update({**added, **record})

    def _dispatch_event(self, event: str, readers: bool | None = None, **extra: Any) -> None:
        """Tell callbacks of an event; on_init_end, on_train_begin and on_train_end reach them once per run."""
        handler = self._callback_handler
        if event in handler.silent:
            return
        if event in _ONCE_PER_RUN:
            if event in self._fired:
                return
            self._fired.add(event)
        told = (
            id(self.state),
            id(self.control),
            id(self.model),
            id(self.optimizer),
            id(self.lr_scheduler),
            id(self.train_dataloader),
            id(self.eval_dataloader),
        )
        if told != self._told:
            # The handler keeps the objects, so that no other one can get their ids.
            handler.context, self._told = self._event_context(), told
        handler.dispatch(event, self.control, readers, **extra)

    def num_dispatched(self, event: str) -> int:
        """How often an event was dispatched."""
        return self._callback_handler.count(event)

    def is_listened_to(self, event: str) -> bool:
        """Whether a callback has a handler for the event."""
        return self._callback_handler.listens(event)

    def _event_context(self) -> dict[str, Any]:
        """What every handler is told."""
        return {
            "args": self.args,
            "state": self.state,
            "control": self.control,
            "model": self.unwrapped_model() if self.model is not None else None,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self,
        }

    @property
    def _stop_requested_by(self) -> tuple[str, str, str] | None:
        """Callback, event and flag of the last request to stop."""
        return self._callback_handler.stop_requested_by
