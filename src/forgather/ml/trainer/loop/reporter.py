"""Reporter: the numbers of a run, summed over ranks, logged at intervals and at the end.

Between two logs nothing waits for the device. `settle` is the only place that does, and it is a collective.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.loop.loop_state import LoopState
from forgather.ml.trainer.loop.metrics import SettledSums, SpeedMeter, root_mean_square
from forgather.ml.trainer.loop.nonfinite import GradientFinding, gradient_error
from forgather.ml.trainer.loop.target_watch import TargetWatch
from forgather.ml.trainer.loop.window import Window
from forgather.ml.trainer.trainer_types import LRSchedulerT

Reduce = Callable[[Tensor], Tensor]
ReduceNorms = Callable[[list[float]], list[float]]
Findings = Callable[[int], list[GradientFinding]]


class Reporter:
    """Notes steps, settles their numbers between ranks, and makes the records that are logged."""

    def __init__(
        self,
        loop: LoopState,
        speed: SpeedMeter,
        flops_per_token: float,
        leaves_out_steps: bool,
        reduce: Reduce,
        reduce_norms: ReduceNorms,
        findings: Findings,
    ) -> None:
        """`reduce` sums losses (first row), tokens and samples over data-parallel ranks; `findings` tells what all ranks
        know of a step without finite gradients.
        """
        self._loop = loop
        self.speed = speed
        self._flops_per_token = flops_per_token
        self._leaves_out_steps = leaves_out_steps
        self._reduce = reduce
        self._reduce_norms = reduce_norms
        self._findings = findings
        self._targets = TargetWatch()
        self._num_steps = 0

    def note_step(
        self, window: Window, loss: Tensor, grad_norm: Tensor | None, tokens: int | Tensor, samples: int
    ) -> None:
        """A step is done: move the counters, without waiting for the device."""
        loop, state = self._loop, self._loop.state
        assert window.total is not None
        self._num_steps += 1
        if not (self._targets.has_seen_targets and isinstance(window.total, int) and window.total > 0):
            self._targets.note(window.batches, window.total, self._num_steps)
        loop.interval.add(loss, window.total, grad_norm, tokens, samples)
        self.speed.step(tokens, samples)
        state.global_step += 1
        if isinstance(tokens, int):
            state.num_input_tokens_seen += tokens
            state.total_flos += tokens * self._flops_per_token
        # An epoch that turns out longer than was assumed must not reach into the next one.
        steps_per_epoch = state.epoch_train_steps  # type: ignore[attr-defined]
        state.epoch = state.raw_epoch + min((state.global_step - state.epoch_start_step) / steps_per_epoch, 1.0)

    def settle(self, lr_scheduler: LRSchedulerT) -> SettledSums:
        """Make the counters those of all ranks; a checkpoint holds no others. Stops a run that must not continue."""
        loop, state = self._loop, self._loop.state
        num_known = loop.interval.num_settled_norms
        sums = loop.interval.settle(self._reduce, self._reduce_norms)
        self._targets.note_interval(sums.num_steps, sums.targets)
        state.num_input_tokens_seen = loop.totals.tokens + sums.tokens
        state.total_flos = state.num_input_tokens_seen * self._flops_per_token
        self.settle_schedule(lr_scheduler)
        bad_step = loop.watch.judge(sums.norms[num_known:], state.global_step)
        if bad_step is not None:
            raise gradient_error(bad_step, loop.watch.limit, loop.amp.has_loss_scale, self._findings(bad_step))
        return sums

    def settle_schedule(self, lr_scheduler: LRSchedulerT) -> None:
        """Move the schedule to the next step, which waits for the last one: GradScaler may have left it out."""
        left_out, self._loop.left_out = self._loop.left_out, None
        if left_out is not None and not left_out.wait():
            lr_scheduler.step()

    def close_interval(self, lr_scheduler: LRSchedulerT) -> SettledSums:
        """The sums over all ranks since the last log; from now on they are part of the run's totals."""
        sums = self.settle(lr_scheduler)
        self._loop.interval.reset()
        self._loop.totals.add(sums.loss_sum, sums.targets, sums.tokens, sums.samples)
        return sums

    def interval_record(self, lr_scheduler: LRSchedulerT) -> dict[str, Any]:
        """The log record of the steps since the last log; closes the interval."""
        loop, state = self._loop, self._loop.state
        loop.amp.log_scale_drop()
        sums = self.close_interval(lr_scheduler)
        norms = list(sums.norms)
        if self._leaves_out_steps:
            # The norm of a step that was left out says nothing.
            norms = [norm for norm in norms if math.isfinite(norm)]
        logs: dict[str, Any] = {
            "epoch": state.epoch,
            "loss": sums.loss_sum / sums.targets if sums.targets else 0.0,
            "grad_norm": root_mean_square(norms),
            "max_grad_norm": max(norms, default=None),
            "tokens": sums.tokens,
            "total_tokens": loop.totals.tokens,
            "total_flos": state.total_flos,
            "learning_rate": lr_scheduler.get_last_lr()[0],
        }
        if len(norms) < len(sums.norms):
            logs["skipped_steps"] = len(sums.norms) - len(norms)
            if not norms:
                # All steps were left out: there is no loss to average.
                del logs["loss"]
        return logs

    def final_record(
        self, lr_scheduler: LRSchedulerT, effective_batch_size: int, total: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        """The record of the whole run; rates count the timed steps of this process only."""
        # Without logging, one interval is left that is as long as the run.
        self.close_interval(lr_scheduler)
        loop, speed = self._loop, self.speed
        timed = torch.tensor([speed.tokens, speed.samples], dtype=torch.int64, device="cpu")
        tokens, samples = total(timed).tolist()
        return {
            "train_runtime": speed.runtime,
            "train_samples": loop.totals.samples,
            "step": loop.state.global_step,
            "train_samples_per_second": speed.rate(samples),
            "train_steps_per_second": speed.rate(speed.num_steps),
            "epoch": loop.state.epoch,
            "effective_batch_size": effective_batch_size,
            "total_tokens": loop.totals.tokens,
            "tokens_per_second": speed.rate(tokens),
            "total_flops": loop.state.total_flos,
            "flops_per_second": speed.rate(tokens * self._flops_per_token),
            "train_loss": loop.totals.loss,
        }
