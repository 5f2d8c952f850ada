"""Trainer: the interface of `transformers.Trainer` on Forgather's training loop.

The trainer holds the engine of its strategy as `engine`, and the engine calls the methods that a subclass overrides.
It is not a subclass of Forgather's trainers, because names such as `is_world_process_zero` have other meanings there.
"""

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import trainer_pt_utils
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from forgather._run_files import check_in_run
from forgather.hf import compute_loss, data, evaluation, hub, optimizers
from forgather.hf.accelerator_shim import AcceleratorShim
from forgather.hf.changes import pass_on
from forgather.hf.engine.callback_handler import EventCalls
from forgather.hf.engine.label_rules import label_names_of, returns_loss
from forgather.hf.engine.micro_step import MicroStep
from forgather.hf.engine.outputs import as_train_output, first_state
from forgather.hf.engine.strategies import PIPELINES
from forgather.hf.fields.conversions import fractions, text_of
from forgather.hf.fields.engine_arguments import strategy_of
from forgather.hf.internals import Internals
from forgather.hf.methods import REFUSED, check_methods, owner_of
from forgather.hf.setup import (
    aligned_model,
    build_engine,
    checked_arguments,
    default_collator,
    rebuild_model,
    resolved_model,
    use_log_levels,
    use_seed,
)
from forgather.ml.distributed.failure_reports import raised_on_all_ranks
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.utils import count_parameters

logger = logging.getLogger(__name__)

Inputs = dict[str, Any]
_LOSS_METHODS = (
    "compute_loss",
    "_prepare_inputs",
    "_prepare_input",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
)
_PREDICTION_METHODS = (*_LOSS_METHODS, "prediction_step")


class Trainer(Internals):
    """Trainer with the constructor and the methods of `transformers.Trainer`.

    `args.fg_strategy` chooses the engine. Overrides of the methods of `transformers.Trainer` are called, or raise
    TypeError here if they cannot have an effect.
    """

    loss_is_scaled_for_ga: bool | None = None
    """Whether compute_loss returns a share of the step (True) or a mean of the micro-batch (False). None: found."""

    _engine_arguments: Any
    """Arguments of the engine as they were last derived from `args`."""
    log_metrics = trainer_pt_utils.log_metrics
    metrics_format = trainer_pt_utils.metrics_format
    get_learning_rates = trainer_pt_utils.get_learning_rates
    get_optimizer_group = trainer_pt_utils.get_optimizer_group
    get_optimizer_cls_and_kwargs = staticmethod(transformers.Trainer.get_optimizer_cls_and_kwargs)

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        processing_class = _with_tokenizer(processing_class, tokenizer)
        self.args = checked_arguments(args)
        self._strategy = strategy_of(self.args)
        check_methods(type(self), self._strategy)
        use_seed(self.args)
        use_log_levels(self.args)
        self.accelerator = AcceleratorShim(self)
        self.processing_class = processing_class
        self.compute_loss_func, self.model_init = compute_loss_func, model_init
        self.data_collator = default_collator(processing_class) if data_collator is None else data_collator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._set_evaluation_defaults()
        first = resolved_model(self, model, model_init, self._strategy)
        self.label_names = list(self.args.label_names or (() if first is None else label_names_of(first)))
        self.can_return_loss = first is not None and returns_loss(first)
        self.label_smoother = compute_loss.smoother(self.args)
        self.engine = build_engine(
            self, self._strategy, first, callbacks, optimizers, compute_metrics, preprocess_logits_for_metrics
        )
        self.callback_handler = EventCalls(self)
        self.hub_model_id: str | None = None
        self.is_in_train = False
        self._first_state = first_state(self.args, self.is_local_process_zero(), self.is_world_process_zero())
        hub.prepare(self)
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)

    def _read_occasions(self) -> None:
        """Read the settings of logs, evaluations and saves that the engine does not have."""
        self._fractions = fractions(self.args)
        by_epoch = text_of(self.args.eval_strategy) == "epoch"
        self._delay_epochs = float(self.args.eval_delay or 0) if by_epoch else 0.0
        self._saves_best = text_of(self.args.save_strategy) == "best"

    def _set_evaluation_defaults(self) -> None:
        self._read_occasions()
        self._ignore_keys_for_eval: list[str] | None = None
        self._evaluated_loader: Any = None
        self._prepared_labels: Any = None
        self._evaluation = evaluation.Settings()

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise NotImplementedError(f"Trainer.{name} is not available: {REFUSED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def tokenizer(self) -> Any:
        warnings.warn("Trainer.tokenizer is deprecated: use Trainer.processing_class.", FutureWarning, stacklevel=2)
        return self.processing_class

    # --- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the start or from a checkpoint: a path, or True for the newest one in the output directory."""
        if trial is not None:
            raise NotImplementedError(f"train(trial=...) is not available: {REFUSED['hyperparameter_search']}")
        resume = resume_from_checkpoint or False
        self._ignore_keys_for_eval = ignore_keys_for_eval
        self.engine.asked_to_resume = resume is True
        pass_on(self)
        if self.model_init is not None and self._strategy not in PIPELINES:
            rebuild_model(self)
        aligned_model(self)
        self.is_in_train = True
        try:
            output = self.engine.train(resume_from_checkpoint=resume)
        except Preempted as stop:
            if stop.signal_name != "SIGINT":
                raise
            # Ctrl-C: scripts catch KeyboardInterrupt, and the shell must not see a success.
            raise KeyboardInterrupt(str(stop)) from stop
        finally:
            self.is_in_train = False
        hub.after_training(self)
        return as_train_output(output)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one micro-batch; return its loss, detached."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = compute_loss.called(self, model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, and with `return_outputs` the outputs of the model too.

        With `num_items_in_batch` the loss is a share of the step's loss; without it, the mean of the batch.
        """
        loss, outputs = compute_loss.default(self, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass and the loss: autocast."""
        stack = contextlib.ExitStack()
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        return self.accelerator.autocast()

    def _prepare_input(self, data: Any) -> Any:
        """Move tensors in any structure to the device."""
        return compute_loss.on_device(data, self.args.device)

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        prepared: Inputs = self._prepare_input(inputs)
        if not prepared:
            raise ValueError(
                "The batch is empty: the collator returned no inputs. Check the columns of the dataset, or set "
                "remove_unused_columns=False."
            )
        return prepared

    # --- optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer by `args.optim`, unless there is one; weight decay by `get_decay_parameter_names`."""
        if self.optimizer is None:
            self.optimizer = optimizers.make_optimizer(self, self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning-rate schedule by `args.lr_scheduler_type`, unless there is one."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = optimizers.make_scheduler(self.engine.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay: all except biases and norms."""
        return optimizers.decayed_names(model)

    def _get_learning_rate(self) -> float:
        return float(self.lr_scheduler.get_last_lr()[0])

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data with the sampler of `_get_train_sampler`."""
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset. Pass one to the trainer.")
        return data.train_loader(self)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the training data, by `args.train_sampling_strategy`; None for data without a length."""
        return data.train_sampler(self, self.train_dataset if train_dataset is None else train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of evaluation data, in the order of the dataset; a string names an entry of eval_dataset."""
        return data.eval_loader(self, data.named_dataset(self, eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return data.eval_loader(self, test_dataset)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples of a loader, or an estimate by its length."""
        return data.num_examples(dataloader, self.args.per_device_train_batch_size)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Return the number of input tokens of a loader, or of its first `max_steps` batches times `max_steps`."""
        return data.num_tokens(train_dl, max_steps)

    # --- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of an evaluation; a dict of datasets is evaluated one by one."""
        with raised_on_all_ranks(EvaluationInterrupted):
            return evaluation.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions, labels and metrics of a dataset, in its order."""
        with raised_on_all_ranks(EvaluationInterrupted):
            return evaluation.predict(self, test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return predictions, labels and metrics of a loader, gathered from all ranks; collective."""
        return evaluation.loop(self, dataloader, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, the logits and the labels of a batch; each may be None."""
        return evaluation.prediction(self, model, inputs, prediction_loss_only, ignore_keys)

    # --- logs and saves

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Append a record to `state.log_history` and call on_log of all callbacks."""
        self.engine.record(logs)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write `<split>_results.json`, and add the metrics to all_results.json; the main process only."""
        if self.is_world_process_zero():
            check_in_run(self.args.output_dir, f"{split}_results.json", "all_results.json")
        trainer_pt_utils.save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json; the main process only."""
        if self.is_world_process_zero():
            check_in_run(self.args.output_dir, "trainer_state.json")
        trainer_pt_utils.save_state(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a directory for `from_pretrained`; all ranks call it."""
        hub.save_model(self, output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write weights, configuration, processor and arguments. Only the main process calls it."""
        hub.write_model(self, output_dir or self.args.output_dir, state_dict)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the Hub; the main process only."""
        hub.create_repository(self, token)

    def create_model_card(self, *values: Any, **options: Any) -> None:
        """Write README.md into the output directory, without network access. Options as in transformers."""
        hub.write_model_card(self, *values, **options)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card_options: Any,
    ) -> Any:
        """Save the model, write its card and upload both; all ranks call it."""
        return hub.push(self, commit_message, token, revision, card_options)

    # --- callbacks and ranks

    def add_callback(self, callback: Any) -> None:
        self.engine.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, by instance or class."""
        return self.engine.pop_callback(own_counterpart(callback))

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)

    def get_num_trainable_parameters(self) -> int:
        return count_parameters(self.model).trainable if self.model is not None else 0

    def get_total_train_batch_size(self, args: Any = None) -> int:
        args = self.args if args is None else args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Return an estimate of the operations of forward and backward for these inputs."""
        name = getattr(self.model, "main_input_name", "input_ids")
        counts = name in inputs and hasattr(self.model, "num_parameters")
        return 6 * inputs[name].numel() * self.model.num_parameters(exclude_embeddings=True) if counts else 0

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a model of `model_init`."""
        assert self.model_init is not None
        takes_trial = len(inspect.signature(self.model_init).parameters) > 0
        model: nn.Module = self.model_init(trial) if takes_trial else self.model_init()
        return model

    def end(self) -> None:
        """Finish the job: destroy the process group, if there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # --- calls of the engine

    @property
    def engine_step(self) -> MicroStep | None:
        """Current micro-batch of an overridden loss; None outside a step."""
        return getattr(vars(self).get("engine"), "micro_step", None)

    def _overrides(self, *names: str) -> bool:
        """Return whether a subclass, or the instance, defines one of these methods."""
        return any(name in vars(self) or owner_of(type(self), name) is not None for name in names)

    @property
    def _computes_loss(self) -> bool:
        """Whether the loss is computed by methods of a subclass, or by compute_loss_func."""
        return self.compute_loss_func is not None or self._overrides(*_LOSS_METHODS, "training_step")

    @property
    def _shows_predictions(self) -> bool:
        """Whether prediction_step is needed: for predictions, or because a method is overridden."""
        loss_only = self._evaluation.prediction_loss_only
        return not loss_only or self.compute_loss_func is not None or self._overrides(*_PREDICTION_METHODS)

    def _own_train_loader(self) -> Any:
        return self.get_train_dataloader() if self._overrides("get_train_dataloader", "_get_train_sampler") else None

    def _loss_of(self, model: nn.Module, inputs: Inputs, step: MicroStep) -> Tensor:
        """Return the loss of compute_loss for the engine."""
        inputs = self._prepare_inputs(inputs)
        # Before the number of targets is read.
        step.note_labels(inputs.get("labels"))
        with self.compute_loss_context_manager():
            return compute_loss.called(self, model, inputs, step.num_items)

    def _training_step_of(self, model: nn.Module, inputs: Inputs, step: MicroStep) -> Tensor:
        return compute_loss.training_step(self, model, inputs, step)

    def _predict_batch(self, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Return the result of prediction_step as the engine expects it."""
        settings = self._evaluation
        loss, logits, labels = self.prediction_step(
            model, inputs, settings.prediction_loss_only, ignore_keys=settings.ignore_keys
        )
        return {"loss": loss, "logits": logits, "labels": labels}


def own_counterpart(callback: Any) -> Any:
    """Return Forgather's progress callback for a progress callback of transformers; other callbacks unchanged."""
    kinds = (transformers.ProgressCallback, transformers.PrinterCallback)
    if isinstance(callback, type) and issubclass(callback, kinds):
        from forgather.ml.trainer.callbacks.progress import ProgressCallback

        return ProgressCallback
    return callback


def _with_tokenizer(processing_class: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        return processing_class
    warnings.warn("Trainer(tokenizer=...) is deprecated: pass processing_class instead.", FutureWarning, stacklevel=3)
    if processing_class is not None and processing_class is not tokenizer:
        raise ValueError("Pass only one of processing_class and tokenizer: they are the same argument.")
    return tokenizer
