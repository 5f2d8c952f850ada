"""The loop that all trainers share, on one device.

Read `train` first, then `_train_epoch`, `_train_step` and `_after_step`. The hooks that strategies override follow below
them; what is not the loop lives in files named after it.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments, TrainingArguments
from forgather.ml.trainer.evaluating import EvaluatingTrainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.evaluation_sums import samples_in
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.index_errors import explaining_indices
from forgather.ml.trainer.loop.nonfinite import NonFiniteError, step_if_finite
from forgather.ml.trainer.loop.signals import Preempted, StopSignals
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.reporting import TrainerState
from forgather.ml.trainer.setup.torch_settings import activation_budget, torch_settings
from forgather.ml.trainer.setup.trainer_utils import (
    enable_hf_activation_checkpointing,
    maybe_cleanup_memory,
    set_train,
)
from forgather.ml.trainer.step_loss.model_loss import Window
from forgather.ml.trainer.trainer_types import TrainOutput

__all__ = [
    "MinimalTrainingArguments",
    "NonFiniteError",
    "Trainer",
    "TrainerState",
    "TrainingArguments",
    "enable_hf_activation_checkpointing",
    "maybe_cleanup_memory",
    "set_train",
]

logger = logging.getLogger(__name__)


class Trainer(EvaluatingTrainer):
    """Trains on one device; the base of all strategies."""

    # --- the loop

    def train(self, **kwargs: Any) -> TrainOutput:
        """Train, from the checkpoint that `resume_from_checkpoint` names, or from the start.

        `resume_from_checkpoint` may be given here too, and then overrides the argument.
        """
        resume = kwargs.pop("resume_from_checkpoint", None)
        if kwargs:
            raise TypeError(f"train() got unknown arguments: {', '.join(kwargs)}; it takes resume_from_checkpoint.")
        with contextlib.ExitStack() as run:
            self._signals = run.enter_context(StopSignals())
            run.push(self._close_after)
            run.enter_context(torch_settings(self.args))
            run.enter_context(activation_budget(self.args.activation_memory_budget))
            self._prepare(self._default_resume() if resume is None else resume)
            if resume is True and self._resume is False and self.env.rank == 0:
                self._warn_of_nothing_to_resume()
            self._has_trained = True
            if self._step_in_backward is not None:
                run.enter_context(self._step_in_backward)
            if self.args.detect_anomaly:
                run.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=True))
            run.enter_context(set_train(self._forward_model, True))
            self._dispatch("on_train_begin")
            self._settle_requests()
            self._finish_interrupted_step()
            self._finish_interrupted_epoch()
            while self._has_more_epochs():
                self._train_epoch()
            return self._finish()

    def _train_epoch(self) -> None:
        self.train_dataloader.set_epoch(self.state.raw_epoch)
        self._dispatch("on_epoch_begin")
        self._settle_requests()
        for window in self._windows() if not self._leaves_epoch() else ():
            with explaining_indices(self.unwrapped_model(), window.batches, self._looks_at_ids()):
                self._train_step(window)
            self._after_step()
            if self._leaves_epoch():
                break
        self._end_epoch()

    def _looks_at_ids(self) -> bool:
        return self.state.global_step == 0 and self.device.type != "cpu"

    def _train_step(self, window: Window) -> None:
        """One optimizer update from a window of micro-batches."""
        self._dispatch("on_step_begin")
        loss = self._accumulate_gradients(window)
        self.amp.unscale_(self.optimizer)
        grad_norm = self._clip_grad_norm(self.args.max_grad_norm)
        self._dispatch("on_pre_optimizer_step")
        self._settle_schedule()
        self._optimizer_step(grad_norm)
        self._dispatch("on_optimizer_step")
        self._advance_schedule()
        clear_gradients(self.optimizer)
        self._note_step(window, loss, grad_norm)

    def _optimizer_step(self, grad_norm: Tensor | None = None) -> None:
        if self._skips_updates and grad_norm is not None:
            step_if_finite(self.optimizer, grad_norm)
        elif self._step_in_backward is None:
            self.amp.optimizer_step(self.optimizer)
        if self._average is not None:
            self._average.update()

    def _advance_schedule(self) -> None:
        """A step of the schedule, unless GradScaler has left out that of the optimizer."""
        self._left_out = self.amp.left_out
        if self._left_out is None:
            self.lr_scheduler.step()
        elif self.device.type == "cpu":
            self._settle_schedule()

    def _accumulate_gradients(self, window: Window) -> Tensor:
        """The loss of the step, whose gradients are in the parameters afterwards."""
        if not self.model_loss.can_count:
            self._agree_on_loss(window.batches[0])
        if self.model_loss.can_count:
            self._count_targets(window)
        loss: Tensor | None = None
        for number in range(len(window.batches)):
            self._dispatch("on_forward_backward_begin")
            share = self._forward_backward_step(window, number)
            self._dispatch("on_forward_backward_end")
            loss = share if loss is None else loss + share
        assert loss is not None, "a window has at least one batch"
        return loss

    def _note_step(self, window: Window, loss: Tensor, grad_norm: Tensor | None) -> None:
        state = self.state
        tokens = sum(self._count_batch_tokens(batch) for batch in window.batches)
        samples = sum(self._count_batch_samples(batch) for batch in window.batches)
        assert window.total is not None
        self._target_watch.note(window.batches, window.total)
        self._interval.add(loss, window.total, grad_norm, tokens, samples)
        self._speed.step(tokens, samples)
        state.global_step += 1
        state.num_input_tokens_seen += tokens
        state.total_flos += tokens * self._flops_per_token
        # An epoch that turns out longer than was assumed must not reach into the next one.
        share = min((state.global_step - state.epoch_start_step) / state.epoch_train_steps, 1.0)
        state.epoch = state.raw_epoch + share
        self._watch.note(state.global_step, grad_norm, loss, getattr(self._gradient_norm, "trace", None))
        self._dispatch("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=tokens)

    def _after_step(self) -> None:
        """Log, evaluate and save where that is due; the cadence depends on the global step alone."""
        if self._gradients_look_bad() or self._interval.wants_settling:
            self._settle_interval()
        self._dispatch("on_step_end")
        self._settle_requests("step")
        if self.control.should_log or self._log_is_due():
            self._log_interval()
        if self.control.should_evaluate or self._evaluate_when.due(self.state.global_step):
            self._evaluate_while_training()
        if self.control.should_save or self._is_due(self._save_when):
            self._save_while_training()
        self._heed_stop_request()

    def _end_epoch(self) -> None:
        """What happens once per epoch; a step limit in the middle of one leaves the epoch unfinished."""
        if not self._is_last_step() or self._epoch_is_complete():
            self._begin_next_epoch()
        self.control.should_epoch_stop = False
        if self.args.logging_strategy == "epoch":
            self._log_interval()
        if self.args.eval_strategy == "epoch" and self.state.global_step >= self.args.eval_delay:
            self._evaluate_while_training()
        if self.args.save_strategy == "epoch":
            self._save_while_training()
        self._dispatch("on_epoch_end")
        self._settle_requests()
        self._fulfil_requests()
        self._heed_stop_request()

    def _fulfil_requests(self) -> None:
        """Do what callbacks asked for at the end of an epoch, and not only after the next step."""
        if self.control.should_log:
            self._log_interval()
        if self.control.should_evaluate:
            self._evaluate_while_training()
        if self.control.should_save:
            self._save_while_training()

    def _finish(self) -> TrainOutput:
        if self.args.logging_strategy != "no":
            self._log_interval()
        if self.args.save_strategy != "no":
            self._save_while_training()
        self._load_best_model()
        metrics = self._final_metrics()
        self.log(metrics)
        self._dispatch("on_train_end")
        return TrainOutput(self.state.global_step, metrics)

    # --- when

    def _log_is_due(self) -> bool:
        return self._is_due(self._log_when) or (self.args.logging_first_step and self.state.global_step == 1)

    def _is_due(self, when: PeriodicFunction) -> bool:
        """By the step, or because there is no later one; what goes by epochs is due at their ends."""
        return when.due(self.state.global_step) or (when.is_by_steps and self._is_last_step())

    def _save_was_due(self) -> bool:
        at_epoch_end = self.state.global_step == self.state.epoch_start_step
        return self._is_due(self._save_when) or (self.args.save_strategy == "epoch" and at_epoch_end)

    def _evaluation_is_due(self) -> bool:
        """Whether the present step still needs an evaluation: a checkpoint saved by hand may come before it."""
        step = self.state.global_step
        if step == 0 or step == self._evaluated_step:
            return False
        on_save = self.args.eval_on_save and self.eval_dataset is not None and self._is_due(self._save_when)
        return self._evaluate_when.due(step) or on_save

    def _has_more_epochs(self) -> bool:
        if self._is_last_step():
            return False
        without_limit = self.args.max_steps >= 0 or self.args.num_train_epochs < 0
        return without_limit or self.state.raw_epoch < self.args.num_train_epochs

    def _is_last_step(self) -> bool:
        if self.control.should_training_stop or self.control.should_abort_without_save:
            return True
        # Without a length an epoch ends when its data do, not at the number of steps that was assumed for it.
        has_limit = self.args.max_steps >= 0 or self.train_dataloader.num_batches is not None
        return has_limit and self.state.global_step >= self._num_steps

    def _leaves_epoch(self) -> bool:
        return self._is_last_step() or self.control.should_epoch_stop

    def _epoch_is_complete(self) -> bool:
        steps_done = self.state.global_step - self.state.epoch_start_step
        return self.control.should_epoch_stop or steps_done >= self.state.epoch_train_steps

    def _begin_next_epoch(self) -> None:
        state = self.state
        if state.global_step == state.epoch_start_step and not self._resumed_in_epoch:
            raise RuntimeError(
                f"Epoch {state.raw_epoch} of the training data had no batch at all, so training cannot go on. Check the "
                "dataset, per_device_train_batch_size and dataloader_drop_last, which drops incomplete batches and windows of "
                f"fewer than gradient_accumulation_steps={self.args.gradient_accumulation_steps} batches."
            )
        self._resumed_in_epoch = False
        state.raw_epoch += 1
        state.epoch = float(state.raw_epoch)
        state.epoch_start_step = state.global_step

    def _heed_stop_request(self) -> None:
        """Save and leave when the system asked for it; agreed between ranks by the strategies that have several."""
        signal_name = self._stop_requested()
        if signal_name is None:
            return
        self._is_leaving = True
        if self.control.should_training_stop:
            # No checkpoint of this step has the callback's request to stop, which the resumed run must follow.
            self._saved_step = -1
        path = self._save_while_training(is_scheduled=False)
        self._dispatch("on_train_end")
        preempted = Preempted(signal_name, self.state.global_step, path)
        logger.warning("%s", preempted)
        raise preempted

    def _finish_interrupted_step(self) -> None:
        """Do what was due at the step of the resumed checkpoint, and is not in it: an evaluation, and the save after it."""
        if not self._evaluation_is_pending:
            self._list_resumed_best()
            return
        was_scheduled = self._scheduled_step == self.state.global_step
        self._evaluate_while_training()
        if not self._evaluation_is_pending and (was_scheduled or self.control.should_save or self._save_was_due()):
            if self.rng.has_loaded:
                # Callbacks may have drawn random numbers since the load.
                self.rng.restore()
            # Replace the resumed checkpoint: it lacks the evaluation, and says that it is pending.
            self._saved_step = self._scheduled_step = -1
            self._save_while_training()
        self._heed_stop_request()

    def _finish_interrupted_epoch(self) -> None:
        """A checkpoint of the last step may be older than the evaluation that goes with the end of its epoch."""
        if self._is_last_step() and self.state.global_step > self.state.epoch_start_step:
            self._end_epoch()

    # --- data

    def _windows(self) -> Iterator[Window]:
        """The rest of the epoch in windows of `gradient_accumulation_steps` micro-batches, the last maybe shorter."""
        batches: list[Mapping[str, Any]] = []
        iterator = iter(self.train_dataloader)
        if self._resumed_in_epoch and self.rng.has_loaded:
            # Last of all: callbacks and iterators may have drawn numbers that the straight run drew long ago.
            self.rng.restore()
        for batch in iterator:
            self._note_batch(batch)
            batches.append(batch)
            if len(batches) == self.args.gradient_accumulation_steps:
                yield Window(batches)
                batches = []
        if batches and not self.args.dataloader_drop_last:
            yield Window(batches)

    def _note_batch(self, batch: Mapping[str, Any]) -> None:
        """A batch was taken from the loader; strategies that learn about it from other ranks note that here."""

    def _count_targets(self, window: Window) -> None:
        """Count the targets of a step before its first backward pass, which needs their number."""
        count = self.model_loss.count
        window.counts = [count(batch.get("labels"), batch) for batch in window.batches]
        window.total = sum(window.counts)
        window.num_shares = len(window.batches)

    # --- hooks of the step

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's loss, detached."""
        share = self._forward_step(window, number)
        self._backward(share)
        return share.detach()

    def _forward_step(self, window: Window, number: int) -> Tensor:
        """The share of the step's loss; the logits are let go before the backward pass, which needs the memory."""
        batch = window.batches[number]
        inputs, labels = self._prepare_batch(batch)
        with self.amp.autocast():
            with self._activation_context():
                forward = self.model_loss.forward(self._forward_model, inputs, labels, isinstance(batch, EmptyBatch))
            if window.total is None:
                # The first step of a process: only now is it known which positions count.
                self._count_targets(window)
            assert window.total is not None
            return self.model_loss.share(forward, labels, window.counts[number], window.total, window.num_shares)

    def _backward(self, loss: Tensor) -> None:
        self.amp.scale_loss(loss).backward()

    def _should_sync_gradients(self) -> bool:
        """Whether gradients of the present micro-batch are to be reduced; one device has nothing to reduce."""
        return True

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        """The norm of all gradients, which are scaled down to `max_grad_norm` if it is given and exceeded."""
        norm = self._gradient_norm(norm_type)
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_grad_norm, norm)
        return norm

    def _count_batch_tokens(self, batch: Mapping[str, Any]) -> int:
        """The number of tokens the model processes for a batch; padding counts, since it costs the same."""
        if isinstance(batch, EmptyBatch):
            return 0
        for name in ("input_ids", "labels"):
            if isinstance(batch.get(name), Tensor):
                return int(batch[name].numel())
        return samples_in(batch)

    def _count_batch_samples(self, batch: Mapping[str, Any]) -> int:
        """The number of samples in a batch."""
        return samples_in(batch)

    def _is_pipeline_parallel(self) -> bool:
        return False

    def _is_model_parallel(self) -> bool:
        return False

    def _close_after(self, error_type: type[BaseException] | None, *_: object) -> None:
        """End workers and give the output directory back, however training ended."""
        self._signals = None
        if self.train_dataloader is not None:
            self._close_loader(self.train_dataloader, error_type is None or issubclass(error_type, Preempted))
        for manager in (self._claim, self.checkpoint_manager):
            if manager is not None:
                manager.close()

    def _close_loader(self, loader: Any, in_order: bool) -> None:
        """`in_order` is False after an error, of which other ranks may not know."""
        loader.close()
