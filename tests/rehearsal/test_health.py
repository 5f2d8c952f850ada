"""Health check on the rehearsal device: defective devices and links are named on every rank."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from forgather.ml.distributed import DistributedEnvironment, reset_process_groups
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.diagnostics import health
from forgather.ml.trainer.diagnostics.health import HealthCheckError, device_problem
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.rehearsal import watching
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

DEVICE = torch.device("cuda", 0)


class BrokenProducts(TorchDispatchMode):
    """Device that computes one element of each matrix product wrongly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.device.type == "cuda":
            result[0, 0] += 1
        return result


class BrokenLinks(TorchDispatchMode):
    """Device that sends one wrong number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "allreduce" in str(func) and args[0][0].device.type == "cuda":
            args[0][0][1, 3].add_(1)
        return result


@contextlib.contextmanager
def nccl_group() -> Iterator[DistributedEnvironment]:
    """Replace the gloo group of the test by the group of a job with accelerators."""
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    reset_process_groups()
    yield DistributedEnvironment(log_level="WARNING")


def _train(path: str, broken: type[TorchDispatchMode] | None, **arguments: Any) -> tuple[str, int, dict[str, str]]:
    with nccl_group() as environment:
        is_broken = broken is not None and environment.rank == 1
        trainer = quiet_trainer(
            Path(path),
            TokenModel(),
            token_samples(32),
            trainer_class=DDPTrainer,
            trainer_options={"distributed_env": environment},
            use_cpu=False,
            max_steps=2,
            **arguments,
        )
        message = ""
        with broken() if is_broken and broken is not None else contextlib.nullcontext():
            try:
                trainer.train()
            except HealthCheckError as error:
                message = str(error)
        variables = {name: value for name, value in os.environ.items() if name.startswith(("TORCH_FR", "TORCH_NCCL"))}
        return message, trainer.state.global_step if trainer.state is not None else 0, variables


def test_working_ranks_train_with_the_recorder_on(tmp_path: Path) -> None:
    for message, step, variables in run_on_ranks(_train, 2, str(tmp_path), None):
        assert (message, step) == ("", 2)
        assert variables["TORCH_FR_BUFFER_SIZE"] == "2000"
        assert variables["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl_trace_rank_")


def test_a_defective_device_of_one_rank_is_named_on_all(tmp_path: Path) -> None:
    (first, step, _), (second, _, _) = run_on_ranks(_train, 2, str(tmp_path), BrokenProducts)
    assert first == second and step == 0
    assert "failed on 1 of 2 rank(s)" in first
    assert "rank 1 on host" in first and "device cuda:1" in first and "rank 0" not in first
    assert "float32 has 1 wrong elements" in first


def test_a_defective_link_is_named_on_all(tmp_path: Path) -> None:
    (first, step, _), (second, _, _) = run_on_ranks(_train, 2, str(tmp_path), BrokenLinks)
    assert first == second and step == 0
    assert "rank 0 on host" in first and "gave wrong numbers from rank(s) 1" in first


def test_one_device_is_checked_unless_the_check_is_off(tmp_path: Path) -> None:
    def train(**arguments: Any) -> int:
        trainer = quiet_trainer(
            tmp_path,
            TokenModel(),
            token_samples(8),
            use_cpu=False,
            max_steps=1,
            resume_from_checkpoint=False,
            **arguments,
        )
        with BrokenProducts():
            return trainer.train().global_step

    with pytest.raises(HealthCheckError, match="rank 0 on host"):
        train()
    assert train(health_check=False) == 1


def test_a_device_without_free_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_problem(DEVICE, [torch.float32, torch.bfloat16]) is None
    monkeypatch.setattr(health, "_LEAST_MEMORY", 2.0)
    problem = device_problem(DEVICE, [])
    assert problem is not None and "memory is free" in problem


def _fail(path: str) -> None:
    class Fail:
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("a fault of the run")

    with nccl_group() as environment:
        # Only builds of torch with NCCL have a recorder.
        recorder = f"collectives of rank {environment.rank}".encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: recorder, raising=False)
            quiet_trainer(
                Path(path),
                TokenModel(),
                token_samples(8),
                Fail(),
                trainer_class=DDPTrainer,
                trainer_options={"distributed_env": environment},
                use_cpu=False,
                max_steps=1,
            ).train()


def test_a_failed_run_leaves_the_traces_of_all_ranks_in_its_output_directory(tmp_path: Path) -> None:
    for outcome in outcomes_on_ranks(_fail, 2, str(tmp_path)):
        assert outcome.error_type is not None
    for rank in range(2):
        assert (tmp_path / f"nccl_trace_rank_{rank}").read_text() == f"collectives of rank {rank}"


def test_steps_do_not_wait_for_the_check(tmp_path: Path) -> None:
    waits: list[list[int]] = []
    for is_on in (True, False):
        counts: list[int] = []

        class Count:
            changes_control = False

            def on_step_end(self, *_: Any, **__: Any) -> None:
                counts.append(record.count("sync"))  # noqa: B023 - called inside the loop

        with watching() as record:
            quiet_trainer(
                tmp_path / str(is_on),
                TokenModel(),
                token_samples(32),
                Count(),
                use_cpu=False,
                max_steps=5,
                per_device_train_batch_size=4,
                health_check=is_on,
            ).train()
        waits.append([after - counts[1] for after in counts[1:]])
    assert waits[0] == waits[1]
    assert waits[0][-1] == 0
