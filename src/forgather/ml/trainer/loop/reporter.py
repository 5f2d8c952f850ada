"""Metric reporting: counters and sums over ranks, log records at intervals and at the end of the run.

Only `settle` waits for the device and the other ranks; the steps between two logs never do. `StepRunner` records steps,
and the training loop requests records on every rank.
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
    """Recorder of steps that reduces their metrics over ranks and builds the log records."""

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
        """`reduce` sums losses (first row), tokens and samples over data-parallel ranks.

        `findings` gathers diagnostics from all ranks about a step with non-finite gradients.
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
        """Advance the counters after a step, without waiting for the device."""
        loop, state = self._loop, self._loop.state
        assert window.total is not None
        self._num_steps += 1
        # The watch scans labels. It is skipped once targets were seen, unless this step has none or an unknown number.
        if not (self._targets.has_seen_targets and isinstance(window.total, int) and window.total > 0):
            self._targets.note(window.batches, window.total, self._num_steps)
        loop.interval.add(loss, window.total, grad_norm, tokens, samples)
        self.speed.step(tokens, samples)
        if isinstance(tokens, int):
            state.num_input_tokens_seen += tokens
            state.total_flos += tokens * self._flops_per_token
        self._advance()

    def pass_over(self, lr_scheduler: LRSchedulerT) -> None:
        """Advance step number and learning-rate schedule past a step without an update."""
        self.settle_schedule(lr_scheduler)
        lr_scheduler.step()
        self._advance()

    def _advance(self) -> None:
        state = self._loop.state
        state.global_step += 1
        # Cap the fraction: an epoch of unknown length may have more steps than assumed.
        steps_per_epoch = state.epoch_train_steps  # type: ignore[attr-defined]
        state.epoch = state.raw_epoch + min((state.global_step - state.epoch_start_step) / steps_per_epoch, 1.0)

    def settle(self, lr_scheduler: LRSchedulerT) -> SettledSums:
        """Reduce the counters over all ranks, and raise NonFiniteError if the run must stop; collective.

        Checkpoints contain reduced counters only.
        """
        loop, state = self._loop, self._loop.state
        # Norms from an earlier `settle` of this interval were judged then.
        num_known = loop.interval.num_settled_norms
        sums = loop.interval.settle(self._reduce, self._reduce_norms)
        self._targets.note_interval(sums.num_steps, sums.targets)
        state.num_input_tokens_seen = loop.totals.tokens + sums.tokens
        state.total_flos = state.num_input_tokens_seen * self._flops_per_token
        self.settle_schedule(lr_scheduler)
        bad_step = loop.watch.judge(sums.norms[num_known:], state.global_step)
        if bad_step is not None:
            # `_findings` is a collective. All ranks reach it, because the reduced norms are equal on all of them.
            raise gradient_error(bad_step, loop.watch.limit, loop.amp.has_loss_scale, self._findings(bad_step))
        return sums

    def settle_schedule(self, lr_scheduler: LRSchedulerT) -> None:
        """Step the learning-rate schedule, unless GradScaler skipped the last optimizer step; waits for its flag."""
        left_out, self._loop.left_out = self._loop.left_out, None
        if left_out is not None and not left_out.wait():
            lr_scheduler.step()

    def close_interval(self, lr_scheduler: LRSchedulerT) -> SettledSums:
        """Return the sums since the last log over all ranks, and add them to the totals of the run; collective."""
        sums = self.settle(lr_scheduler)
        self._loop.interval.reset()
        self._loop.totals.add(sums.loss_sum, sums.targets, sums.tokens, sums.samples)
        return sums

    def interval_record(self, lr_scheduler: LRSchedulerT) -> dict[str, Any]:
        """Return the log record of the steps since the last log, and close the interval; collective."""
        loop, state = self._loop, self._loop.state
        loop.amp.log_scale_drop()
        sums = self.close_interval(lr_scheduler)
        norms = list(sums.norms)
        if self._leaves_out_steps:
            # One skipped step would turn the mean and the maximum into NaN or infinity.
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
                # All steps were skipped, so there is no loss to average.
                del logs["loss"]
        return logs

    def final_record(
        self, lr_scheduler: LRSchedulerT, effective_batch_size: int, total: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        """Return the final record of the run; rates count the timed steps of this process only. Collective."""
        # With logging_strategy="no" the last interval spans the full run.
        self.close_interval(lr_scheduler)
        loop, speed = self._loop, self.speed
        # On the CPU: the sum over ranks runs on a gloo group.
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
