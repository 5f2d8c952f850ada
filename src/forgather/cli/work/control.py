"""Work of `forgather control`: sends the request and prints the answer."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable

from forgather._terminal_text import printable, printable_line
from forgather.cli.command_line import DONE, FAILED
from forgather.cli.errors import UsageError, complain
from forgather.cli.output import note, print_json, show_line, show_table
from forgather.ml.trainer.callbacks.display import can_draw, format_duration, get_console, show_row
from forgather.tools.control import Control, ControlError, NoRunningJobError, RefusedError, Status, connect

_SLOW_STEP_SECONDS = 30.0


def control(options: argparse.Namespace) -> int:
    """Send the request of the command line; returns the exit code."""
    requests: dict[str, Callable[[Control, argparse.Namespace], int]] = {
        "status": _status,
        "save": _save,
        "evaluate": _evaluate,
        "stop": _end,
        "abort": _end,
        "stacks": _stacks,
        "set": _set,
    }
    try:
        job = connect(options.output_dir, timeout=options.timeout, note=note)
        return requests[options.request](job, options)
    except NotADirectoryError as error:
        raise UsageError(str(error)) from None
    except RefusedError as error:
        raise UsageError(str(error)) from None
    except NoRunningJobError as error:
        complain(str(error) + _newest_checkpoint(options.output_dir))
    except ControlError as error:
        complain(str(error))
    return FAILED


def _newest_checkpoint(output_dir: str) -> str:
    """Return a sentence about the newest checkpoint in the directory, or nothing."""
    from forgather.ml.checkpoint.errors import CheckpointError
    from forgather.ml.finalize import resolve_checkpoint

    try:
        return f" The newest checkpoint is {resolve_checkpoint(output_dir)}."
    except (CheckpointError, OSError, ValueError):
        return ""


# --- requests


def _status(job: Control, options: argparse.Namespace) -> int:
    if options.watch is not None:
        return _watch(job, options.watch)
    status = job.status()
    if options.json:
        print_json("control.status/1", dataclasses.asdict(status))
    else:
        _show_status(status)
    return DONE


def _save(job: Control, options: argparse.Namespace) -> int:
    saved = job.save(wait=not options.no_wait)
    if options.json:
        print_json("control.save/1", {"queued": True} if saved is None else dataclasses.asdict(saved))
    elif saved is None:
        print("queued: the job saves a checkpoint after its current step")
    else:
        show_line(saved.checkpoint)
    return DONE


def _evaluate(job: Control, options: argparse.Namespace) -> int:
    found = job.evaluate()
    if options.json:
        print_json("control.evaluate/1", dataclasses.asdict(found))
        return DONE
    show_row("step", str(found.step))
    for name, value in found.metrics.items():
        show_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    return DONE


def _end(job: Control, options: argparse.Namespace) -> int:
    ended = (job.stop if options.request == "stop" else job.abort)(wait=not options.no_wait)
    if options.json:
        content = {"queued": True} if ended is None else dataclasses.asdict(ended)
        print_json(f"control.{options.request}/1", content)
    elif ended is None:
        print("queued: the job ends after its current step")
    elif options.request == "stop":
        show_line(f"stopped at step {ended.step}, saved {ended.checkpoint or 'nothing'}")
    else:
        newest = f"the newest checkpoint is {ended.checkpoint}" if ended.checkpoint else "there is no checkpoint"
        show_line(f"aborted at step {ended.step}, without saving; {newest}")
    return DONE


def _stacks(job: Control, options: argparse.Namespace) -> int:
    stacks = job.stacks()
    if options.json:
        print_json("control.stacks/1", {"stacks": stacks})
        return DONE
    for rank, text in stacks.items():
        print(f"=== rank {rank} ===\n{printable(text).rstrip()}\n")
    return DONE


def _set(job: Control, options: argparse.Namespace) -> int:
    values = dict(word.split("=", 1) for word in options.settings)
    changes = job.set_all(values)
    if options.json:
        print_json("control.set/1", {"changes": [dataclasses.asdict(change) for change in changes]})
        return DONE
    for change in changes:
        show_line(f"{change.name} {change.before} -> {change.after}, from step {change.step + 1} on")
    return DONE


# --- status


def _show_status(status: Status) -> None:
    show_row("job", f"{status.trainer}, {_ranks(status.world_size)}, pid {status.pid} on {status.host}")
    show_row("running", f"for {_duration(status.uptime)}, in {status.phase}")
    ago = f", the last one {_duration(status.seconds_since_step)} ago" if status.step else ""
    show_row("step", f"{_steps(status)}{ago}")
    show_row("epoch", f"{status.epoch:.2f}")
    show_row("speed", _speed(status))
    show_row("loss", _loss(status.loss, status.loss_step))
    show_row("eval loss", _loss(status.eval_loss, status.eval_step))
    show_row("checkpoint", (status.checkpoint or "none") + (", saving another" if status.background_save else ""))
    rows = [
        (one.rank, one.host, one.pid, one.step, "stopped (SIGSTOP)" if one.stopped else one.phase, _age(one))
        for one in status.ranks
    ]
    if len(rows) > 1:
        show_table(("rank", "host", "pid", "step", "phase", "quiet"), rows, numeric=("rank", "pid", "step", "quiet"))


def _age(rank: object) -> str:
    seconds = getattr(rank, "seconds_without_progress", None)
    return "" if seconds is None else _duration(seconds)


def _watch(job: Control, period: float) -> int:
    """Show one line until the run ends; on terminals it is updated in place."""
    in_place = can_draw(get_console())
    last: Status | None = None
    while True:
        try:
            last = job.status()
        except NoRunningJobError:
            if last is None:
                raise
            print(f"{chr(10) if in_place else ''}the run has ended, last seen at step {_steps(last)}")
            return DONE
        line = printable_line(_line(last))
        if in_place:
            sys.stdout.write("\r" + line[: get_console().width - 1].ljust(get_console().width - 1))
        else:
            print(line)
        sys.stdout.flush()
        time.sleep(period)


def _line(status: Status) -> str:
    parts = [f"step {_steps(status)}", f"epoch {status.epoch:.2f}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.eval_loss is not None:
        parts.append(f"eval loss {status.eval_loss:.4f}")
    if (speed := _speed(status)) is not None:
        parts.append(speed)
    parts.append(status.phase)
    if status.seconds_since_step > _SLOW_STEP_SECONDS:
        parts.append(f"last step {_duration(status.seconds_since_step)} ago")
    return "  ".join(parts)


def _steps(status: Status) -> str:
    return f"{status.step}" if status.max_steps is None else f"{status.step} of {status.max_steps}"


def _speed(status: Status) -> str | None:
    if status.steps_per_second is None:
        return None
    left = "" if status.seconds_left is None else f", {_duration(status.seconds_left)} left"
    return f"{status.steps_per_second:.3g} steps/s{left}"


def _loss(loss: float | None, step: int | None) -> str | None:
    return None if loss is None else f"{loss:.4f} at step {step}"


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    return f"{int(seconds)} s" if seconds < 60 else format_duration(seconds)
