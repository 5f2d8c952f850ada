"""What commands of the documentation need: configurations, data and runs. A comment above a block names a function.

Every function gets the block, and works in the current folder.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.docs.blocks import REPOSITORY, Block, blocks_of

CONFIGURATION = """\
model:
  model_type: {model_type}
  config: {config}
data:
  files: ["notes/*.txt"]
  sequence_length: 16
  eval_fraction: 0.2
args:
  output_dir: {output_dir}
  max_steps: {max_steps}
  save_steps: {save_steps}
  eval_strategy: steps
  eval_steps: {save_steps}
  logging_steps: 1
  save_total_limit: 10
  per_device_train_batch_size: 4
  seed: 1
"""
LLAMA = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 2}"
GPT2 = "{n_embd: 16, n_layer: 4, n_head: 2, n_positions: 32}"
START_SECONDS = 120

_jobs: list[subprocess.Popen[str]] = []


def notes(_: Block) -> None:
    """`my.yaml` with its data, and the model directory `base_model`."""
    _write_notes()
    _write_configuration("my.yaml")
    _forgather("train my.yaml --args.output_dir for_base --args.max_steps 1")
    _forgather("finalize for_base base_model --no-evaluation")


def devices(_: Block) -> None:
    """Nothing: on a machine without accelerators, `-d 0,1` starts two processes on the CPU."""


def averaged_demo(_: Block) -> None:
    """A demo with averaged weights and a checkpoint of step 120."""
    from tests.docs.running import SHORT_DEMO

    # Layers of 32 inputs can be quantised.
    wide = "--model.config.hidden_size 32 --args.ema_decay 0.9 --args.save_steps 120 --args.max_steps 120"
    _forgather(f"train {shlex.join(SHORT_DEMO)} {wide} --args.resume_from_checkpoint false")


def notes_and_script(block: Block) -> None:
    """`my.yaml` with its data, and the first program of the page as `my_script.py`."""
    _write_notes()
    _write_configuration("my.yaml")
    program = next(one for one in blocks_of(block.page) if one.language == "python")
    Path("my_script.py").write_text(program.text)


def hf_script(_: Block) -> None:
    """The example for `forgather.hf` as `my_script.py`."""
    Path("my_script.py").write_text((REPOSITORY / "examples" / "hf_script.py").read_text())


def many_samples(_: Block) -> None:
    """A run of 60 steps. With this seed, step 30 trains on the sample 654."""
    _write_notes(num_lines=3000)
    Path("notes").rename("text")
    _write_configuration("run.yaml", max_steps=60, save_steps=20)
    text = Path("run.yaml").read_text().replace("notes/", "text/").replace("seed: 1", "seed: 810")
    Path("run.yaml").write_text(text)
    _forgather("train run.yaml")


def plain_run(_: Block) -> None:
    """A run with checkpoints of steps 2 and 4, and its configuration `plain.yaml`."""
    Path("out").rename("out_of_spike")
    _write_notes()
    _write_configuration("plain.yaml", max_steps=4)
    _forgather("train plain.yaml")


def two_runs(_: Block) -> None:
    """Runs `a` and `b` with different seeds."""
    _forgather("train plain.yaml --args.output_dir a")
    _forgather("train plain.yaml --args.output_dir b --args.seed 2")


def two_evaluated_runs(_: Block) -> None:
    """Runs `out` and `other` of 600 steps, and files in `new`."""
    _write_notes()
    _write_configuration("my.yaml", max_steps=600, save_steps=200)
    _forgather("train my.yaml --args.logging_steps 100")
    _forgather("train my.yaml --args.logging_steps 100 --args.output_dir other --args.max_steps 400")
    Path("new").mkdir()
    Path("new/text.txt").write_text("A text that the run has not seen.\n" * 20)


def prompts(_: Block) -> None:
    """A file of prompts, and a repository with a change."""
    Path("prompts.txt").write_text("import\ndef main\n")


def running_job(_: Block) -> None:
    """A job of two ranks in `demo_output`."""
    from tests.docs.running import SHORT_DEMO

    end_jobs()
    words = (
        "--trainer ddp --nproc 2 --args.max_steps 1000000 --args.resume_from_checkpoint false --args.save_steps 100000"
    )
    command = [sys.executable, "-m", "forgather.cli.main", "train", *SHORT_DEMO, *shlex.split(words)]
    _jobs.append(subprocess.Popen([*command, "--args.max_eval_steps", "2"], text=True, start_new_session=True))
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run([*command[:3], "control", "demo_output", "evaluate"], check=False).returncode != 0:
        assert _jobs[-1].poll() is None and time.monotonic() < deadline, "the job does not answer"
        time.sleep(1)


def end_jobs() -> None:
    """End the running jobs."""
    while _jobs:
        job = _jobs.pop()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
        job.wait(60)


def hybrid_and_single(_: Block) -> None:
    """The same model trained by one process and by four."""
    for name, words in (("single_run", ""), ("hybrid_run", "--trainer hybrid --nproc 4 --args.pp_size 2")):
        _write_configuration(f"{name}.yaml", model_type="gpt2", config=GPT2, output_dir=name, max_steps=2)
        batch = 8 if name == "single_run" else 4
        _forgather(f"train {name}.yaml --args.per_device_train_batch_size {batch} {words}")


def run_of_transformers(_: Block) -> None:
    """A checkpoint of `transformers.Trainer` in `theirs`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    samples = [{"input_ids": torch.arange(8) + i % 50, "labels": torch.arange(8) + i % 50} for i in range(64)]
    args = TrainingArguments(output_dir="theirs", max_steps=4, save_steps=4, use_cpu=True, report_to=[])
    Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=samples).train()


def home(_: Block) -> None:
    """A home directory with folders for completions."""
    os.environ["HOME"] = str(Path("home").resolve())
    for name in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        Path("home", name).mkdir(parents=True)


def _write_notes(num_lines: int = 400) -> None:
    Path("notes").mkdir(exist_ok=True)
    for number in range(20):
        lines = (f"{number * one} is {one} times {number}\n" for one in range(num_lines // 20))
        Path(f"notes/{number:02}.txt").write_text("".join(lines))


def _write_configuration(
    name: str,
    model_type: str = "llama",
    config: str = LLAMA,
    output_dir: str = "out",
    max_steps: int = 4,
    save_steps: int = 2,
) -> None:
    values = {"model_type": model_type, "config": config, "output_dir": output_dir}
    Path(name).write_text(CONFIGURATION.format(**values, max_steps=max_steps, save_steps=save_steps))


def _forgather(words: str) -> None:
    from tests.docs.running import run_command

    run_command(f"forgather {words}")
