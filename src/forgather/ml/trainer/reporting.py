"""The numbers of a run: where it is, what is logged, and what it comes to in the end."""

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.loading.epoch_loader import name_of
from forgather.ml.trainer.loop.metrics import (
    IntervalMetrics,
    RunTotals,
    SettledSums,
    SpeedMeter,
    root_mean_square,
)
from forgather.ml.trainer.loop.nonfinite import GradientFinding, GradientWatch, LateFlag, gradient_error
from forgather.ml.trainer.loop.progress import TrainerProgress
from forgather.ml.trainer.loop.target_watch import TargetWatch
from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.preparation import PreparedTrainer
from forgather.ml.trainer.trainer_types import TrainerControl
from forgather.ml.trainer.trainer_types import TrainerState as BaseTrainerState
from forgather.ml.utils import ModelParameterStats, count_parameters, flops_per_token

logger = logging.getLogger(__name__)

_SCHEDULES_WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")


@dataclass(kw_only=True)
class TrainerState(BaseTrainerState):
    """Adds what the arithmetic of batches needs."""

    num_processes: int = 1
    epoch_train_steps: int = 0
    """Optimizer steps per epoch."""


class ReportingTrainer(PreparedTrainer):
    """Keeps the state of training and logs it."""

    def _init_state(self) -> None:
        """Counters at zero; a checkpoint sets them to where training was."""
        args, loader = self.args, self.train_dataloader
        steps_per_epoch = self._steps_per_epoch() if loader is not None else 0
        if loader is not None and self.env.rank == 0:
            self._warn_of_unknown_end()
        self.state = TrainerState(
            logging_steps=args.logging_steps,
            eval_steps=args.eval_steps,
            save_steps=args.save_steps,
            train_batch_size=self._train_batch_size(),
            max_steps=self._num_steps if loader is not None else 0,
            num_train_epochs=args.num_train_epochs,
            max_eval_steps=args.max_eval_steps,
            is_local_process_zero=self.env.local_rank == 0,
            is_world_process_zero=self.env.rank == 0,
            num_processes=self.env.world_size,
            epoch_train_steps=max(steps_per_epoch, 1),
        )
        self.control = TrainerControl()
        self._watch = GradientWatch(args.nonfinite_grad, self.amp.has_loss_scale)
        self._left_out: LateFlag | None = None
        self._skips_updates = args.nonfinite_grad == "skip" and not self.amp.has_loss_scale
        self._interval, self._totals = IntervalMetrics(self._leaves_out_steps), RunTotals()
        self._speed = SpeedMeter(args.speed_metrics_start_step)
        self._flops_per_token = flops_per_token(self._count_parameters())
        self._evaluated_step = -1
        self._eval_metrics: dict[str, Any] | None = None
        self._evaluation_is_pending = False
        self._best_saved_metric: float | None = None
        self._saved_step = -1
        self._saved_path = ""
        # The last step whose save the settings or a callback asked for; other saves follow stop requests.
        self._scheduled_step = -1
        self._is_leaving = False
        self._resumed_in_epoch = False
        self._progress = TrainerProgress(self)
        self._target_watch = TargetWatch()
        self._log_when = _when(args.logging_strategy, args.logging_steps)
        self._evaluate_when = _when(args.eval_strategy, args.eval_steps, args.eval_delay)
        self._save_when = _when(args.save_strategy, args.save_steps)
        self._update_context()

    def _warn_of_unknown_end(self) -> None:
        """Say that the number of steps is a guess, or unlimited: a schedule that falls over it would not fall."""
        args = self.args
        if args.max_steps >= 0:
            return
        has_schedule = self._given_scheduler is None and self._lr_scheduler_factory is None
        falls = has_schedule and args.lr_scheduler_type not in _SCHEDULES_WITHOUT_END
        assumed = MinimalTrainingArguments.epoch_train_steps
        if args.num_train_epochs < 0:
            if falls:
                logger.warning(
                    "num_train_epochs=%s and max_steps=-1 set no end to training, so the learning rate of lr_scheduler_type=%r "
                    "never falls. Set max_steps, or lr_scheduler_type='constant'.",
                    *(args.num_train_epochs, args.lr_scheduler_type),
                )
        elif self.train_dataloader.num_batches is None and args.epoch_train_steps == assumed:
            dataset = getattr(self.train_dataloader, "dataset", None)
            schedule = (
                f"the learning rate of lr_scheduler_type={args.lr_scheduler_type!r} falls over that many, and hardly "
            )
            logger.warning(
                "The training data (%s) have no length, so an epoch is taken to have epoch_train_steps=%d steps%s. Set "
                "max_steps to the number of steps to train, or epoch_train_steps to those of an epoch.",
                name_of(self.train_dataloader if dataset is None else dataset),
                assumed,
                f": {schedule}at all if the data end sooner" if falls else "",
            )

    def _train_batch_size(self) -> int:
        """Samples of a batch: a ready loader has its own number."""
        if isinstance(self.train_dataset, DataLoader):
            for owner in (self.train_dataset, self.train_dataset.batch_sampler):
                size = getattr(owner, "batch_size", None)
                if isinstance(size, int):
                    return size
        return self.args.per_device_train_batch_size

    def _count_parameters(self) -> ModelParameterStats:
        """How large the whole model is, on however many ranks."""
        return count_parameters(self.unwrapped_model())

    def _update_context(self) -> None:
        """What every callback is told, as it is now."""
        self._callback_handler.context = {
            "args": self.args,
            "state": self.state,
            "control": self.control,
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self,
        }

    def _log_interval(self) -> None:
        """Log what happened since the last log; here, and only here, the device is waited for."""
        self.control.should_log = False
        if self._interval.num_steps == 0:
            return
        self.amp.log_scale_drop()
        sums = self._close_interval()
        norms = list(sums.norms)
        if self._leaves_out_steps:
            # The norm of a step that was left out says nothing.
            norms = [norm for norm in norms if math.isfinite(norm)]
        logs = {
            "epoch": self.state.epoch,
            "loss": sums.loss_sum / sums.targets if sums.targets else 0.0,
            "grad_norm": root_mean_square(norms),
            "max_grad_norm": max(norms, default=None),
            "tokens": sums.tokens,
            "total_tokens": self._totals.tokens,
            "total_flos": self.state.total_flos,
            "learning_rate": self.lr_scheduler.get_last_lr()[0],
        }
        if len(norms) < len(sums.norms):
            logs["skipped_steps"] = len(sums.norms) - len(norms)
            if not norms:
                # All steps were left out: there is no loss that a mean could be made of.
                del logs["loss"]
        peak_memory = self._distributed_peak_mem()
        if peak_memory is not None:
            logs["peak_mem_allocated"] = peak_memory
        self._dispatch("on_log_step", logs=logs)
        self.log(logs)
        self._settle_requests("log")

    def _close_interval(self) -> SettledSums:
        """The sums over all ranks since the last log, which from now on are part of the run's totals."""
        sums = self._settle_interval()
        self._interval.reset()
        self._totals.add(sums.loss_sum, sums.targets, sums.tokens, sums.samples)
        return sums

    def _settle_interval(self) -> SettledSums:
        """Let the counters be those of all ranks; a checkpoint is to hold no others. Stops a run that must not go on."""
        num_known = self._interval.num_settled_norms
        sums = self._interval.settle(self._distributed_sums, self._distributed_norms)
        self._target_watch.note_interval(sums.num_steps, sums.targets)
        self.state.num_input_tokens_seen = self._totals.tokens + sums.tokens
        self.state.total_flos = self.state.num_input_tokens_seen * self._flops_per_token
        self._settle_schedule()
        bad_step = self._watch.judge(sums.norms[num_known:], self.state.global_step)
        if bad_step is not None:
            raise gradient_error(
                bad_step,
                self._watch.limit,
                self.amp.has_loss_scale,
                self._findings_of_ranks(
                    self._watch.finding(bad_step, self._names_of_parameters(), self._own_finding())
                ),
            )
        return sums

    def _settle_schedule(self) -> None:
        """Let the schedule go on to the next step, which waits for the last one: GradScaler may have left it out."""
        left_out, self._left_out = self._left_out, None
        if left_out is not None and not left_out.wait():
            self.lr_scheduler.step()

    @property
    def _leaves_out_steps(self) -> bool:
        return self.amp.has_loss_scale or self._skips_updates

    def _gradients_look_bad(self) -> bool:
        """Whether numbers should be settled now, because a norm is not finite; the same on every rank."""
        return self._watch.has_news

    def _own_finding(self) -> GradientFinding:
        checkpoint = None
        if self.checkpoint_manager is not None:
            # Other ranks wait for this one, and the error that is under way matters more.
            with contextlib.suppress(OSError, CheckpointError):
                checkpoint = self.checkpoint_manager.newest_sound_checkpoint()
        return GradientFinding(self.env.rank, checkpoint=checkpoint)

    def _names_of_parameters(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self._named_parameters()}

    def _findings_of_ranks(self, own: GradientFinding) -> list[GradientFinding]:
        """What all ranks know of a step; each of them raises the same error."""
        return [own]

    def _final_metrics(self) -> dict[str, Any]:
        """The record of the whole run; rates count the timed steps of this process only."""
        # Without logging there is an interval left that is as long as the run.
        self._close_interval()
        speed, ranks = self._speed, self._num_data_parallel_ranks()
        timed = torch.tensor([speed.tokens, speed.samples], dtype=torch.int64, device="cpu")
        tokens, samples = self._distributed_tokens(timed).tolist()
        batch_size = self._train_batch_size() * self.args.gradient_accumulation_steps * ranks
        return {
            "train_runtime": speed.runtime,
            "train_samples": self._totals.samples,
            "step": self.state.global_step,
            "train_samples_per_second": speed.rate(samples),
            "train_steps_per_second": speed.rate(speed.num_steps),
            "epoch": self.state.epoch,
            "effective_batch_size": batch_size,
            "total_tokens": self._totals.tokens,
            "tokens_per_second": speed.rate(tokens),
            "total_flops": self.state.total_flos,
            "flops_per_second": speed.rate(tokens * self._flops_per_token),
            "train_loss": self._totals.loss,
        }

    def _num_data_parallel_ranks(self) -> int:
        return 1

    def _distributed_loss(self, losses: Tensor) -> Tensor:
        """Shares of losses, each summed over all data-parallel ranks."""
        return losses

    def _distributed_tokens(self, tokens: Tensor) -> Tensor:
        """Counts, each summed over all data-parallel ranks."""
        return tokens

    def _distributed_sums(self, sums: Tensor) -> Tensor:
        """Losses (the first row), tokens and samples of steps, summed over all data-parallel ranks."""
        return torch.stack([self._distributed_loss(sums[0]), *self._distributed_tokens(sums[1:])])

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        """Norms of gradients, which are the same on every rank unless a strategy lets ranks step on their own."""
        return norms

    def _distributed_peak_mem(self) -> list[int] | None:
        """Peak memory of each rank's accelerator, None on the CPU."""
        return None if self.device.type == "cpu" else [torch.accelerator.max_memory_allocated(self.device)]

    def _settle_requests(self, occasion: str = "epoch") -> None:
        """Make what callbacks have asked for the same on every rank; one device has nothing to settle.

        The occasions "step" and "log" (a log, an evaluation, a save) are frequent, and most callbacks ask for nothing then.
        """

    def _stop_requested(self) -> str | None:
        """The name of the signal that asked this job to stop."""
        return self._signals.received if self._signals is not None else None


def _when(strategy: str, period: int, first_step: int = 0) -> PeriodicFunction:
    """The steps at which something is due; what goes by epochs is done where they end."""
    return PeriodicFunction(0, strategy if strategy == "steps" else "no", period, 1, first_step)
