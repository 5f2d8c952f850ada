"""A script under torchrun: ranks join through the arguments, and the job ends with exit code 0."""

from pathlib import Path

import pytest

from forgather.hf import Trainer
from tests.guarantees.drop_in.programs import made, rows
from tests.support.launch import CompletedAgent, run_torchrun
from tests.support.sampling import long_search
from tests.support.warm_torchrun import run_warm_torchrun

SCRIPT = Path(__file__).with_name("launched_script.py")
TIMEOUT = 400.0


def words(output_dir: Path) -> list[str]:
    options = "--use_cpu --max_steps 2 --per_device_train_batch_size 1 --learning_rate 0.01 --save_strategy no"
    return ["--output_dir", str(output_dir), *options.split(), "--fg_options", '{"shuffle": false}']


def check(agent: CompletedAgent, folder: Path) -> None:
    assert agent.returncode == 0, agent.output
    trainer = made(Trainer, folder)
    trainer.train()
    # Without the last digit, because ranks add in another order.
    assert f"evaluated on 2 ranks: {trainer.evaluate(rows(5))['eval_loss']:.6f}"[:-1] in agent.output


def test_a_script_uses_its_ranks_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks are forked from a process without threads. The allocator of Arrow would start one.
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module = f"{__package__}.{SCRIPT.stem}"
    jobs = run_warm_torchrun(module, {"run": words(tmp_path / "run")}, nproc_per_node=2, timeout=TIMEOUT)
    check(jobs["run"].agents[0], tmp_path / "one")


@long_search
def test_a_script_uses_its_ranks_under_torchrun_in_new_processes(tmp_path: Path) -> None:
    (agent,) = run_torchrun([str(SCRIPT), *words(tmp_path / "run")], nproc_per_node=2, timeout=TIMEOUT)
    check(agent, tmp_path / "one")
