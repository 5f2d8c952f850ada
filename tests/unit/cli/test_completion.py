"""`forgather completion`: the scripts complete in real shells."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from forgather.cli.completion import WRITERS
from forgather.cli.completion.specs import CommandSpec, command_specs
from forgather.cli.completion.specs import _specs as specs_of
from forgather.cli.main import COMMANDS
from tests.unit.cli.program import call, spawn
from tests.unit.cli.test_main import _REPORT_IMPORTS

_IN_BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _forgather; printf '%s\\n' "${COMPREPLY[@]}"
"""
_IN_ZSH = """\
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "autoload -Uz compinit; compinit -u -D; source $1; bindkey '^I' complete-word; PROMPT=; echo REA''DY"
zpty -r -m shell seen '*READY*' || exit 1
zpty -n -w shell "$2"$'\\t'
zpty -r -m shell seen "*$3*" && print found
"""
NESTED = "store"


def nested_parser() -> argparse.ArgumentParser:
    """Return a parser with a path before its sub-commands, like `forgather control DIR save`."""
    parser = argparse.ArgumentParser(prog="forgather store")
    parser.add_argument("folder", metavar="OUTPUT_DIR")
    commands = parser.add_subparsers()
    listing = commands.add_parser("list", help="list what is there")
    listing.add_argument("--sort", choices=("name", "it's"), help="order: 'name' or $HOME")
    listing.add_argument("--timeout", metavar="TIMEOUT")
    commands.add_parser("verify").add_argument("files", metavar="FILE", nargs="*")
    return parser


@pytest.fixture(scope="module")
def specs() -> list[CommandSpec]:
    found = command_specs({name: (command.module, command.summary) for name, command in COMMANDS.items()})
    return [*found, *specs_of(nested_parser(), (NESTED,), "a command with sub-commands")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run one.yaml").touch()
    (tmp_path / "out").mkdir()
    return tmp_path


def script_for(shell: str, specs: list[CommandSpec], folder: Path) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder.parent / f"completion.{shell}"
    path.write_text(WRITERS[shell](specs))
    return str(path)


def run_shell(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "TERM": "dumb"})
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


CASES = [
    ((("evaluate",), "ev")),
    ((("--args.max_steps",), "train --args.max_st")),
    ((("single", "ddp", "fsdp2", "accelerate", "pipeline", "hybrid"), "train --trainer ")),
    ((("--greedy",), "generate out --gr")),
    ((("--checkpoint",), "evaluate out --check")),
    ((("--max-restarts",), "train --max-r")),
    ((("bash", "zsh", "fish"), "completion ")),
    ((("--set", "--scale"), "checkpoint modify out --s")),
    ((("ls",), "checkpoint l")),
    ((("--top",), "checkpoint diff out out --t")),
    ((("status", "stop", "stacks"), "control out st")),
    ((("--watch",), "control out status --wa")),
    ((("--png",), "report out --p")),
    ((("--each-rank",), "replay out --step 3 --ea")),
    ((("--text",), "samples out --te")),
    ((("--json",), "compare out out --js")),
    ((("list",), "store out l")),
    ((("--sort",), "store out list --s")),
    (((), "store out list --timeout ")),
]


@pytest.mark.parametrize(("expected", "line"), CASES)
def test_bash_completes_commands_options_and_values(
    folder: Path, specs: list[CommandSpec], expected: tuple[str, ...], line: str
) -> None:
    script = script_for("bash", specs, folder)
    assert run_shell("bash", "-c", _IN_BASH, "_", script, "forgather", *line.split(" ")) == list(expected)


def test_bash_completes_paths_and_values_after_an_equals_sign(folder: Path, specs: list[CommandSpec]) -> None:
    script = script_for("bash", specs, folder)
    words = ("bash", "-c", _IN_BASH, "_", script, "forgather")
    assert run_shell(*words, "train", "r") == ["run one.yaml"]
    assert run_shell(*words, "finalize", "--config", "r") == ["run one.yaml"]
    assert run_shell(*words, "store", "o") == ["out"]
    assert run_shell(*words, "train", "--args.eval_strategy", "=", "st") == ["steps"]
    assert run_shell(*words, "train", "--args.eval_strategy", "=") == ["no", "steps", "epoch"]


@pytest.mark.parametrize(("expected", "line"), CASES)
def test_fish_completes_commands_options_and_values(
    folder: Path, specs: list[CommandSpec], expected: tuple[str, ...], line: str
) -> None:
    script = script_for("fish", specs, folder)
    lines = run_shell("fish", "--no-config", "-c", f'source {script}; complete -C "forgather {line}"')
    assert sorted(one.partition("\t")[0] for one in lines) == sorted(expected)


def test_fish_completes_paths(folder: Path, specs: list[CommandSpec]) -> None:
    script = script_for("fish", specs, folder)
    lines = run_shell("fish", "--no-config", "-c", f'source {script}; complete -C "forgather finalize o"')
    assert lines == ["out/"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ev", "evaluate "),
        ("train --args.max_st", "max_steps "),
        ("checkpoint modify out --sc", "scale "),
        ("store out list --ti", "timeout "),
    ],
)
def test_zsh_completes_commands_and_options(folder: Path, specs: list[CommandSpec], line: str, expected: str) -> None:
    script = script_for("zsh", specs, folder)
    assert run_shell("zsh", "-f", "-c", _IN_ZSH, "_", script, f"forgather {line}", expected) == ["found"]


@pytest.mark.parametrize("shell", WRITERS)
def test_scripts_are_printed_without_slow_imports(tmp_path: Path, shell: str) -> None:
    answer = spawn(tmp_path, "completion", shell, program=_REPORT_IMPORTS)
    assert (answer.code, answer.errors) == (0, "")
    assert all(name in answer.output for name in COMMANDS)


def test_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "completion", "tcsh")
    assert answer.code == 2 and "tcsh" in answer.errors
