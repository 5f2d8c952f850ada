"""`forgather generate` on checkpoints of `forgather train`."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rich
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather._terminal_text import printable
from tests.unit.cli.program import call, write_plain_run, write_tiny_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from forgather.cli.main import main

    folder = tmp_path_factory.mktemp("generate")
    write_tiny_run(folder)
    write_plain_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "tiny.yaml", "--args.learning_rate", "1e-2"]) == 0
        assert main(["train", "plain.yaml", "--args.output_dir", "plain_out"]) == 0
    return folder


@pytest.fixture(autouse=True)
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def texts(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    answer = call(capsys, "generate", *words, "--json")
    assert answer.code == 0, answer.errors
    found: list[dict[str, object]] = json.loads(answer.output)["texts"]
    return found


def test_greedy_text_is_the_text_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = texts(capsys, "out", "--prompt", "This is", "--greedy", "--max-new-tokens", "12")
    model = AutoModelForCausalLM.from_pretrained("out/checkpoints/checkpoint-5")
    tokenizer = AutoTokenizer.from_pretrained("out/checkpoints/checkpoint-5")
    inputs = tokenizer("This is", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=256)[0, 7:]
    assert found["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert (found["num_prompt_tokens"], found["num_tokens"], found["step"]) == (7, len(ids), 5)


def test_exported_model_gives_the_text_of_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "checkpoint", "export", "out", "exported").code == 0
    words = ("--prompt", "This is", "--greedy", "--max-new-tokens", "12")
    (expected,), (found,) = texts(capsys, "out", *words), texts(capsys, "exported", *words)
    assert found == {**expected, "checkpoint": "exported", "step": None}
    refused = call(capsys, "generate", "exported", "--ema", *words)
    assert refused.code == 1 and "has one set of weights" in refused.errors
    refused = call(capsys, "checkpoint", "diff", "out", "exported")
    assert refused.code == 1 and "exported is a directory of Hugging Face weights" in refused.errors
    assert "forgather checkpoint import" in refused.errors


def test_printed_text_is_prompt_and_continuation_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("out", "--prompt", "A\x1b[31m", "--max-new-tokens", "60", "--temperature", "3")
    (found,) = texts(capsys, *words)
    answer = call(capsys, "generate", *words)
    assert answer.output == printable(f"A\x1b[31m{found['text']}") + "\n"
    assert "\x1b" not in answer.output and any(ord(sign) < 32 and sign not in "\n\t" for sign in str(found["text"]))


def test_seed_prompts_and_samples_determine_the_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("out", "--max-new-tokens", "8", "--top-k", "40", "--top-p", "0.95")
    first, second = texts(capsys, *words, "--prompt", "This", "--num-samples", "2", "--seed", "3")
    (alone,) = texts(capsys, *words, "--prompt", "This", "--seed", "4")
    assert first["text"] != second["text"] == alone["text"]
    Path("prompts.txt").write_text("This\n\nThat\n")
    Path("prompts.jsonl").write_text('{"prompt": "This"}\n{"prompt": "That\\n", "other": 1}\n')
    assert [one["prompt"] for one in texts(capsys, *words, "--prompts-file", "prompts.txt")] == ["This", "That"]
    assert [one["prompt"] for one in texts(capsys, *words, "--prompts-file", "prompts.jsonl")] == ["This", "That\n"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert texts(capsys, *words, "--prompt", "-")[0]["prompt"] == "from stdin"


def test_checkpoints_are_labelled_by_step_and_in_columns_on_a_wide_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", "out/checkpoints/checkpoint-4", "out", "--prompt", "This", "--max-new-tokens", "4")
    lines = call(capsys, *words).output.splitlines()
    assert [line for line in lines if line.startswith("step ")] == [
        "step 4  out/checkpoints/checkpoint-4",
        "step 5  out/checkpoints/checkpoint-5",
    ]
    screen = io.StringIO()
    wide = Console(file=screen, force_terminal=True, color_system=None, width=120)
    monkeypatch.setattr(rich, "_console", wide)
    assert call(capsys, *words).code == 0
    header, *rows = screen.getvalue().splitlines()
    assert header.split() == ["step", "4", "out/checkpoints/checkpoint-4", "step", "5", "out/checkpoints/checkpoint-5"]
    assert next(row.count("This") for row in rows if row.strip()) == 2


def test_interrupt_ends_with_exit_code_130(folder: Path) -> None:
    # A process that was started in the background ignores SIGINT.
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{handler}; from forgather.cli.main import main; sys.exit(main())"
    words = ["generate", "out", "--prompt", "This", "--max-new-tokens", "2000"]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; {program}", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    # The prompt is printed before the first token.
    assert process.stdout.read(4) == b"This"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and output.endswith(b"\n")
    assert errors.decode().split() == ["forgather:", "interrupted"]


def test_own_model_needs_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "generate", "plain_out", "--prompt", "\x01\x02")
    assert answer.code == 1 and "--config" in answer.errors and "Traceback" not in answer.errors
    words = ("plain_out", "--config", "plain.yaml", "--prompt", "\x01\x02", "--max-new-tokens", "3", "--greedy")
    assert texts(capsys, *words)[0]["num_tokens"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("out",), "needs --prompt TEXT"),
        (("nowhere", "--prompt", "x"), "there is no such directory"),
        (("out", "--prompt", "x", "--top-p", "2"), "top_p to be above 0 and at most 1"),
        (("out", "--prompt", "x", "--temperature", "-1"), "temperature to be a finite number above 0"),
        *(
            (
                ("out", "--prompt", "x", option, value),
                f"{option} {value}: expected a number from {least} to 2,147,483,647",
            )
            for option, least, values in (
                ("--max-new-tokens", 1, ("0", "-3", str(10**25))),
                ("--num-samples", 1, ("0", str(10**25))),
                ("--top-k", 0, ("-1", str(10**25))),
            )
            for value in values
        ),
        (("out", "--prompt", "x", "--temperature", "nan"), "temperature to be a finite number above 0"),
        (("out", "--prompt", "x", "--greedy", "--do-sample"), "not allowed with argument"),
        (("out", "--prompt", "x", "--device", "nosuch"), "device='nosuch' is no device of torch"),
        (("out", "--prompts-file", "none.txt"), "The prompts in 'none.txt' cannot be read: No such file"),
        (("out", "--prompts-file", "wrong.jsonl"), "wrong.jsonl, line 1: expected a JSON object"),
        (("out", "--prompts-file", "empty.txt"), "empty.txt has no prompts"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    Path("wrong.jsonl").write_text('{"text": "x"}\n')
    Path("empty.txt").write_text("\n")
    answer = call(capsys, "generate", *words)
    assert answer.code == 2 and message in " ".join(answer.errors.split())
