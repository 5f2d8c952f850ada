"""ProgressCallback: progress bars on a terminal, and one line per log record and evaluation.

In files and pipes only the lines are written. Rank 0 writes. It is one of the default callbacks.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forgather._terminal_text import printable_line
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import (
    can_draw,
    format_count,
    format_duration,
    get_console,
    planned_eval_batches,
    planned_steps,
)
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from forgather.ml.trainer.callbacks.support.progress_bars import ProgressBars

Field = tuple[str, str]
"""Label and value of a column."""


class ProgressCallback(TrainerCallback):
    """Callback that shows progress bars on a terminal, with a line above them for each log record.

    In files and pipes only the lines are written. Rank 0 writes to `console`, by default the console of `rich.print`.
    `refresh_seconds` is the minimum time between two redraws of the bars.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self, console: Console | None = None, refresh_seconds: float = 0.25) -> None:
        self._console = get_console() if console is None else console
        self.draws = True
        """Whether bars are drawn; False for lines only (`disable_tqdm`)."""
        self._refresh_seconds = refresh_seconds
        self._bars: ProgressBars | None = None
        self._pace: _Pace | None = None
        self._num_eval_batches = 0
        self._num_eval_total: int | None = None
        self._summary: Mapping[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._pace = _Pace()
        self._summary = {}
        self._num_eval_batches = 0
        if self.draws and can_draw(self._console):
            # Bars of an earlier run may be left, if an exception ended it without on_train_end.
            self._stop_bars()
            self._bars = self._new_bars()
            self._bars.start_training(state.global_step, planned_steps(state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._pace is None:
            return
        if self._pace.first_step is None:
            self._pace.start(state.global_step)
        if self._bars is not None and self._bars.is_due():
            self._show_step(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            # The final record. on_train_end prints it, below the bars.
            self._summary = dict(logs)
        elif "loss" in logs:
            self._show_record(state, logs)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: object = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._num_eval_batches == 0:
            self._begin_evaluation(state, eval_dataloader)
        self._num_eval_batches += 1
        if self._bars is not None and self._bars.is_due():
            self._bars.show_evaluation(self._num_eval_batches, self._num_eval_total)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._num_eval_batches = 0
        if self._bars is not None:
            self._bars.end_evaluation()
        self._print_line("eval", state, evaluation_fields(metrics))
        if self._bars is not None and not self._bars.is_training:
            self._stop_bars()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._num_eval_batches = 0
        if self._bars is not None:
            self._bars.end_evaluation()
            if not self._bars.is_training:
                self._stop_bars()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._bars is not None:
            # A stop request may have interrupted an evaluation, without on_evaluate.
            self._bars.end_evaluation()
            self._show_step(state)
        self._stop_bars()
        self._pace = None
        self._console.print(summary_text(state, self._summary), soft_wrap=True)

    def _begin_evaluation(self, state: TrainerState, eval_dataloader: object) -> None:
        self._num_eval_total = planned_eval_batches(state, eval_dataloader)
        if self._bars is None and self.draws and can_draw(self._console):
            self._bars = self._new_bars()
        if self._bars is not None:
            self._bars.start_evaluation(self._num_eval_total)

    def _new_bars(self) -> "ProgressBars":
        # Imported late: runs that write to files do not need rich.progress.
        from forgather.ml.trainer.callbacks.support.progress_bars import ProgressBars

        return ProgressBars(self._console, self._refresh_seconds)

    def _show_step(self, state: TrainerState) -> None:
        assert self._bars is not None
        self._bars.show_training(state.global_step, planned_steps(state), self._seconds_left(state))

    def _show_record(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        fields = record_fields(logs)
        if self._bars is not None:
            # On a narrow terminal the last metrics are cut off, so the most important come first.
            ordered = sorted(fields, key=lambda field: _BAR_ORDER.get(field[0], len(_BAR_ORDER)))
            metrics = tuple(_join(field) for field in ordered if field[0] in _BAR_ORDER)
            self._bars.set_metrics(state.global_step, planned_steps(state), metrics)
        else:
            seconds_left = self._seconds_left(state)
            fields.append(("left", "" if seconds_left is None else f"{format_duration(seconds_left):>7}"))
        self._print_line("step", state, fields)

    def _print_line(self, kind: str, state: TrainerState, fields: list[Field]) -> None:
        if self._bars is None and not self._console.is_terminal:
            # A file needs no colours, and rich's layout of a line takes longer than a step of a small model.
            _write_plain(self._console, kind, state, fields)
            return
        line = Text(f"{kind} ", style="bold cyan" if kind == "eval" else "bold")
        line.append(_aligned_step(state), style="bold")
        line.append("  epoch ", style="dim").append(f"{state.epoch:<5.2f}")
        for label, value in fields:
            if value:
                line.append_text(_styled(label, value))
        line.rstrip()
        if self._bars is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._console.print(line, no_wrap=True, overflow="ellipsis")

    def _seconds_left(self, state: TrainerState) -> float | None:
        total = planned_steps(state)
        if self._pace is None or total is None:
            return None
        return self._pace.seconds_left(state.global_step, total)

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class _Pace:
    """Mean seconds per step of this process, including evaluations. The first step, which compiles, does not count."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self._started = 0.0

    def start(self, step: int) -> None:
        self.first_step = step
        self._started = time.monotonic()

    def seconds_left(self, step: int, total: int) -> float | None:
        if self.first_step is None or step <= self.first_step:
            return None
        return (time.monotonic() - self._started) / (step - self.first_step) * max(total - step, 0)


_UNITS_AFTER = ("tok/s", "left")
_USUAL_NAMES = frozenset(
    ("epoch", "loss", "grad_norm", "max_grad_norm", "tokens", "total_tokens", "total_flos", "learning_rate")
) | {"tok_per_sec", "mfu", "peak_memory_gib", "skipped_steps"}
_BAR_ORDER = {"loss": 0, "tok/s": 1, "lr": 2}


def record_fields(logs: Mapping[str, Any]) -> list[Field]:
    """Return the columns of a log record, in a fixed order and with fixed widths."""
    fields: list[Field] = [("loss", _number(logs["loss"]))]
    if logs.get("grad_norm") is not None:
        fields.append(("grad", f"{float(logs['grad_norm']):<7.3g}"))
    if logs.get("learning_rate") is not None:
        fields.append(("lr", f"{float(logs['learning_rate']):.2e}"))
    if "mfu" in logs:
        fields.append(("mfu", f"{float(logs['mfu']):5.1%}"))
    if "peak_memory_gib" in logs:
        fields.append(("mem", f"{float(logs['peak_memory_gib']):.2f} GiB"))
    fields.extend(
        (printable_line(name), _number(value).rstrip()) for name, value in logs.items() if _was_added(name, value)
    )
    if "tok_per_sec" in logs:
        fields.append(("tok/s", f"{format_count(float(logs['tok_per_sec'])):>5}"))
    return fields


def _was_added(name: str, value: object) -> bool:
    """Return whether a callback added this number for display. Names with a slash are only for log files."""
    # `type` instead of isinstance, because bool is a subclass of int.
    return name not in _USUAL_NAMES and "/" not in name and type(value) in (int, float)


def evaluation_fields(metrics: Mapping[str, Any]) -> list[Field]:
    """Return the columns of an evaluation: loss, other metrics and run time. Rates are only in the log files."""
    fields = []
    for name, value in metrics.items():
        if name.endswith(("_runtime", "_per_second", "_tokens")) or name == "epoch":
            continue
        if isinstance(value, (int, float)):
            fields.append((printable_line(name.removeprefix("eval_")), _number(value)))
    if "eval_runtime" in metrics:
        fields.append(("in", f"{float(metrics['eval_runtime']):.1f} s"))
    return fields


def summary_text(state: TrainerState, record: Mapping[str, Any]) -> Text:
    """Return the last line of a run. A run without a final record was interrupted."""
    if not record:
        return Text("stopped ", style="bold yellow") + Text(f"at step {state.global_step}", style="bold")
    text = Text("done ", style="bold green") + Text(f"{state.global_step} steps", style="bold")
    if "train_runtime" in record:
        text += Text(f" in {format_duration(float(record['train_runtime']))}")
    if "train_loss" in record:
        text += _styled("mean loss", _number(record["train_loss"]))
    if record.get("total_tokens"):
        text += _styled("tokens", format_count(float(record["total_tokens"])))
    if record.get("tokens_per_second"):
        text += _styled("tok/s", format_count(float(record["tokens_per_second"])))
    return text


def _write_plain(console: Console, kind: str, state: TrainerState, fields: list[Field]) -> None:
    shown = [f"{value} {label}" if label in _UNITS_AFTER else f"{label} {value}" for label, value in fields if value]
    line = "  ".join([f"{kind} {_aligned_step(state)}", f"epoch {state.epoch:<5.2f}", *shown])
    console.file.write(line.rstrip() + "\n")
    console.file.flush()


def _styled(label: str, value: str) -> Text:
    if label in _UNITS_AFTER:
        return Text(f"  {value} ").append(label, style="dim")
    return Text.assemble((f"  {label} ", "dim"), value)


def _join(field: Field) -> str:
    label, value = field
    value = value.strip()
    return f"{value} {label}" if label in _UNITS_AFTER else f"{label} {value}"


def _number(value: Any) -> str:
    """Format a number with four decimals, or with an exponent if it is very small or large."""
    number = float(value)
    text = f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e4 else f"{number:.3e}"
    return f"{text:<7}"


def _aligned_step(state: TrainerState) -> str:
    total = planned_steps(state)
    if total is None:
        return f"{state.global_step:>7}"
    return f"{state.global_step:>{len(str(total))}}/{total}"
