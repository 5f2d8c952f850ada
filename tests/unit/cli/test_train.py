"""`forgather train` from the configuration to the checkpoint, and the resume."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.cli.program import Answer, call, spawn, write_plain_run, write_tiny_run


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_run(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    answer: Answer = call(capsys, "train", "tiny.yaml", *words)
    assert answer.code == 2, answer
    return " ".join(answer.errors.split())


def test_run_trains_evaluates_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = spawn(tmp_path, "train", "tiny.yaml", "--callbacks+", "{class_path: JsonLogger}")
    assert first.code == 0
    assert first.errors.startswith("Loss: shifted causal cross entropy") and first.errors.count("\n") == 1
    assert "step 5/5" in first.output and "eval 5/5" in first.output
    saved = Path("out/checkpoints/checkpoint-5")
    assert yaml.safe_load(Path("out/config.yaml").read_text())["args"]["max_steps"] == 5
    assert (saved / "config.yaml").read_bytes() == Path("out/config.yaml").read_bytes()

    again = call(capsys, "train", "tiny.yaml")
    assert again.code == 0
    assert "already finished" in again.output and "step 1/5" not in again.output

    longer = call(capsys, "train", "tiny.yaml", "--args.max_steps", "8", "--callbacks+", "{class_path: JsonLogger}")
    assert longer.code == 0
    assert "resumed at step 5" in longer.output and "step 8/8" in longer.output
    lines = [json.loads(line) for line in Path("out/trainer_logs.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_demo_shows_what_it_does_and_its_header_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--args.max_steps", "2", "--args.eval_steps", "2", "--data.init_args.max_bytes", "200000")
    answer = call(capsys, "train", *short)
    assert answer.code == 0
    shown, found, suggestions = answer.output.partition("try next")
    assert found and "--trainer ddp --nproc 2" in suggestions and "--trainer pipeline --nproc 2" in suggestions
    for part in (
        "forgather demo  ",
        "\ndata  ",
        "\neval data  ",
        "step 2/2",
        "eval 2/2",
        "samples at step 2",
        "\nplot  ",
    ):
        assert part in shown
    # The length of the row with the absolute path depends on the machine, and step lines are shorter on a terminal.
    header = shown.partition("\nstep ")[0].splitlines()
    assert [line for line in header if len(line) > 80 and not line.startswith("output ")] == []


def test_stop_signal_saves_exits_with_0_and_the_next_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plain_run(tmp_path)
    command = [sys.executable, "-m", "forgather.cli.main", "train", "plain.yaml", "--args.max_steps", "100000"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "SIGINT received" in errors
    stopped = re.search(r"Run the same command again to resume from step ([\d,]+)", output)
    assert stopped is not None
    step = int(stopped[1].replace(",", ""))
    resumed = call(capsys, "train", "plain.yaml", "--args.max_steps", str(step + 1), "--args.eval_strategy", "no")
    assert resumed.code == 0
    assert f"resumed at step {step}" in resumed.output.replace(",", "")


def test_unknown_trainers_are_rejected_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    available = "this version has: single, ddp, fsdp2, accelerate, pipeline, hybrid."
    assert f"there is no such trainer; {available} Did you mean 'single'?" in refusal(capsys, "--trainer", "singel")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.config.hiden_size", "8"], "LlamaConfig has no value 'hiden_size'. Did you mean 'hidden_size'?"),
        (["--model.model_type", "lama"], "transformers has no such type. Did you mean 'llama'?"),
        (["--model.pretrained", "nowhere"], "it has model_type and pretrained"),
        (["--tokenizer.path", "nowhere"], "tokenizer.path='nowhere': there is no such directory"),
        (["--optimizer.class_path", "torch.optim.SDG"], "torch.optim has no 'SDG'. Did you mean 'SGD'?"),
        (
            ["--optimizer.class_path", "torch.optim.SGD", "--optimizer.init_args.learning", "1"],
            "SGD takes no 'learning'",
        ),
        (["--callbacks+", "{class_path: PlotCalback}"], "Did you mean 'PlotCallback'?"),
        (["--loss.class_path", "nowhere.loss"], "there is no module 'nowhere'"),
        (["--loss.class_path", "yaml.Loss"], "The installed library 'yaml' ("),
        (["--loss.class_path", "yaml.own.Loss"], ") hides yaml.py of "),
    ],
)
def test_component_that_cannot_be_built_reports_the_reason(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    Path("yaml.py").write_text("class Loss: pass\n")
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize(("config", "can_import"), [("tiny.yaml", False), ("plain.yaml", True)])
def test_processes_that_libraries_start_search_the_current_directory_only_for_code_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
    can_import: bool,
) -> None:
    write_plain_run(tmp_path)
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    assert call(capsys, "train", config, "--args.max_steps", "1").code == 0
    Path("ctypes.py").write_text("raise SystemExit('planted')")
    # torch.compile starts such a process to examine the CPU.
    child = subprocess.run([sys.executable, "-c", "import ctypes"], capture_output=True, text=True)
    assert ("planted" in child.stderr) == can_import


GPT2 = "{model_type: gpt2, config: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 16}}"


def test_sequences_beyond_learned_positions_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", GPT2, "--data.sequence_length")
    message = refusal(capsys, *words, "17")
    assert "data.sequence_length=17 is more than the 16 positions of the model (n_positions)" in message
    assert "Set data.sequence_length to 16 or less, or model.config.n_positions to 17." in message
    assert not Path("out").exists() or not list(Path("out").rglob("checkpoint*"))
    assert call(capsys, "train", "tiny.yaml", *words, "16").code == 0


def test_sequences_beyond_computed_positions_train_with_a_warning(tmp_path: Path) -> None:
    words = ("--model.config.max_position_embeddings", "8", "--args.max_steps", "1", "--args.eval_strategy", "no")
    answer = spawn(tmp_path, "train", "tiny.yaml", *words)
    warning = "data.sequence_length=16 is more than the 8 positions of the model (max_position_embeddings)"
    assert answer.code == 0 and warning in " ".join(answer.errors.split())


def test_optimizer_groups_schedule_and_loss_are_loaded_by_path(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("tiny.yaml").read_text()
    text += """
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1e-2}}
optimizer_groups:
  norms: {regex: norm, config: {lr: 5e-3}, factory: {class_path: torch.optim.Adam, init_args: {lr: 1e-3}}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.ConstantLR, init_args: {factor: 1.0}}
loss: {class_path: forgather.ml.loss.CausalLoss}
"""
    Path("tiny.yaml").write_text(text)
    answer = call(capsys, "train", "tiny.yaml", "--args.eval_strategy", "no")
    assert answer.code == 0, answer.errors
    assert Path("out/checkpoints/checkpoint-5").is_dir()


def test_rejected_job_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "train", "tiny.yaml").code == 0
    program = (
        "from forgather.ml.checkpoint.output_lock import OutputDirLock; OutputDirLock('out').acquire(); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", f"import sys; {program}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        answer = call(capsys, "train", "tiny.yaml", "--args.max_steps", "9", "--args.learning_rate", "1.0")
        after = {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        holder.communicate()
    assert answer.code == 1 and f"in use by another running job: process {holder.pid}" in " ".join(
        answer.errors.split()
    )
    assert after == before
