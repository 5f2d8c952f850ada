"""Engines: the trainers of each strategy with hooks that call the methods of the facade.

A hook uses Forgather's own implementation unless the user's class overrides the corresponding method of
`transformers.Trainer`. Invariant: all ranks have the same overrides, so they reach the same collectives.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather.hf.engine.callback_handler import FacadeCallbacks
from forgather.hf.engine.evaluator import FacadeEvaluator
from forgather.hf.engine.flow import FlowHooks
from forgather.hf.engine.foreign_checkpoints import newest_of_transformers
from forgather.hf.engine.label_rules import target_traits
from forgather.hf.engine.micro_step import MicroStep, warn_once_of_direct_backward
from forgather.hf.engine.outputs import as_state, with_total_flos
from forgather.ml.checkpoint.components import StateComponent
from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.loading.data_types import Batch
from forgather.ml.trainer.loop.optimization import Optimization
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import BaseDataset, TrainerState
from forgather.ml.utils import without_ddp

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer as Facade

    _Base = Trainer[Any]
else:
    _Base = object

_OPTIMIZER_METHODS = (
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)


class FacadeHooks(FlowHooks):
    """Hooks of every strategy: data, optimizer, logs, state and evaluation."""

    facade: "Facade"
    asked_to_resume = False
    _rate_of_step: float | None = None
    _norm_of_step: Tensor | None = None
    own_train_loader: Any = None
    """Loader of an overridden get_train_dataloader, for the current run."""

    def follow(self, facade: "Facade") -> None:
        """Call the methods of this facade from now on."""
        self.facade = facade
        self._callback_handler = FacadeCallbacks(self._callback_handler, facade)

    # --- order of a run

    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        trains = self.wanted is not None
        self.own_train_loader = self.facade._own_train_loader() if trains else None
        given = self.own_train_loader if self.own_train_loader is not None else train_dataset
        super()._prepare(given, eval_dataset)

    def _init_dataloaders(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        # Evaluation data may be a dict of datasets, or a loader of the user. They are loaded when an evaluation runs.
        super()._init_dataloaders(train_dataset, None)

    def _dispatches(self, for_training: bool) -> bool:
        # A loader that is divided between ranks already must be read by each rank.
        own = self.own_train_loader if for_training else self.facade._evaluated_loader
        return super()._dispatches(for_training) and not is_divided(own)

    def _update_training_steps(self) -> None:
        super()._update_training_steps()
        if self.train_dataloader is not None:
            self._settle_fractions()

    def _settle_fractions(self) -> None:
        """Convert fractions of the run, and a delay in epochs, to numbers of steps."""
        for name, fraction in self.facade._fractions.items():
            setattr(self.args, name, max(math.ceil(self.plan.num_steps * fraction), 1))
        if self.facade._delay_epochs:
            self.args.eval_delay = math.ceil(self.facade._delay_epochs * self.plan.steps_per_epoch)

    def _resolve_checkpoint(self) -> None:
        if self.asked_to_resume:
            with self.team.agreement("looking for checkpoints"):
                found = newest_of_transformers(self.args.output_dir) if self.team.rank == 0 else None
            self.args.resume_from_checkpoint = self.team.broadcast(found) or True
        super()._resolve_checkpoint()
        if self.asked_to_resume and not self.args.resume_from_checkpoint:
            raise ValueError(
                f"train(resume_from_checkpoint=True) found no valid checkpoint in {self.args.output_dir}. Check output_dir, "
                "or leave the argument out to start a new run."
            )

    def get_active_state_components(self) -> list[StateComponent]:
        # Step, schedule and data position are small, and a resume needs them. transformers keeps the step too.
        omitted = "optimizer" if self.facade.args.save_only_model else None
        return [one for one in super().get_active_state_components() if one.key != omitted]

    def _init_state(self) -> TrainerState:
        state = as_state(super()._init_state())
        if self.plan.counts_steps and self.plan.steps_per_epoch:
            state.num_train_epochs = math.ceil(self.plan.num_steps / self.plan.steps_per_epoch)
        return state

    # --- optimizer

    def _init_optimizer(self) -> None:
        if not self.facade._overrides(*_OPTIMIZER_METHODS):
            super()._init_optimizer()
            return
        with self.team.agreement("making the optimizer"):
            self._ask_for_optimizer()

    def _ask_for_optimizer(self) -> None:
        """Let the facade create the optimizer, and the schedule if its method creates both."""
        facade, named = self.facade, self._named_parameters()
        self.optimizer, self.lr_scheduler = self.given.optimizer, self.given.lr_scheduler
        if facade._overrides("create_optimizer_and_scheduler"):
            facade.create_optimizer_and_scheduler(num_training_steps=self.plan.schedule_steps)
        else:
            made = facade.create_optimizer()
            self.optimizer = self.optimizer if made is None else made
        if self.optimizer is None:
            raise ValueError(
                f"{type(facade).__name__}.create_optimizer created no optimizer. Set self.optimizer in it."
            )
        self.optimizer = self._adapt_optimizer(self.optimizer, named)
        self.optimization = Optimization(self.optimizer, named, knows_configuration=self.lr_scheduler is None)
        if self.lr_scheduler is None:
            self._init_scheduler()

    def _init_scheduler(self) -> None:
        if not self.facade._overrides("create_scheduler"):
            super()._init_scheduler()
            return
        self.lr_scheduler = None
        made = self.facade.create_scheduler(num_training_steps=self.plan.schedule_steps, optimizer=self.optimizer)
        self.lr_scheduler = self.lr_scheduler if made is None else made
        assert self.optimization is not None
        self.optimization.follow(self.lr_scheduler, self.optimizer)

    # --- logs and callbacks

    def _dispatch_event(self, event: str, readers: bool | None = None, **extra: Any) -> None:
        super()._dispatch_event(event, readers, **extra)
        if event == "on_forward_backward_end" and self.window is not None and not self.window.is_last:
            # As in transformers: after each micro-batch that no optimizer step follows.
            super()._dispatch_event("on_substep_end")

    def _update_parameters(self) -> Tensor | None:
        self._norm_of_step = super()._update_parameters()
        return self._norm_of_step

    def _advance_schedule(self) -> None:
        self._rate_of_step = float(self.lr_scheduler.get_last_lr()[0])
        super()._advance_schedule()

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int | Tensor:
        number = super()._count_batch_tokens(input_dict, labels)
        # A placeholder batch has no tokens.
        if self.facade.args.include_num_input_tokens_seen != "non_padding" or (isinstance(number, int) and number == 0):
            return number
        mask = unpadded(input_dict, getattr(self.facade.processing_class, "pad_token_id", None))
        if mask is None:
            return number
        return int(mask.sum()) if mask.device.type == "cpu" else mask.sum()

    def log(self, logs: dict[str, Any]) -> None:
        # As in transformers: the learning rate of the logged step, not of the next one.
        if "learning_rate" in logs and self._rate_of_step is not None:
            logs = {**logs, "learning_rate": self._rate_of_step}
        if logs.get("grad_norm") is not None and self._norm_of_step is not None:
            # As in transformers: the norm of the logged step, not of all steps since the last log.
            norm = float(self._norm_of_step)
            logs = {**logs, "grad_norm": norm if math.isfinite(norm) else logs["grad_norm"]}
        self.facade.log(with_total_flos(logs))

    def record(self, logs: dict[str, Any]) -> None:
        """Append a record to the log history and dispatch `on_log`: the implementation of `log`."""
        if self.state is None:
            # Before the first run, as in transformers.
            self.state = self.facade.state
        if self.facade.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.facade.state.num_input_tokens_seen
        BaseTrainer.log(self, logs)

    # --- evaluation

    def _prepare_loop(self) -> None:
        super()._prepare_loop()
        self.evaluator = FacadeEvaluator.of(self.evaluator, self)


class LossHooks(_Base):
    """Hooks of the strategies that run the full model on each rank: loss, step and prediction."""

    facade: "Facade"
    micro_step: MicroStep | None = None

    def _wrap_loss_fn(self) -> None:
        super()._wrap_loss_fn()
        facade = self.facade
        if facade._computes_loss:
            # The loss is computed outside of ModelLoss, which only counts targets.
            self.step_loss.assume(target_traits(self.unwrapped_model()), f"as computed by {type(facade).__name__}")

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        if not self.facade._overrides("training_step"):
            return super()._forward_backward_step(input_dict, labels)
        with self._around_micro_batch(), self._micro_step(labels) as step:
            loss = self.facade._training_step_of(self.model, rejoined(input_dict, labels), step)
            if step.share is not None:
                # With several backward passes, the returned value is the loss to report, as in transformers.
                return step.share if step.num_backwards == 1 else step.weighted(loss.detach())
            warn_once_of_direct_backward()
            self.loss_fn.was_used = True
            return loss.detach()

    def _forward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        if not self.facade._computes_loss:
            return super()._forward_step(input_dict, labels)
        offloads = self.recipes.activations(self.unwrapped_model) if self.recipes.offloads else contextlib.nullcontext()
        with self._micro_step(labels) as step, self.amp_context.autocast(), offloads:
            return step.weighted(self.facade._loss_of(self.model, rejoined(input_dict, labels), step))

    @contextlib.contextmanager
    def _micro_step(self, labels: Any) -> Iterator[MicroStep]:
        self.micro_step = MicroStep(self, labels, self.facade.loss_is_scaled_for_ga)
        try:
            yield self.micro_step
        finally:
            self.micro_step = None

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> dict[str, Any]:
        if not self.facade._shows_predictions:
            return super()._prediction_step(input_dict, labels)
        # DDP broadcasts buffers at each forward pass, and ranks may have unequal numbers of batches.
        with self.amp_context.autocast():
            return self.facade._predict_batch(without_ddp(self.model), rejoined(input_dict, labels))


def rejoined(inputs: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """Return the inputs of a batch with its labels, as methods of transformers get them."""
    return dict(inputs) if labels is None else {**inputs, "labels": labels}


def unpadded(inputs: Mapping[str, Any], pad_token: int | None) -> Tensor | None:
    """Return which positions of a batch are not padding; None if that is unknown."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if isinstance(mask, Tensor):
        return mask
    return ids != pad_token if isinstance(ids, Tensor) and pad_token is not None else None


def is_divided(loader: Batch | Any) -> bool:
    """Return whether a loader reads only the part of this rank."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any((getattr(one, "num_replicas", None) or getattr(one, "num_processes", None) or 1) > 1 for one in samplers)
