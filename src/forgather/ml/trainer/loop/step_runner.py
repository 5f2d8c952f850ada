"""Step runner: one optimizer step through the hook `Trainer._train_step`, with the bookkeeping around it.

It fetches the micro-batches, resolves the loss on all ranks, counts targets before the first backward pass, and records
the result. The invariant: every rank begins and ends the same steps. `Trainer._train_epoch` calls it.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather.ml.distributed.watch import AFTER_STEP, note, note_step
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.window import StepBatches, Window, checked_result, samples_in
from forgather.ml.trainer.ranks.parallel_loading import warn_of_equal_batches
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.step_loss.index_errors import better_error, warn_of_large_ids
from forgather.ml.trainer.step_loss.model_loss import Finding, ModelLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.utils import without_ddp

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class StepRunner:
    """Optimizer steps of a trainer, each over one window of micro-batches."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self._prepares_early = is_overridden(trainer, "_prepare_batch")
        own_hooks = ("_forward_backward_step", "_prediction_step")
        self._computes_own_loss = any(is_overridden(trainer, name) for name in own_hooks)
        self._has_warned = False
        self._num_averages = 0
        self.compares_batches = False
        """Whether ranks still have to compare their first batches, to detect identical streams."""
        self.window: Window | None = None
        """The window of the current step; None between steps."""
        self.failed_batches: list[Mapping[str, Any]] = []
        """The micro-batches of a step that has failed, for error messages."""

    def batches(self) -> StepBatches:
        """Return the remaining batches of the epoch as the data iterator for `_train_step`."""
        args = self._trainer.args
        return StepBatches(
            self._rest_of_epoch(), args.gradient_accumulation_steps, args.dataloader_drop_last, self._begin
        )

    def run(self, steps: StepBatches) -> bool:
        """Run one step; return False at the end of the epoch."""
        trainer = self._trainer
        note_step(trainer.state.global_step + 1)
        steps.begin_step()
        if trainer.skipped.is_active:
            try:
                if self._pass_over(steps):
                    return True
            except StopIteration:
                return False
        try:
            finder = trainer.batch_finder
            result = trainer._train_step(steps) if finder is None else finder.run(steps)
        except StopIteration:
            self._drop_unfinished(steps.window)
            return False
        except Exception as error:
            self.failed_batches = list(steps.current)
            better = better_error(error, trainer.unwrapped_model, steps.current)
            if better is None:
                raise
            raise better from error
        finally:
            self._leave()
        self._note(steps.window, result)
        note(AFTER_STEP)
        return True

    def _pass_over(self, steps: StepBatches) -> bool:
        """Pass over a step that is skipped, or that has no samples left; return whether it was.

        Raise StopIteration at the end of the epoch. All ranks decide alike: samples are counted over all of them.
        """
        trainer, window = self._trainer, steps.look()
        number = trainer.state.global_step + 1
        if number not in trainer.skipped.steps and not trainer.feed.is_empty(window):
            return False
        logger.info("Step %d makes no update: its samples are skipped (skip_steps, skip_samples).", number)
        trainer._dispatch_event("on_step_begin")
        steps.pass_over()
        trainer.feed.drop(window)
        trainer.reporter.pass_over(trainer.lr_scheduler)
        note(AFTER_STEP)
        return True

    def _rest_of_epoch(self) -> Iterator[Mapping[str, Any]]:
        trainer = self._trainer
        trainer.feed.begin_pass()
        iterator = iter(trainer.train_dataloader)
        if trainer.loop.resumed_in_epoch and trainer.rng.has_loaded:
            # Restore the random state last. Callbacks and the creation of the iterator may have drawn random numbers;
            # an uninterrupted run drew these at the start of the epoch, long before the resumed step.
            trainer.rng.restore()
        for batch in iterator:
            trainer.feed.taken(batch)
            if self.compares_batches:
                # The gather is a collective. All ranks have the same flag, and all take their first batch here.
                self.compares_batches = False
                warn_of_equal_batches(batch, trainer.layout, trainer.team.gather)
            yield batch

    def _begin(self, window: Window) -> None:
        """Resolve the loss and count the targets of a fetched window, before its first backward pass."""
        trainer, finder = self._trainer, self._trainer.batch_finder
        is_repeated = finder is not None and finder.is_repeating
        if finder is not None:
            finder.begin(window)
        if trainer.state.global_step == 0 and trainer.device.type != "cpu":
            # On an accelerator, an id out of range is a device-side assert without the name of the tensor.
            warn_of_large_ids(trainer.unwrapped_model(), window.batches)
        if self._prepares_early:
            # The override may change labels, so it must run before their targets are counted.
            window.prepared = [trainer._prepare_batch(batch) for batch in window.batches]
        self.window = window
        self._num_averages = trainer.recipes.num_updates
        if not is_repeated:
            trainer._dispatch_event("on_step_begin")
        loss = trainer.step_loss
        # Each micro-batch is weighted by its share of the step's targets, so all targets are counted before the first
        # backward pass. On the first step the loss may be unresolved, and with it the labels that count as targets.
        # All ranks then agree on the loss (a collective); a loss that stays unresolved is counted after the step.
        if not loss.can_count:
            trainer._agree_on_loss(loss, window.batches[0])
        if loss.can_count:
            (trainer.feed if finder is None else finder).count(window)
        if isinstance(trainer.loss_fn, TrainingLoss):
            trainer.loss_fn.begin_step(window)

    def _leave(self) -> None:
        self.window = None
        if isinstance(self._trainer.loss_fn, TrainingLoss):
            self._trainer.loss_fn.end_step()

    def _note(self, window: Window | None, result: tuple[Tensor, Tensor | None, int | Tensor]) -> None:
        trainer = self._trainer
        loss, grad_norm, tokens = checked_result(window, result, type(trainer).__name__)
        assert window is not None
        if window.total is None:
            # The forward passes of this step have resolved the loss.
            trainer.feed.count(window)
        if not getattr(trainer.loss_fn, "was_used", False):
            self._warn_of_unweighed(window)
        if trainer.recipes.average is not None and trainer.recipes.num_updates == self._num_averages:
            # An override of `_train_step` has stepped the optimizer without updating the EMA.
            trainer.recipes.update_average()
        # Ranks that train on the same batches count them once.
        samples = sum(map(samples_in, window.batches)) if trainer.layout.speaks else 0
        trainer.reporter.note_step(window, loss, grad_norm, tokens, samples)
        trace = None if trainer.optimization is None else trainer.optimization.trace
        trainer.loop.watch.note(trainer.state.global_step, grad_norm, loss, trace)
        trainer._dispatch_event("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=tokens)

    def _drop_unfinished(self, window: Window | None) -> None:
        """Clear the gradients of a window that `_train_step` left with StopIteration, and warn."""
        if window is not None and window.has_begun:
            clear_gradients(self._trainer.optimizer)
            logger.warning(
                "_train_step raised StopIteration after %d of %d micro-batches of the last step of the epoch: their "
                "gradients are dropped. Stop at the micro-batch where _should_sync_gradients() is True.",
                *(window.number + 1, len(window)),
            )

    def _warn_of_unweighed(self, window: Window) -> None:
        loss_fn = self._trainer.loss_fn
        is_weighed = not isinstance(loss_fn, TrainingLoss) or loss_fn.was_used
        if is_weighed or self._has_warned or max(len(window), window.num_shares) < 2:
            return
        self._has_warned = True
        logger.warning(
            "%s computes the loss of a micro-batch without self.loss_fn, so micro-batches and ranks are not weighted by their "
            "targets, and the loss of a step is a sum instead of a mean. Use self.loss_fn(logits, labels), or "
            "self.loss_fn.rescale(mean, labels) for a loss computed elsewhere.",
            type(self._trainer).__name__,
        )

    # --- loss resolution

    def agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        """Resolve the loss from the first batches of all ranks, with the same result on every rank; collective."""
        team = self._trainer.team
        # One process resolves the loss in its first forward pass, unless a user's hook replaces that pass.
        if not team.settles_loss_first and not self._computes_own_loss:
            return
        findings = [one for one in team.gather(self.look_at_loss(loss, batch)) if one is not None]
        if findings:
            # Adopt the finding of the lowest rank with a real batch. A finding that the model's own loss differs from
            # the causal loss takes precedence, because one batch is enough to show it.
            loss.adopt(min(findings, key=lambda one: (one.is_stand_in, one.uses_own is not True)))

    def look_at_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> Finding | None:
        """Return the finding of this rank about the loss, from its first batch."""
        if batch is None:
            return None
        trainer = self._trainer
        try:
            inputs, labels = trainer._prepare_batch(batch)
            with trainer.amp_context.autocast():
                return loss.look(without_ddp(trainer.model), inputs, labels, isinstance(batch, EmptyBatch))
        except Exception as error:  # noqa: BLE001 - the forward pass that follows fails too, and reports it to all ranks
            logger.debug("The loss could not be inspected: %s", error)
            return None
