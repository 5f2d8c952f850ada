"""Console summary at the end of a run: results, paths, and commands to try next.

Called on rank 0 by `work/train.py`.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from forgather._terminal_text import printable
from forgather.cli.launch.options import LAUNCHER_VARIABLE
from forgather.config.schema import Configuration
from forgather.ml.trainer.callbacks.display import get_console, show_row
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.trainer.trainer import Trainer


def say_finished(trainer: Trainer[Any], demo_words: Sequence[str] | None) -> None:
    """Print the results; after the demo, which was called with `demo_words`, print commands to try next."""
    output_dir = trainer.args.output_dir
    get_console().print()
    show_row("eval loss", _course_of_evaluation(trainer.state.log_history))
    show_row("saved", trainer.loop.saved_path or output_dir)
    for label, name in (("plot", "training.png"), ("log", "trainer_logs.jsonl")):
        path = os.path.join(output_dir, name)
        show_row(label, path if os.path.exists(path) else None)
    if demo_words is not None:
        _say_what_next(trainer.state.global_step, output_dir, demo_words)


def say_stopped(stop: Preempted) -> None:
    """Print how to resume after a stop request, if a checkpoint was saved."""
    if stop.checkpoint_path:
        get_console().print(f"Run the same command again to resume from step {stop.step}.", soft_wrap=True)


def say_already_finished(configuration: Configuration, step: int, demo_words: Sequence[str] | None) -> None:
    """Print that the newest checkpoint has already reached args.max_steps."""
    args = configuration.args
    text = Text("already finished ", style="bold green")
    text += Text(
        printable(f"{args.output_dir} has a checkpoint of step {step}, and args.max_steps is {args.max_steps}")
    )
    get_console().print(text, soft_wrap=True)
    if demo_words is not None:
        _say_what_next(step, args.output_dir, demo_words)
    else:
        get_console().print("Raise args.max_steps to continue, or choose another args.output_dir.", soft_wrap=True)


def _say_what_next(step: int, output_dir: str, words: Sequence[str]) -> None:
    program = program_name()
    # Remove the old value of max_steps, because a new one is appended.
    same = shlex.join([program, "train", *_without(words, "--args.max_steps")])
    suggestions = {
        "train for twice the steps": f"{same} --args.max_steps {2 * step}",
        **_suggested_processes(program, output_dir, words, 2 * step),
        "look at the run": f"{program} report {output_dir}",
        "train another model": f"{program} train --model.config.hidden_size 192 --args.output_dir demo_output_192",
        "write a configuration": f"{program} train --print_config > my.yaml",
        "and use it": f"{program} train my.yaml",
        "start over": f"rm -r {output_dir}",
    }
    console = get_console()
    console.print()
    console.print(Text("try next", style="bold"))
    width = max(len(purpose) for purpose in suggestions)
    for purpose, command in suggestions.items():
        console.print(Text(f"  {purpose:<{width}}  ") + Text(command, style="cyan"), soft_wrap=True)


def _suggested_processes(program: str, output_dir: str, words: Sequence[str], num_steps: int) -> dict[str, str]:
    """Suggest two processes in another directory after a run with one, and one process after a distributed run."""
    # A checkpoint of any trainer can be resumed in one process.
    if any(word.startswith("--trainer") for word in words):
        command = shlex.join([program, "train", "--args.output_dir", output_dir, "--args.max_steps", str(num_steps)])
        return {"continue in one process": command}
    command = f"{program} train --trainer {{kind}} --nproc 2 --args.output_dir demo_output_{{kind}}"
    return {
        "train in two processes": command.format(kind="ddp"),
        "split the model in two": command.format(kind="pipeline"),
    }


def _without(words: Sequence[str], option: str) -> list[str]:
    """Return the command line without an option and its value."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def program_name() -> str:
    """Return how to call the program from here: its name if the shell finds it, else its path."""
    # In a worker, sys.argv[0] is a module of the package; the launcher passes on the path it was called by.
    called = os.environ.get(LAUNCHER_VARIABLE, sys.argv[0])
    called = called if os.path.basename(called) == "forgather" else ""
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
