"""Runs the blocks of a page in order, as a reader does: `python -m tests.docs.running PAGE FOLDER [--without-python]`.

Prints each command. `# exit code N` behind a command states its exit code, if it is not 0. Below a command of a `console`
block is its output: every line must begin like a line that the command printed. Numbers may differ, and `...` stands for
any lines.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from forgather.cli.main import main as forgather
from tests.docs import preparation
from tests.docs.blocks import Block, blocks_of

COMMAND_SECONDS = 300
# The demo of `forgather train` takes minutes. These options, before the options of the page, leave its course as it is.
SHORT_DEMO = shlex.split(
    "--data.init_args.max_bytes 200000 --data.sequence_length 16 --model.config.hidden_size 16 "
    "--model.config.intermediate_size 32 --model.config.num_attention_heads 2 --model.config.num_key_value_heads 2 "
    "--args.per_device_train_batch_size 4 --args.max_steps 12 --args.save_steps 6 --args.eval_steps 400"
)
_SHELL_SIGNS = re.compile(r"[|<>;&]|--nproc|-d \d")


def run_page(page: str, folder: str, with_python: bool = True) -> None:
    """Run the blocks of a page in one folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = blocks_of(Path(page).resolve())
    with contextlib.chdir(folder):
        for block in blocks:
            if block.prepare is not None:
                getattr(preparation, block.prepare)(block)
            if block.file is not None:
                Path(block.file).write_text(block.text)
            elif block.language == "python" and block.is_run and with_python:
                exec(compile(block.text, page, "exec"), names)
            elif block.is_shell:
                run_block(block)


def run_block(block: Block) -> None:
    """Run the commands of a block, and compare the output that a `console` block shows."""
    for command, shown in commands_of(block):
        printed = run_command(command)
        missing = [line for line in shown if beginning(line) and not any(is_alike(line, one) for one in printed)]
        assert not missing, f"{command}\nshould print lines like {missing}, but prints:\n" + "\n".join(printed)


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """Return the commands of a shell block, each with the output lines below it."""
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
    if block.language == "bash":
        return [(line, []) for line in lines if not line.startswith("#")]
    assert lines[0].startswith("$ "), f"{block.page}:{block.line}: the first line of a console block is a command"
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def beginning(line: str) -> str:
    """Return the first column of an output line, with # for numbers; empty for lines that are not compared."""
    if line.startswith(("...", " ")) or re.match(r"[\d.]+ ", line):
        return ""
    return re.sub(r"\d+", "#", re.split(r"  |: ", line)[0].removesuffix(" ..."))


def is_alike(shown: str, printed: str) -> bool:
    return re.sub(r"\d+", "#", printed).startswith(beginning(shown))


def run_command(line: str) -> list[str]:
    """Run a command and return the printed lines. A `forgather` of one process runs in this process, to save its start."""
    words, expected = shlex.split(line, comments=True), re.search(r"# exit code (\d+)", line)
    if words[:2] == ["forgather", "train"] and (len(words) == 2 or words[2].startswith("-")):
        words[2:2] = SHORT_DEMO
        num_words = next((number for number, word in enumerate(words) if word.startswith(">")), len(words))
        line = " ".join([shlex.join(words[:num_words]), *words[num_words:]])
    print(f"$ {line}", flush=True)
    is_short = words[0] == "forgather" and not _SHELL_SIGNS.search(line)
    code, printed = run_inside(words[1:]) if is_short else run_in_shell(line)
    print(printed, flush=True)
    assert code == (int(expected[1]) if expected else 0), f"exit code {code} of {line}\n{printed}"
    return printed.splitlines()


def run_inside(words: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = forgather(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, printed.getvalue()


def run_in_shell(line: str) -> tuple[int, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    try:
        run_page(sys.argv[1], sys.argv[2], with_python="--without-python" not in sys.argv)
    finally:
        preparation.end_jobs()
