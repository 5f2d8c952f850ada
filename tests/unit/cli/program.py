"""Runs the program in a subprocess, as a user does, or in this process to save time."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgather.cli.main import main

TINY = """\
model:
  model_type: llama
  config:
    hidden_size: 16
    intermediate_size: 32
    num_hidden_layers: 1
    num_attention_heads: 2
data:
  files: ["text/*.txt"]
  sequence_length: 16
  eval_fraction: 0.3
args:
  output_dir: out
  max_steps: 5
  per_device_train_batch_size: 4
  logging_steps: 1
  learning_rate: 1e-3
  seed: 1
  eval_strategy: steps
  eval_steps: 5
  save_steps: 2
  use_cpu: true
"""


PLAIN = """\
model: {class_path: plain.PlainModel}
data: {class_path: plain.data}
args:
  output_dir: out
  max_steps: 5
  per_device_train_batch_size: 4
  logging_steps: 1
  learning_rate: 1e-3
  seed: 1
  eval_strategy: steps
  eval_steps: 5
  save_steps: 2
  use_cpu: true
"""
PLAIN_MODULE = """\
import torch
from torch import nn


class PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_encoder = nn.Embedding(32, 8)
        self.layer_stack = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.output_decoder = nn.Linear(8, 32)

    def forward(self, input_ids):
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden)
        return self.output_decoder(hidden)


def samples(count):
    tokens = [torch.arange(number, number + 8) % 32 for number in range(count)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def data():
    return {"train": samples(40), "eval": samples(8)}
"""


@dataclass(frozen=True)
class Answer:
    """Exit code and output of the program."""

    code: int
    output: str
    errors: str


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    """Run the program in this process."""
    code = main(list(words))
    captured = capsys.readouterr()
    return Answer(code, captured.out, captured.err)


def spawn(folder: Path, *words: str, program: str = "from forgather.cli.main import main; sys.exit(main())") -> Answer:
    """Run the program in a subprocess."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", f"import sys; {program}", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return Answer(done.returncode, done.stdout, done.stderr)


def write_tiny_run(folder: Path) -> None:
    """Write a configuration `tiny.yaml` and its text files."""
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(f"This is document number {number}. " * 5)


def write_plain_run(folder: Path) -> None:
    """Write a configuration `plain.yaml` without models and tokenizers of transformers, which take seconds to import."""
    (folder / "plain.yaml").write_text(PLAIN)
    (folder / "plain.py").write_text(PLAIN_MODULE)
