"""`tune_malloc`: no page faults from freed memory with glibc on the CPU, and no effect anywhere else."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from forgather.ml.trainer.diagnostics import malloc_settings
from forgather.ml.trainer.diagnostics.malloc_settings import is_glibc, tune_malloc
from forgather.ml.trainer.trainer import TrainingArguments

CPU = torch.device("cpu")
_FAULTS_JOB = """
import resource, sys
import torch
from forgather.ml.trainer.diagnostics.malloc_settings import tune_malloc

if sys.argv[1] == "tuned":
    assert tune_malloc(torch.device("cpu"))

def step():
    # Activations of a step: many blocks that are freed together.
    held = [torch.ones(2**18) for _ in range(60)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(5):
    step()
before = faults()
for _ in range(20):
    step()
print((faults() - before) / 20)
"""


def faults_per_step(mode: str) -> float:
    hidden = ("MALLOC_", "GLIBC_TUNABLES")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    command = [sys.executable, "-c", _FAULTS_JOB, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(not is_glibc(), reason="only glibc has these thresholds")
def test_tuned_malloc_keeps_freed_memory() -> None:
    # A block at the end of the heap that stays in use can keep glibc from returning memory, so one try is not enough.
    plain = next((number for number in (faults_per_step("plain") for _ in range(10)) if number > 1000), 0)
    assert plain > 1000
    assert faults_per_step("tuned") < plain / 20


def refusal(caplog: pytest.LogCaptureFixture, device: torch.device = CPU, **environ: str) -> str:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger=malloc_settings.__name__):
        assert not tune_malloc(device, environ)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    return record.getMessage()


def test_nothing_is_set_where_it_has_no_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "training runs on cuda" in refusal(caplog, torch.device("cuda"))
    if is_glibc():
        assert "MALLOC_TRIM_THRESHOLD_ configures malloc already" in refusal(caplog, MALLOC_TRIM_THRESHOLD_="1")
        assert "GLIBC_TUNABLES" in refusal(caplog, GLIBC_TUNABLES="glibc.malloc.trim_threshold=1")

    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    # As musl and macOS do.
    monkeypatch.setattr(os, "confstr", unknown)
    assert not is_glibc()
    assert "the C library is not glibc" in refusal(caplog)


def test_tuning_is_on_by_default() -> None:
    assert TrainingArguments(output_dir="out").tune_malloc
