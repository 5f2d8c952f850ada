"""What is said at the end of a run: what came out, where it is, and how to go on."""

import os
import shutil
import sys
from typing import Any

from rich.text import Text

from forgather.cli.configuration import Configuration
from forgather.ml.trainer.callbacks.console import get_console
from forgather.ml.trainer.signals import Preempted
from forgather.ml.trainer.trainer import Trainer

_LABEL_WIDTH = 10


def say_finished(trainer: Trainer, is_demo: bool) -> None:
    """The results, and after the demo what to try next."""
    output_dir = trainer.args.output_dir
    get_console().print()
    _row("eval loss", _course_of_evaluation(trainer.state.log_history))
    _row("saved", trainer._saved_path or output_dir)
    for label, name in (("plot", "training.png"), ("log", "trainer_logs.jsonl")):
        path = os.path.join(output_dir, name)
        _row(label, path if os.path.exists(path) else None)
    if is_demo:
        _say_what_next(trainer.state.global_step, output_dir)


def say_stopped(stop: Preempted) -> None:
    """After a stop request: that nothing is lost."""
    if stop.checkpoint_path:
        get_console().print(f"Run the same command again to go on from step {stop.step}.", soft_wrap=True)


def say_already_finished(configuration: Configuration, step: int, is_demo: bool) -> None:
    """There is nothing left to do."""
    args = configuration.args
    text = Text("already finished ", style="bold green")
    text += Text(f"{args.output_dir} has a checkpoint of step {step}, and args.max_steps is {args.max_steps}")
    get_console().print(text, soft_wrap=True)
    if is_demo:
        _say_what_next(step, args.output_dir)
    else:
        get_console().print("Raise args.max_steps to go on, or choose another args.output_dir.", soft_wrap=True)


def _say_what_next(step: int, output_dir: str) -> None:
    program = program_name()
    suggestions = {
        f"{program} train --args.max_steps {2 * step}": f"go on from step {step}",
        f"{program} train --model.config.hidden_size 192 --args.output_dir demo_output_192": "another model beside it",
        f"{program} train --print_config > my.yaml": f"a configuration of your own, for: {program} train my.yaml",
        f"rm -r {output_dir}": "start over",
    }
    console = get_console()
    console.print()
    console.print(Text("try next", style="bold"))
    for command, purpose in suggestions.items():
        console.print(Text("  ") + Text(command, style="cyan") + Text(f"  # {purpose}", style="dim"), soft_wrap=True)


def program_name() -> str:
    """How this program is called from here: by its name if the shell finds it, else by its path."""
    called = sys.argv[0] if os.path.basename(sys.argv[0]) == "forgather" else ""
    found = shutil.which("forgather")
    if not called or (found is not None and os.path.realpath(found) == os.path.realpath(called)):
        return "forgather"
    relative = os.path.relpath(called)
    return relative if len(relative) < len(called) else called


def _course_of_evaluation(history: list[dict[str, Any]]) -> str | None:
    losses = [(record["step"], record["eval_loss"]) for record in history if "eval_loss" in record]
    if not losses:
        return None
    (first_step, first), (last_step, last) = losses[0], losses[-1]
    if first_step == last_step:
        return f"{last:.4f} at step {last_step}"
    return f"{first:.4f} at step {first_step}, {last:.4f} at step {last_step}"


def _row(label: str, text: str | None) -> None:
    if text is not None:
        get_console().print(
            Text(f"{label:<{_LABEL_WIDTH}} ", style="bold") + Text(text, style="default"), soft_wrap=True
        )
