"""DefaultMetrics callback: throughput in tokens per second, and model FLOPs utilisation (MFU).

Only training steps are timed: evaluation, saving and warm-up do not count. It is one of the default callbacks.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forgather.ml.checkpoint.state.state_schema import Schema, count, optional
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.mfu import attention_flops, peak_of_run
from forgather.ml.trainer.callbacks.support.state_checks import check_callback_state
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState
from forgather.ml.utils import count_parameters, flops_per_token

_STATE = Schema({"last_log_step": optional(count)})


class DefaultMetrics(TrainerCallback):
    """Callback that adds `tok_per_sec` to each log record, and `mfu` on accelerators with a known peak.

    `peak_flops` is the peak FLOP/s of one device at the precision of training. Its default is the entry of the device in
    `support.mfu`. Time in evaluation and saving does not count. The first `args.speed_metrics_start_step` steps of a run,
    which compile and warm up, do not count either.

    The FLOPs of a token are 6 per weight, without embedding tables, plus the attention scores (`attention_flops`).
    """

    changes_control = False

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(
                f"peak_flops={peak_flops} cannot be used. Set it to the peak FLOP/s of one device, such as 312e12 for an "
                "A100 in bfloat16, or to None to omit mfu."
            )
        self._peak_flops = self._given_peak = peak_flops
        self._flops_per_token: float | None = None
        self._steps_to_skip = 0
        self._last_log_step: int | None = None
        self._mark = 0.0
        self._seconds = 0.0
        self._num_timed_steps = 0
        self._is_paused = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        self._peak_flops = self._given_peak
        if self._given_peak is None and model is not None:
            self._peak_flops = peak_of_run(args, torch.device(getattr(args, "device", None) or "cpu"), model)
        self._steps_to_skip = getattr(args, "speed_metrics_start_step", 0)
        # A loaded step continues an open log interval. A later step belongs to an earlier run with this callback.
        if self._last_log_step is None or self._last_log_step > state.global_step:
            self._last_log_step = state.global_step
        self._start_interval(time.perf_counter())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._is_paused:
            self._is_paused = False
            self._mark = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now = time.perf_counter()
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
        else:
            self._num_timed_steps += 1
            self._seconds += now - self._mark
        self._mark = now

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Paused until the next step begins, because later callbacks may spend time on this event, such as on samples.
        self._is_paused = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._is_paused = True

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        model: nn.Module,
        trainer: Any = None,
        **kwargs: object,
    ) -> None:
        now = time.perf_counter()
        if self._num_timed_steps:
            # Steps only queue kernels. Reading the loss for this record has waited for them, so that wait counts too.
            self._seconds += 0.0 if self._is_paused else now - self._mark
            self._add_speed(state, logs)
            if self._peak_flops is not None and "tok_per_sec" in logs:
                # In a pipeline, `model` is only the part of this rank.
                whole = trainer._whole_model() if hasattr(trainer, "_whole_model") else model
                flops = self._get_flops_per_token(logs, model) + attention_flops(whole, _mean_length(trainer))
                logs["mfu"] = logs["tok_per_sec"] * flops / (self._peak_flops * getattr(state, "num_processes", 1))
        self._last_log_step = state.global_step
        self._start_interval(now)

    def state_dict(self) -> dict[str, Any]:
        return {"last_log_step": self._last_log_step}

    def check_state_dict(self, state_dict: object) -> None:
        check_callback_state(self, _STATE, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._last_log_step = state_dict["last_log_step"]

    def _start_interval(self, now: float) -> None:
        self._mark = now
        self._seconds = 0.0
        self._num_timed_steps = 0

    def _add_speed(self, state: TrainerState, logs: dict[str, Any]) -> None:
        if self._seconds <= 0 or "tokens" not in logs:
            return
        # `tokens` covers the full log interval. It may include warm-up steps, or steps from before a resume.
        num_steps = max(state.global_step - (self._last_log_step or 0), self._num_timed_steps)
        timed_tokens = logs["tokens"] * self._num_timed_steps / num_steps
        logs["tok_per_sec"] = timed_tokens / self._seconds

    def _get_flops_per_token(self, logs: dict[str, Any], model: nn.Module) -> float:
        # The trainer's totals are right in a pipeline too, where `model` is only this rank's stage.
        if logs.get("total_flos") and logs.get("total_tokens"):
            return float(logs["total_flos"] / logs["total_tokens"])
        if self._flops_per_token is None:
            self._flops_per_token = float(flops_per_token(count_parameters(model)))
        return self._flops_per_token


def _mean_length(trainer: Any) -> float:
    """Return the mean number of tokens per sample in the run so far; 0 for trainers that do not count them."""
    totals = getattr(getattr(trainer, "loop", None), "totals", None)
    return totals.tokens / totals.samples if totals is not None and totals.samples else 0.0
