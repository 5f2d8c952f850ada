"""Command line before any work: help, commands and errors."""

import signal
from pathlib import Path

import pytest

from forgather import cli
from forgather.cli.main import COMMANDS, Command
from tests.unit.cli.program import call, spawn

_REPORT_IMPORTS = (
    "from forgather.cli.main import main; code = main(); "
    "heavy = [name for name in ('torch', 'transformers', 'jsonargparse', 'numpy', 'rich') if name in sys.modules]; "
    "sys.exit(f'imported {heavy}' if heavy else code)"
)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]])
def test_help_imports_nothing_slow(tmp_path: Path, words: list[str]) -> None:
    answer = spawn(tmp_path, *words, program=_REPORT_IMPORTS)
    assert (answer.code, answer.errors) == (0, "")
    assert "forgather" in answer.output


def test_importing_the_commands_imports_nothing_slow(tmp_path: Path) -> None:
    names = [f"forgather.cli.commands.{name}" for name in _module_names("commands")]
    assert {command.module for command in COMMANDS.values()} == set(names)
    names += ["forgather.config.help", "forgather.config.schema", "forgather.cli.launch.options"]
    program = f"import importlib; [importlib.import_module(name) for name in {names}]; " + _REPORT_IMPORTS.replace(
        "code = main()", "code = 0"
    )
    answer = spawn(tmp_path, program=program)
    assert (answer.code, answer.errors) == (0, "")


def _module_names(folder: str) -> list[str]:
    return [path.stem for path in (Path(cli.__file__).parent / folder).glob("*.py") if path.stem != "__init__"]


def test_help_lists_the_keys_of_all_sections_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(call(capsys, "train", "--help").output.split())
    for expected in ("--model.model_type", "--data.sequence_length", "--args.max_steps", "--callbacks"):
        assert expected in text
    assert "overrides num_train_epochs; epochs repeat as needed. -1: by epochs. (int, default -1)" in text


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "trian")
    assert answer.code == 2
    assert "There is no command 'trian'. Did you mean 'train'?" in answer.errors


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys)
    assert answer.code == 2
    assert "train a model" in answer.output


def test_error_is_a_message_and_with_debug_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {model_type: llama}\ndata: {files: [nothing.txt]}\n")
    answer = call(capsys, "train", "run.yaml")
    assert answer.code == 1
    assert "No file matches 'nothing.txt'" in answer.errors and "Traceback" not in answer.errors
    with pytest.raises(FileNotFoundError):
        call(capsys, "train", "run.yaml", "--debug")


def test_interrupt_that_a_library_swallows_ends_with_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "swallowing_command.py").write_text(
        "import contextlib, os, signal\n\n"
        "def run(words):\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise AttributeError('half-imported module')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "swallow", Command("swallowing_command", ""))
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = call(capsys, "swallow")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (answer.code, answer.errors) == (130, "forgather: interrupted\n")
