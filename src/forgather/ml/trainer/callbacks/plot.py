"""PlotCallback: draws loss, evaluation loss, learning rate and throughput to a PNG file.

Rank 0 draws with matplotlib. The curves are checkpointed, so that the plot of a resumed run covers the full run.
"""

import bisect
import io
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forgather._extras import MissingPackageError, is_installed, missing_message
from forgather.ml.checkpoint.files.durable import make_directories, replace_file
from forgather.ml.checkpoint.state.state_schema import Schema, Violation, count, list_of, number
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import format_count
from forgather.ml.trainer.callbacks.support.state_checks import check_callback_state
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_PACKAGE = "matplotlib"
_MAX_POINTS = 4000
_SMOOTHED_SHARE = 0.03
_BLUE, _LIGHT_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#1f5fa8", "#a9c6e8", "#d9661f", "#2f855a", "#6b46a8", "#4a5568"

_POINTS = Schema({"steps": list_of(count), "values": list_of(number)})


def _curve(state: Any) -> None:
    _POINTS(state)
    num_steps, num_values = len(state["steps"]), len(state["values"])
    if num_steps != num_values or num_steps > _MAX_POINTS:
        raise Violation(
            f"a list of {min(num_steps, _MAX_POINTS)}, one value for each step", state["values"], ["values"]
        )


_NAMES = ("loss", "eval_loss", "learning_rate", "tok_per_sec")
_STATE = Schema(dict.fromkeys(_NAMES, _curve), may_lack=_NAMES)


class Curve:
    """Values by step. A curve that reaches its maximum length keeps every second point, which bounds its cost."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []

    def add(self, step: int, value: float) -> None:
        if len(self.steps) >= _MAX_POINTS:
            del self.steps[1::2], self.values[1::2]
        self.steps.append(step)
        self.values.append(value)

    def drop_after(self, step: int) -> None:
        num_kept = bisect.bisect_right(self.steps, step)
        del self.steps[num_kept:], self.values[num_kept:]


class PlotCallback(TrainerCallback):
    """Callback that draws loss, evaluation loss, learning rate and throughput to `<output_dir>/training.png`.

    It draws at log records, at most every `min_seconds` seconds, and at the end. Drawing takes at most two percent of
    the time. The file is replaced by an atomic rename, so that viewers never see an incomplete image. Without
    matplotlib it logs one warning and draws nothing. The curves are still checkpointed.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self, file_name: str = "training.png", min_seconds: float = 5.0) -> None:
        self._file_name = file_name
        self._min_seconds = min_seconds
        self._next_drawing = 0.0
        self._draws = True
        self._curves: dict[str, Curve] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not self._curves:
            # A run that was started without this callback: its log history still has the values.
            for record in state.log_history:
                self._add(record.get("step", 0), {name: _number(record.get(name)) for name in _NAMES})
        # Steps after the checkpoint are repeated. Their points would make the curve run backwards.
        for curve in self._curves.values():
            curve.drop_after(state.global_step)
        self._draws = state.is_world_process_zero and self._has_matplotlib()
        if self._draws:
            # The first drawing imports matplotlib and searches fonts. Spend that second now, not between two steps.
            draw_png(self._curves)
            self._next_drawing = time.monotonic() + self._min_seconds

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        if "loss" in logs:
            self._add(state.global_step, {name: value for name, value in logs.items() if name != "eval_loss"})
        if self._draws and state.is_world_process_zero and time.monotonic() >= self._next_drawing:
            self._draw(args)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._add(state.global_step, {"eval_loss": metrics.get("eval_loss")})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._draws and state.is_world_process_zero:
            self._draw(args)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"steps": list(curve.steps), "values": list(curve.values)} for name, curve in self._curves.items()
        }

    def check_state_dict(self, state_dict: object) -> None:
        check_callback_state(self, _STATE, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._curves = {}
        for name, stored in _STATE.known(state_dict).items():
            curve = self._curves[name] = Curve()
            curve.steps, curve.values = list(stored["steps"]), list(stored["values"])

    def _add(self, step: int, record: Mapping[str, Any]) -> None:
        for name in _NAMES:
            if record.get(name) is not None:
                self._curves.setdefault(name, Curve()).add(step, float(record[name]))

    def _has_matplotlib(self) -> bool:
        if is_installed(_PACKAGE):
            return True
        # A missing plot is no reason to refuse training: the same values are in the log.
        logger.warning("%s is not drawn. %s.", self._file_name, missing_message("PlotCallback", _PACKAGE))
        return False

    def _draw(self, args: TrainingArguments) -> None:
        started = time.monotonic()
        make_directories(args.output_dir)
        replace_file(os.path.join(args.output_dir, self._file_name), draw_png(self._curves))
        now = time.monotonic()
        # A pause of 50 times the drawing time limits drawing to two percent of the run.
        self._next_drawing = now + max(self._min_seconds, 50 * (now - started))


def _number(value: Any) -> float | None:
    """Convert a value of a checkpointed record to a number; None if that is impossible."""
    # Users may log any type under these names.
    try:
        return None if value is None else float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None


def draw_png(curves: Mapping[str, Curve], marks: Sequence[tuple[int, str]] = ()) -> bytes:
    """Draw the curves and return the PNG file. `marks` are steps with events, such as (120, "restart")."""
    # No pyplot: its global state (current figure, backend) belongs to the user.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise MissingPackageError(f"{missing_message('A plot', _PACKAGE)}.") from missing

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    _draw_panels(figure, curves)
    _draw_marks(figure.axes[0], marks)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _draw_panels(figure: "Figure", curves: Mapping[str, Curve]) -> None:
    has_norm = "grad_norm" in curves
    grid = figure.add_gridspec(2, 3 if has_norm else 2, height_ratios=[2.2, 1])
    loss_axes = figure.add_subplot(grid[0, :])
    _draw_loss(loss_axes, curves.get("loss", Curve()), curves.get("eval_loss", Curve()))
    _draw_single(figure.add_subplot(grid[1, 0], sharex=loss_axes), "Learning rate", curves.get("learning_rate"), _GREEN)
    throughput = figure.add_subplot(grid[1, 1], sharex=loss_axes)
    _draw_single(throughput, "Tokens per second", curves.get("tok_per_sec"), _PURPLE)
    throughput.yaxis.set_major_formatter(lambda value, _: format_count(value))
    throughput.set_ylim(bottom=0)
    if has_norm:
        _draw_single(figure.add_subplot(grid[1, 2], sharex=loss_axes), "Gradient norm", curves["grad_norm"], _ORANGE)


def _draw_marks(axes: "Axes", marks: Sequence[tuple[int, str]]) -> None:
    for step, kind in marks:
        axes.axvline(step, color=_GREY, linewidth=1, linestyle=":")
        axes.annotate(
            kind,
            (step, 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=8,
            color=_GREY,
            ha="right",
            va="top",
        )


def _draw_loss(axes: "Axes", train: Curve, evaluation: Curve) -> None:
    _style(axes, "Loss")
    axes.plot(train.steps, train.values, color=_LIGHT_BLUE, linewidth=1, marker=_marker(train), label="training")
    axes.plot(train.steps, smooth(train.values), color=_BLUE, linewidth=2, label="training, smoothed")
    axes.plot(
        evaluation.steps, evaluation.values, color=_ORANGE, linewidth=1.5, marker="o", markersize=5, label="evaluation"
    )
    axes.legend(frameon=False)


def _draw_single(axes: "Axes", title: str, curve: Curve | None, color: str) -> None:
    _style(axes, title)
    if curve is None:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=_GREY)
        return
    axes.plot(curve.steps, curve.values, color=color, linewidth=1.5, marker=_marker(curve))


def _marker(curve: Curve) -> str:
    """Return a marker for a curve of a single point, which would be invisible as a line."""
    return "o" if len(curve.steps) == 1 else ""


def _style(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_GREY)
    axes.set_xlabel("step", color=_GREY)
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#a0aec0")
    axes.tick_params(colors=_GREY)


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving average. Its width shrinks near the ends. Short curves are not smoothed."""
    # Centred, because an exponential average would lag behind the curve.
    num_values = len(values)
    width = round(_SMOOTHED_SHARE * num_values)
    smoothed = []
    for position in range(num_values):
        reach = min(width, position, num_values - 1 - position)
        # One NaN must not erase all of its neighbours.
        near = [value for value in values[position - reach : position + reach + 1] if math.isfinite(value)]
        smoothed.append(sum(near) / len(near) if near else math.nan)
    return smoothed
