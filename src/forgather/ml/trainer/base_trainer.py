"""BaseTrainer: base class of all trainers. Subclass it to write a custom training loop.

A subclass implements `_prepare`, `_train_loop` and `_eval_loop`. The base provides callbacks and events, declared state,
exact checkpoints, resume and export. `Trainer` is the subclass with Forgather's own loop.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, get_args

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.components import SharingPattern, StateComponent, select_components
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.checkpoint.state.rng import RNGState, undisturbed_random_numbers
from forgather.ml.checkpoint.weights.adapters import is_peft_model
from forgather.ml.distributed import (
    DistributedEnvInterface,
)
from forgather.ml.distributed.watch import CALLBACK, enter, note
from forgather.ml.trainer.arguments.training_arguments import (
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    arguments_from,
)
from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.callbacks.support.reporting import reporting_callbacks, without_bars
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
from forgather.ml.trainer.setup.given_objects import (
    check_given,
    merged_documentation,
    merged_signature,
    one_loss_function,
)
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
    ComputeMetricsT,
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
    """Interface of all trainers, and the implementation that does not depend on the training loop.

    `class MyTrainer(BaseTrainer[MyArgs])` converts a dict passed as `args` to `MyArgs`. The trainer works on a copy of
    the arguments and never changes the caller's object.

    Args:
        args: arguments object, or a dict of its fields.
        model: model to train. Alternatively, pass `model_init`.
        data_collator: function that collates a list of samples into a batch (a dict of tensors).
        train_dataset: map-style dataset, iterable dataset, or dataloader that yields batches.
        eval_dataset: same as `train_dataset`, for evaluation.
        processing_class: tokenizer or processor; saved next to the weights.
        model_init: function without arguments that builds the model.
        callbacks: callbacks, in the order of their calls.
        default_callbacks: whether to add `default_callbacks()`: progress, run summary, speed, JSON log.
        compute_loss_func: loss function of (logits, labels).
        loss_fn: alias of `compute_loss_func`.
        optimizer: optimizer instance.
        lr_scheduler: learning-rate scheduler instance. If it is a `TrainerCallback`, it is also added as a callback.
        distributed_env: rank and world size of this process. Default: read from the environment.
        compute_metrics: function of `transformers.EvalPrediction` that returns a dict of numbers. All ranks call it with
            the predictions and labels of all ranks, in the order of the dataset. A custom `_eval_loop` calls it itself.
        preprocess_logits_for_metrics: function of (logits, labels) of a batch; only its result is collected.
    """

    arguments_class: ClassVar[type[MinimalTrainingArguments]] = TrainingArguments
    trains_adapters: ClassVar[bool] = False
    """Whether the model may be a `peft.PeftModel`."""
    builds_adapters: ClassVar[bool] = True
    """Whether a trainer with `trains_adapters` accepts a `peft.PeftModel` from `model_init` too."""
    gathered_adapters: Mapping[str, Tensor] | None = None
    """Tensors of the adapters of a sharded `PeftModel`, gathered for the current save."""
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": GLOBAL,
        "optimizer": GLOBAL,
        "scheduler": GLOBAL,
        "trainer": GLOBAL,
        "dataset": GLOBAL,
        "rng": PER_RANK,
    }
    """State components of this trainer and their sharing patterns. Each strategy declares its full table."""
    # Set by `train`, `evaluate` and `_prepare`.
    do_train: bool | None = None
    do_eval: bool | None = None
    max_steps: int | None = None
    epoch_train_steps: int | None = None
    num_processes: int | None = None
    is_local_process_zero: bool | None = None
    is_world_process_zero: bool | None = None
    _flops_per_token: float | None = None
    gradient_accumulation_step: int | None = None
    """Index of the current micro-batch within its step, from 1."""
    model_splitter: Any = None
    pipe_schedule_factory: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Type arguments such as BaseTrainer[MyArgs] are erased from the MRO and survive only in __orig_bases__.
        for base in vars(cls).get("__orig_bases__", ()):
            for argument in get_args(base):
                is_arguments = isinstance(argument, type) and issubclass(argument, MinimalTrainingArguments)
                if is_arguments and "arguments_class" not in vars(cls):
                    cls.arguments_class = argument
        if "__init__" in vars(cls):
            cls.__signature__ = merged_signature(cls)  # type: ignore[attr-defined]
        # Docstrings of users' classes are not changed.
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
        compute_metrics: ComputeMetricsT | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        loss_fn = one_loss_function(compute_loss_func, loss_fn)
        check_given(type(self).__name__, args, model, model_init, data_collator, loss_fn, callbacks)
        check_hooks(type(self))
        if model is not None:
            refuse_adapters(model, self.trains_adapters)
        self.args: TArgs = self._own_arguments(args)
        self.model: Any = model
        accepts_built = self.trains_adapters and self.builds_adapters
        # Wrapped here and not at the call, because each strategy calls it from different code.
        self.model_init = None if model_init is None else checked_builder(model_init, accepts_built)
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.loss_fn: Any = loss_fn
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self.distributed_env = distributed_env
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
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
        self._callback_handler = self._handler_of([] if callbacks is None else list(callbacks), default_callbacks)
        if isinstance(lr_scheduler, TrainerCallback):
            self.add_callback(lr_scheduler)

    def _handler_of(self, callbacks: list[Any], adds_defaults: bool) -> CallbackHandler:
        defaults = without_bars(self.args, self.default_callbacks()) if adds_defaults else []
        return CallbackHandler(callbacks, [*defaults, *reporting_callbacks(self.args, callbacks)])

    def _own_arguments(self, args: Any) -> Any:
        own = arguments_from(self.arguments_class, args)
        return own.under_both_names() if isinstance(own, BaseTrainingArguments) else own

    # --- abstract methods

    @abstractmethod
    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        """Build model, optimizer, dataloaders and so on. `train_dataset` is None if only an evaluation follows."""

    @abstractmethod
    def _train_loop(self) -> TrainOutput:
        """Train from the position in `state` to the end."""

    @abstractmethod
    def _eval_loop(self) -> dict[str, float]:
        """Evaluate on `eval_dataloader` or `eval_dataset`, and return metrics such as `eval_loss`."""

    # --- distributed environment

    @property
    def dist(self) -> DistributedEnvInterface:
        """Distributed environment of this process. The first access may initialise torch.distributed."""
        if self._env is None:
            self._env = base_parts.find_environment(self.distributed_env, self.args)
        return self._env

    @dist.setter
    def dist(self, env: DistributedEnvInterface) -> None:
        self._env = env

    # --- training and evaluation

    def train(self, **kwargs: Any) -> TrainOutput:
        """Train from the checkpoint in `resume_from_checkpoint`, or from the start.

        `resume_from_checkpoint` may be passed here too. It then overrides the value in the arguments.
        """
        resume = kwargs.pop("resume_from_checkpoint", None)
        if kwargs:
            raise TypeError(
                f"train() got unknown arguments: {', '.join(kwargs)}. It takes only resume_from_checkpoint."
            )
        self.do_train, self.do_eval = True, self.eval_dataset is not None
        with self._run_context():
            self._prepare_to_train(self._default_resume() if resume is None else resume)
            self._enter_training(resume is True)
            self._dispatch_event("on_train_begin")
            output = self._train_loop()
            self._finish_saves()
            self._end_training()
        return output

    def evaluate(self, eval_dataset: BaseDataset | None = None) -> dict[str, Any]:
        """Return the evaluation metrics of the current weights."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self._prepare_to_evaluate(dataset)
        count = self.num_dispatched("on_evaluate")
        with self._evaluating_on(dataset):
            metrics = self._eval_loop()
        # A custom `_eval_loop` may have dispatched the event itself.
        if self.num_dispatched("on_evaluate") == count:
            self._dispatch_event("on_evaluate", metrics=metrics)
        return metrics

    @contextlib.contextmanager
    def _evaluating_on(self, dataset: BaseDataset | None) -> Iterator[None]:
        """Set `eval_dataset` and `eval_dataloader` for one evaluation. A new dataset needs another `_prepare` call."""
        own_dataset, own_loader = self.eval_dataset, self.eval_dataloader
        if dataset is not self._prepared_for:
            # Keep only the new dataloader. All other objects that `_prepare` builds are dropped, so that training
            # continues with its own model, optimizer and state.
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
        """Context of `train`, from before set-up to the end of training."""
        try:
            yield
        finally:
            # Release the lock of the output directory, so that another process can use it.
            if self.checkpoint_manager is not None:
                self.checkpoint_manager.close()

    def _finish_saves(self) -> None:
        """Wait for a background save at the end of training."""

    def _end_training(self) -> None:
        self._dispatch_event("on_train_end")

    def _enter_training(self, was_asked_to_resume: bool) -> None:
        """Run between set-up and `on_train_begin`."""

    def _default_resume(self) -> bool | str:
        """Return the default of `train`: a checkpoint loaded by `load_checkpoint`, else the value in the arguments."""
        # Used once: a later `train` follows the arguments again.
        loaded, self._loaded_path = self._loaded_path, None
        return loaded or self._resume_setting

    def _prepare_to_train(self, resume: bool | str) -> None:
        """Call `_prepare`, then add what the subclass did not do: state, manager, restore, `on_init_end`."""
        if hasattr(self.args, "resume_from_checkpoint"):
            self.args.resume_from_checkpoint = resume
        # Reset before `_prepare`, which may load a checkpoint.
        self._has_loaded = False
        with self._preparation():
            self._prepare(self.train_dataset, self.eval_dataset)
            self._prepared_for = self.eval_dataset
            self._complete_state()
            self._complete_manager()
            self._warn_of_left_out()
            # A custom `_prepare` may have called `load_checkpoint` itself.
            if not self._has_loaded:
                self._restore(
                    self.args.resume_from_checkpoint if hasattr(self.args, "resume_from_checkpoint") else False
                )
        self._dispatch_event("on_init_end")

    def _prepare_to_evaluate(self, eval_dataset: BaseDataset | None) -> None:
        """Prepare a new trainer for evaluation only. The weights are not loaded from a checkpoint."""
        if self._is_prepared:
            return
        self.do_eval = True
        with self._preparation():
            self._prepare(None, eval_dataset)
            self._prepared_for = eval_dataset
            self._complete_state()
            # An evaluation must not lock the output directory: a training process may be using it.
            self._complete_manager(read_only=True)
        self._dispatch_event("on_init_end")

    @contextlib.contextmanager
    def _preparation(self) -> Iterator[None]:
        # The once-per-run events may fire again, but only if a run has begun since: `evaluate` followed by `train`
        # is one run, with one on_init_end.
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
        """Drop the state and the manager of an earlier set-up. Both refer to its objects."""
        # Objects that a subclass set are its own: only those built by the base are dropped.
        if any(self.checkpoint_manager is one for one in self._made_by_base):
            self.checkpoint_manager.close()
            self.checkpoint_manager = None
        if any(self.state is one for one in self._made_by_base):
            self.state = None
        self._made_by_base.clear()

    # --- checkpoints

    def save_checkpoint(self, checkpoint_path: str | None = None) -> str:
        """Save all state that a resume needs, and return the path. The default is the current step's checkpoint."""
        # A read-only manager belongs to an evaluation, which builds neither optimizer nor training loader.
        if self.checkpoint_manager is None or self.checkpoint_manager.is_read_only:
            self._prepare_to_train(False)
        count = self.num_dispatched("on_save")
        path = self._save_now(checkpoint_path)
        if path and self.num_dispatched("on_save") == count:
            self._announce_save(path)
        return path

    def _announce_save(self, path: str) -> None:
        self._dispatch_event("on_save", checkpoint_path=path)

    def load_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Load a checkpoint, by default the newest complete one, and return its path. `train` resumes from it."""
        manager = self.checkpoint_manager
        if not self._is_preparing and (manager is None or manager.is_read_only):
            self._prepare_to_load(True if checkpoint_path is None else checkpoint_path)
        elif manager is None:
            # Called from a custom `_prepare`, before the base has added state and manager.
            self._complete_state()
            self._complete_manager()
        self._loaded_path = self._load_state(checkpoint_path)
        self._has_loaded = True
        return self._loaded_path

    def save_model(self, output_dir: str | None = None) -> None:
        """Write only the model, as a Hugging Face directory. The default is the output directory."""
        self._prepare_to_evaluate(self.eval_dataset)
        if is_peft_model(self.unwrapped_model()):
            self._gather_adapters()
            base_parts.export_adapters(self, output_dir or self.args.output_dir)
            return
        exporter = base_parts.model_exporter(self, self._model_to_save())
        exporter.export_model(output_dir or self.args.output_dir, overwrite=True)

    def _gather_adapters(self) -> None:
        """Set `gathered_adapters` for a save, if the strategy divides the model over ranks; collective."""

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
        """Load the requested checkpoint. A damaged one is skipped for an older one only if no path was named."""
        path = self.checkpoint_manager.resolve_checkpoint_path(resume)
        if path is None:
            self.checkpoint_manager.begin_fresh_run()
            return
        self._load_to_resume(None if resume is True else str(resume))

    def _load_to_resume(self, path: str | None) -> None:
        logger.info("Resumed from %s", self._load_state(path))

    def _make_manager(self, **options: Any) -> CheckpointManager:
        """Return a checkpoint manager of the declared state, for `args.output_dir`."""
        return base_parts.make_manager(self, self._model_to_save(), options)

    def checkpoint_config(self) -> CheckpointConfig:
        return base_parts.checkpoint_config(self.args)

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return small files to add to a checkpoint: adapters of a `PeftModel`, `trainer_state.json`."""
        return base_parts.files_of_checkpoint(self)

    def _model_to_save(self) -> dict[str, Any]:
        """Return the model arguments of coordinator and manager. Pipelines pass stages and more arguments."""
        return {"model": self.unwrapped_model()}

    # --- declared state

    def get_state_components(self) -> list[StateComponent]:
        """Return all state components with their sharing patterns: the rows of `state_sharing`."""
        pattern = self._get_dataset_sharing_pattern()
        components = declare(self._sharing_table(), self._statefuls(), pattern, self._dataset_group())
        return with_dictionaries(self, components, self._is_prepared or self._is_preparing)

    def _sharing_table(self) -> Mapping[str, Shared]:
        """Return the table of components for the current arguments, by default `state_sharing`."""
        return self.state_sharing

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        """Return the process groups that PER_GROUP components refer to, by name."""
        return {}

    def get_active_state_components(self) -> list[StateComponent]:
        """Return the components listed in `args.checkpoint_components`, or all."""
        return select_components(self.get_state_components(), getattr(self.args, "checkpoint_components", None))

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        """Return the sharing pattern of the data position. It follows from how batches are loaded."""
        return SharingPattern.GLOBAL

    def _dataset_group(self) -> str | None:
        """Return the name of the process groups that share a data stream, if the dataset is PER_GROUP."""
        return None

    def _statefuls(self) -> dict[str, object]:
        """Return the stateful object of each component, or a placeholder before set-up has built it."""
        built = {name: value for name, value in self._built_statefuls().items() if not is_left_out(name, self.args)}
        if self._is_prepared or self._is_preparing:
            return built
        return {name: Unbuilt(name) if value is None else value for name, value in built.items()}

    def _built_statefuls(self) -> dict[str, object]:
        """Return the stateful object of each component; None if it does not exist (yet)."""
        # A custom `_prepare` may set any iterable as dataloader, also one without a position to save.
        loader = self.train_dataloader
        has_schedule = self.lr_scheduler is not None and self.optimizer is not None
        return {
            "model": base_parts.model_state(self.unwrapped_model()) if self.model is not None else None,
            "optimizer": self.optimizer,
            "scheduler": SchedulerState(self.lr_scheduler, self.optimizer) if has_schedule else None,
            "trainer": self,
            "dataset": loader if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None,
            "rng": self.rng,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the component "trainer". Overrides add keys to `super().state_dict()`."""
        state = {"state": self.state.state_dict()}
        if hasattr(self.amp_context, "state_dict"):
            state["amp"] = self.amp_context.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from `state_dict`. Overrides call `super().load_state_dict(state_dict)`."""
        self.state.load_state_dict(state_dict["state"])
        if hasattr(self.amp_context, "load_state_dict") and "amp" in state_dict:
            self.amp_context.load_state_dict(state_dict["amp"])

    def import_progress(self, global_step: int, epoch: float) -> None:
        """Set step and epoch from an imported checkpoint of another program."""
        self.state.global_step, self.state.epoch = global_step, epoch
        self.state.raw_epoch = int(epoch)

    def _own_state_keys(self) -> set[str]:
        """Return the keys that the component "trainer" must contain."""
        # Not self.state_dict(): that is the override under test.
        return set(BaseTrainer.state_dict(self))

    def _require_whole_state(self) -> None:
        """Raise CheckpointSaveError if an override of `state_dict` dropped keys of the base."""
        if is_overridden(self, "state_dict"):
            base_parts.require_keys(type(self).__name__, self.state_dict(), self._own_state_keys())

    def _warn_of_left_out(self) -> None:
        """Warn once about components that an override of `get_state_components` omits."""
        if self._has_warned_of_left_out or not is_overridden(self, "get_state_components"):
            return
        self._has_warned_of_left_out = True
        usual = [component.key for component in BaseTrainer.get_state_components(self)]
        declared = [component.key for component in self.get_state_components()]
        warn_of_left_out(type(self).__name__, usual, declared)

    def unwrapped_model(self) -> nn.Module:
        """Return the model without the wrappers of DDP, torch.compile and fused losses, as it is checkpointed."""
        if self.model is None:
            raise RuntimeError("The model is not built yet. train() and evaluate() build it.")
        return unwrap_model(self.model)

    # --- callbacks

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Return new default callbacks, which a trainer adds to the user's callbacks."""
        # Imported late: the default callbacks import rich, which a trainer without them does not need.
        from forgather.ml.trainer.callbacks import default_callbacks

        return default_callbacks()

    @property
    def callbacks(self) -> list[Any]:
        return self._callback_handler.callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback. A class is instantiated."""
        self._callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any | None:
        """Remove a callback by instance or class, and return it."""
        return self._callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callback_handler.pop(callback)

    def log(self, logs: dict[str, Any]) -> None:
        """Append a record to the log history and dispatch `on_log`."""
        if "epoch" not in logs:
            logs["epoch"] = self.state.epoch
        record = {**logs, "step": self.state.global_step}
        self.state.log_history.append(record)
        self._dispatch_event("on_log", logs=logs)
        # Copy plain numbers that callbacks added. The history is checkpointed, so other types must not enter it.
        added = {name: value for name, value in logs.items() if type(value) in (bool, int, float)}
        record.update({**added, **record})

    def _dispatch_event(self, event: str, readers: bool | None = None, **extra: Any) -> None:
        """Dispatch an event to the callbacks. on_init_end, on_train_begin and on_train_end fire once per run."""
        handler = self._callback_handler
        # Most events of a step have no handler. This is their full cost.
        if event in handler.silent:
            return
        if event in _ONCE_PER_RUN:
            if event in self._fired:
                return
            self._fired.add(event)
        # Building the context costs more than the seven ids, and most events see the same objects as the last.
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
            # The handler keeps references, so these ids cannot be reused for other objects.
            handler.context, self._told = self._event_context(), told
        before = enter(CALLBACK)
        handler.dispatch(event, self.control, readers, **extra)
        note(before)

    def num_dispatched(self, event: str) -> int:
        """Return how often an event was dispatched."""
        return self._callback_handler.count(event)

    def is_listened_to(self, event: str) -> bool:
        """Return whether any callback handles the event."""
        return self._callback_handler.listens(event)

    def _event_context(self) -> dict[str, Any]:
        """Return the arguments that every handler receives."""
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
        """Callback name, event and flag of the last stop request."""
        return self._callback_handler.stop_requested_by
