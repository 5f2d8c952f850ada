"""Command `forgather train`: reads the configuration, then trains in this process or launches worker processes.

Launched workers run the same command again and read the same configuration.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from forgather.cli.command_line import CommandParser
from forgather.cli.errors import UsageError
from forgather.cli.launch.options import (
    LAUNCH_OPTION_NAMES,
    LAUNCH_OPTIONS,
    check_against_launcher,
    is_worker,
    join_slurm,
    num_processes_of_job,
    quiet_store,
    take_launch_options,
    was_started_by_us,
)
from forgather.cli.option_words import add_configuration_keys
from forgather.cli.process_setup import (
    make_current_directory_importable,
    reduce_fragmentation,
    share_processors,
    silence_libraries,
)
from forgather.config.trainer_kinds import TRAINERS, check_num_processes

if TYPE_CHECKING:
    from forgather.config.parser import Option
    from forgather.config.schema import Configuration

DEMO = Path(__file__).parents[2] / "config" / "demo.yaml"


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    if "-h" in words or "--help" in words:
        from forgather.config.help import help_text

        print(help_text(), end="")
        return 0
    silence_libraries()
    share_processors()
    reduce_fragmentation()
    make_current_directory_importable()
    join_slurm(take_launch_options(words)[0])
    if not is_worker():
        return _run(words)
    from forgather.ml.distributed import record_entry_point

    # Records the exception in torchelastic's error file, where the launcher reads which rank failed first, and why.
    return record_entry_point(_run)(words) or 0


def parser() -> CommandParser:
    """Return a parser that lists the options, for completion. `run` parses them itself: any key may have a mapping."""
    parser = CommandParser("forgather train", "Train a model.")
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="configuration file; without it: the demo")
    parser.add_argument("--trainer", choices=TRAINERS, help="strategy of the trainer")
    for option, text in LAUNCH_OPTIONS.items():
        parser.add_argument(option, metavar="VALUE", help=text)
    parser.add_argument("--print_config", action="store_true", help="print the full configuration as YAML, and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_configuration_keys(parser)
    return parser


def read_configuration(words: Sequence[str]) -> "tuple[Configuration, bool]":
    """Return the configuration from file and options, and whether it is the demo."""
    from forgather.config.parser import ConfigurationParser, split_options, trainer_kind

    files, given = split_options(words)
    if len(files) > 1:
        raise UsageError(f"Expected one configuration file, got {', '.join(files)}. Options begin with two dashes.")
    path, name = (os.path.expanduser(files[0]), files[0]) if files else (str(DEMO), DEMO.name)
    options = [_in_full(option) for option in given]
    # The keys of `args` depend on the trainer, so its kind must be known before anything else is parsed.
    parser = ConfigurationParser(trainer_kind(path, options), LAUNCH_OPTION_NAMES)
    parser.read_file(path, name)
    # Options override the file, so they come second.
    for option in options:
        parser.override(option)
    return parser.configuration(), not files


def _run(words: Sequence[str]) -> int:
    """Train in this process, or launch processes that train."""
    options, other_words = take_launch_options(words)
    if options.devices is not None:
        # The variable has no effect once torch has counted the devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = options.devices
    is_launcher = options.needs_launcher and not is_worker()
    # The configuration imports torch.
    with quiet_store() if is_launcher else nullcontext():
        configuration, is_demo = read_configuration([word for word in other_words if word != "--print_config"])
    is_main = int(os.environ.get("RANK", "0")) == 0
    if "--print_config" in other_words:
        from forgather.config import parser, yaml_reader

        if is_main:
            print(yaml_reader.dump(parser.to_dict(configuration)), end="")
        return 0
    if is_worker():
        check_against_launcher(options)
    # Check before processes are launched: a mistake then costs no start-up time and is reported once.
    check_num_processes(configuration.trainer.kind, num_processes_of_job(options))
    if is_demo and is_main and not was_started_by_us():
        _introduce_demo()
    if is_launcher:
        from forgather.cli.launch.agent import launch

        # Workers get the full command line, and check its launch options against the environment.
        return launch(options, ["train", *words])
    from forgather.cli.work.train import train

    return train(configuration, words if is_demo else None)


def _in_full(option: "Option") -> "Option":
    """Expand `--trainer KIND` to `--trainer.kind KIND`; a mapping stays the section."""
    from forgather.config.parser import Option

    is_kind = option.key == "trainer" and not (option.text or "").lstrip().startswith("{")
    return Option("trainer.kind", option.text) if is_kind else option


def _introduce_demo() -> None:
    """Print what the demo does, before the slow imports of libraries."""
    from rich.text import Text

    from forgather.ml.trainer.callbacks.display import get_console

    title = Text("forgather demo", style="bold")
    text = Text("a small Llama learns the source of Python's standard library")
    get_console().print(title + Text("  ") + text, soft_wrap=True)
    sys.stdout.flush()
