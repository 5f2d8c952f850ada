"""RunRecorder callback: writes the run record that `forgather report` draws. It is one of the default callbacks.

Rank 0 appends lines about starts, log records, evaluations, saves, generated texts, the measured pipeline step and the
end. Times in steps, memory of ranks and the pipeline step come from the trainer; the callback never communicates.
"""

import dataclasses
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from torch import nn

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks import info
from forgather.ml.trainer.callbacks.display import planned_steps
from forgather.ml.trainer.callbacks.support.record_file import Line, RecordFile, read_lines
from forgather.ml.trainer.elastic.attempt import NOTES_VARIABLE
from forgather.ml.trainer.loop.metrics import SpeedMeter
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 4000
_MOST_SAMPLES = 16
_SECRETS = ("token", "secret", "password", "key")
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "torchao")


class RunRecorder(TrainerCallback):
    """Callback that appends what happens to `<output_dir>/run_record.jsonl`.

    Unlike `trainer_logs.jsonl`, a resumed run keeps the lines of steps that it repeats. A fresh run renames the record of
    an earlier run to `run_record.previous.jsonl`. If the file cannot be written, the callback warns once.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self) -> None:
        self._file: RecordFile | None = None
        self._clock: _StepClock | None = None
        self._has_warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        trainer: object,
        **kwargs: object,
    ) -> None:
        self._file = None
        if not state.is_world_process_zero:
            return
        self._clock = _StepClock(trainer)
        try:
            self._file = RecordFile(args.output_dir)
            if state.global_step == 0 and _is_another_run(read_lines(self._file.path)):
                self._file.set_aside()
        except OSError as error:
            self._warn(error)
            return
        self._write("start", state, {**_place(), **describe_start(args, state, model, trainer)})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        trainer: object = None,
        **kwargs: object,
    ) -> None:
        if self._file is None:
            return
        facts = getattr(trainer, "rank_facts", None)
        memory = None if facts is None else facts.memory
        self._write("log", state, {**_numbers(logs), **self._busy(), **({"memory": memory} if memory else {})})
        if facts is not None and facts.schedule is not None:
            self._write("schedule", state, facts.schedule)
            facts.schedule = None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._write("evaluate", state, _numbers(metrics))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        checkpoint_path: str = "",
        trainer: Any = None,
        **kwargs: object,
    ) -> None:
        # The time in steps goes on during a background save, so it is not the time until the saved step.
        is_past = trainer is not None and trainer.state.global_step != state.global_step
        self._write("save", state, {"name": os.path.basename(checkpoint_path), **({} if is_past else self._busy())})

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        trainer: object = None,
        **kwargs: object,
    ) -> None:
        self._write("end", state, {**_reason(state, control, trainer), **self._busy()})
        self._file = None

    def add_samples(self, state: TrainerState, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Record generated texts; called by `TextgenCallback`."""
        samples = [
            {"prompt": prompt[:_MOST_CHARACTERS], "text": text[:_MOST_CHARACTERS]}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        self._write("samples", state, {"samples": samples[:_MOST_SAMPLES]})

    def _busy(self) -> dict[str, float]:
        seconds = None if self._clock is None else self._clock.seconds
        return {} if seconds is None else {"busy": round(seconds, 4)}

    def _write(self, kind: str, state: TrainerState, content: Mapping[str, object]) -> None:
        if self._file is None:
            return
        line = {"kind": kind, "time": round(time.time(), 3), "step": state.global_step}
        try:
            # The values of the record must not replace the keys of the line.
            self._file.append({**content, **line})
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        # A full disk or missing write permission must not end training.
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The run record cannot be written (%s). Training continues, but the report lacks data.", error
            )


class _StepClock:
    """Seconds of this process in training steps: time since the start without evaluations and saves."""

    def __init__(self, trainer: object) -> None:
        self._speed: SpeedMeter | None = getattr(getattr(trainer, "reporter", None), "speed", None)
        self._started = time.perf_counter()
        self._paused = 0.0 if self._speed is None else self._speed.total_paused

    @property
    def seconds(self) -> float | None:
        """None for trainers that do not measure their pauses."""
        if self._speed is None:
            return None
        return time.perf_counter() - self._started - (self._speed.total_paused - self._paused)


def describe_start(args: TrainingArguments, state: TrainerState, model: nn.Module, trainer: Any) -> Line:
    """Return what a start line tells about the run: attempt, topology, model, versions and arguments."""
    attempt = getattr(trainer, "attempt", None)
    whole = trainer.unwrapped_model() if hasattr(trainer, "unwrapped_model") else model
    mesh = getattr(trainer, "mesh", None)
    facts = {} if attempt is None else attempt.facts
    return {
        **{name: facts.get(name) for name in ("attempt", "resumed_from")},
        "max_steps": planned_steps(state),
        "world_size": getattr(state, "num_processes", 1),
        "trainer": type(trainer).__name__,
        "mesh": None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        "summary": {
            "model": info.describe_model(whole, getattr(trainer, "pipeline", None)),
            "precision": info.describe_precision(args, whole),
            "recipes": info.describe_recipes(args),
            "devices": info.describe_devices(state, whole),
            "batch": info.describe_batch(args, state, trainer),
            "steps": info.describe_steps(state, args, trainer),
        },
        "versions": _versions(),
        "args": _changed_arguments(args),
    }


def _place() -> Line:
    """Return host and processes of this start; a report looks at them to see whether the run is alive."""
    launcher = os.getppid() if NOTES_VARIABLE in os.environ else None
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher_pid": launcher,
        "process_started": process_started(os.getpid()),
    }


def process_started(pid: int) -> float | None:
    """Return when a process of this machine started, in seconds since 1970; None if it is gone or cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in parentheses, may contain spaces.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="utf-8") as file:
            uptime = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK"), 2)


def _is_another_run(lines: Sequence[Line]) -> bool:
    """Return whether a start at step 0 begins another run, instead of repeating one that died before its first save."""
    return any(line.get("kind") in ("save", "end") for line in lines)


def _reason(state: TrainerState, control: TrainerControl, trainer: Any) -> Line:
    signal_name = getattr(getattr(trainer, "feed", None), "stop_signal", None)
    if signal_name is not None and getattr(getattr(trainer, "loop", None), "is_leaving", False):
        return {"reason": "preempted", "signal": signal_name}
    if control.should_training_stop or control.should_abort_without_save:
        by = getattr(getattr(trainer, "_callback_handler", None), "stop_requested_by", None)
        return {"reason": "stopped", "by": by[0] if by else None}
    return {"reason": "finished"}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of a record; lists and texts are not drawn."""
    found: dict[str, float] = {}
    for name, value in values.items():
        number = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            found[name] = number
    return found


def _versions() -> dict[str, str]:
    from forgather import __version__

    found = {"forgather": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _changed_arguments(args: object) -> dict[str, str]:
    """Return the arguments that differ from their defaults, as text and without secrets."""
    if not dataclasses.is_dataclass(args):
        return {}
    changed: dict[str, str] = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != default and not any(word in field.name.split("_") for word in _SECRETS):
            changed[field.name] = str(value)[:_MOST_CHARACTERS]
    return changed
