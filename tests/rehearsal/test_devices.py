"""Devices of ranks: one visible device per process, bound process groups, timeouts of NCCL groups."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import DistributedEnvironment
from forgather.ml.distributed.groups import new_group, new_mesh
from forgather.ml.trainer.setup.devices import choose_device
from tests.support.launch import RankProcess, finish_all, free_port
from tests.support.rank_protocol import rank_variables

JOB = """
import sys, time
import torch, torch.distributed as dist
from forgather.ml.distributed import DistributedEnvironment, get_local_process_group
from forgather.ml.distributed.groups import new_group, new_mesh

env = DistributedEnvironment(timeout=60.0)
print("device", env.device, "of", torch.accelerator.device_count(), "bound to", dist.group.WORLD.bound_device_id)
total = torch.tensor([float(env.rank + 1)], device=env.device)
dist.all_reduce(total, group=new_mesh("cuda", (2, 1), ("a", "b")).get_group("a"))
# A gloo group of some ranks, which must not touch the communicator of NCCL.
for rank in range(2):
    new_group([rank], backend="gloo")
    new_group([rank])
assert dist.get_process_group_ranks(get_local_process_group()) == [0, 1]
print("total", total.item(), "still bound to", dist.group.WORLD.bound_device_id)

from forgather.ml.trainer import DDPTrainer, DDPTrainingArguments


class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}


def build():
    start = time.monotonic()
    time.sleep(0.3)
    print("built", start, time.monotonic())
    return Model(2, 2)


values = torch.arange(16.0).view(8, 2)
trainer = DDPTrainer(
    args=DDPTrainingArguments(output_dir=sys.argv[1], max_steps=1, per_device_train_batch_size=2, save_strategy="no"),
    model_init=build,
    train_dataset=[{"x": value, "labels": value} for value in values],
    distributed_env=env,
)
trainer.train()
print("trained on", next(trainer.unwrapped_model().parameters()).device)
"""


def run_job(directory: Path, visible: list[str]) -> list[RankProcess]:
    """Run the job on two ranks, with one visible device each."""
    script = directory / "script.py"
    script.write_text(JOB)
    port = free_port()
    # The extension takes its number of devices from this variable.
    number = {"REHEARSAL_DEVICES": "1"} if "REHEARSAL_EXT" in os.environ else {}
    processes = []
    for rank, name in enumerate(visible):
        variables = {**rank_variables(rank, 2, port), **number, "CUDA_VISIBLE_DEVICES": name}
        processes.append(RankProcess(rank, [sys.executable, str(script), str(directory / "out")], variables, None))
    finish_all(processes, 60.0)
    return processes


def test_each_process_uses_the_only_device_that_it_sees(tmp_path: Path) -> None:
    built = []
    for process in run_job(tmp_path, ["0", "1"]):
        assert process.returncode == 0, process.output
        assert "device cuda:0 of 1 bound to cuda:0" in process.output
        assert "total 3.0 still bound to cuda:0" in process.output
        assert "trained on cuda:0" in process.output
        (line,) = (line for line in process.output.splitlines() if line.startswith("built "))
        built.append([float(number) for number in line.split()[1:]])
    # Ranks of a node build one after another: the host memory holds one copy of the model at a time.
    assert built[0][1] < built[1][0]


def test_two_processes_on_one_device_raise_an_error_on_both(tmp_path: Path) -> None:
    for process in run_job(tmp_path, ["1", "1"]):
        assert process.returncode == 1, process.output
        assert "ranks 0, 1 of node" in process.output and "CUDA_VISIBLE_DEVICES=1" in process.output


@pytest.mark.parametrize(("asked", "minutes"), [(None, 10.0), (90.0, 1.5)])
def test_nccl_groups_have_the_timeout_of_the_job_or_of_nccl(asked: float | None, minutes: float) -> None:
    DistributedEnvironment(timeout=asked)
    groups = [dist.group.WORLD, new_group(), *new_mesh("cuda", (1, 1), ("a", "b")).get_all_groups()]
    # Both backends of such a group have the same timeout, and gloo shows it.
    for group in groups:
        assert group is not None and str(dist.get_backend_config(group)) == "cpu:gloo,cuda:nccl"
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=minutes)
    control = new_group(backend="gloo")._get_backend(torch.device("cpu")).options._timeout
    assert control == timedelta(minutes=30.0 if asked is None else minutes)


def test_single_process_is_not_bound_to_its_device() -> None:
    env = DistributedEnvironment()
    assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is None
    assert choose_device(None, "cuda", env) == torch.device("cuda:0")
