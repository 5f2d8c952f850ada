"""replica_check_steps: a bit that flips on one rank is found at the next check, and named on every rank."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import ReplicationError
from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, ddp_trainer, fsdp2_trainer, run
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, quiet_trainer, saved_steps, tiny_llama, token_samples
from tests.support.tiny_parallel import Outcome, captured_logs, raised

NAME = "model.layers.1.mlp.up_proj.weight"
HOST = socket.gethostname()
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, bit: int = 0) -> None:
    """Flip one bit of one element."""
    local: Tensor = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    element = local.view(-1)[5:6].view(INTEGERS[local.itemsize])
    element.bitwise_xor_(1 << bit)


class Flipper(Recorder):
    """Callback that flips a bit of a parameter on one rank, after a step."""

    changes_control = False

    def __init__(self, culprit: int, step: int, name: str = NAME, bit: int = 0) -> None:
        super().__init__(on_step_end=self._flip)
        self._culprit, self._step, self._name, self._bit = culprit, step, name, bit

    def _flip(self, state: Any, trainer: Any, **_: Any) -> None:
        if state.global_step == self._step and dist.get_rank() == self._culprit:
            flip(dict(trainer._named_parameters())[self._name], self._bit)


def train_and_flip(path: Path, culprit: int, step: int, every: int, **settings: Any) -> tuple[Outcome, int]:
    """Train with DDP; return the error and the step that raised it."""
    flipper = Flipper(culprit, step)
    options = {"save_strategy": "steps", "save_steps": 10, "max_steps": 12, **settings}
    trainer = ddp_trainer(path, tiny_llama(), token_samples(80), flipper, replica_check_steps=every, **options)
    return raised(trainer.train), trainer.state.global_step


def test_flipped_bit_is_found_at_the_next_check_and_named_on_every_rank(tmp_path: Path) -> None:
    results = run_on_ranks(train_and_flip, 3, tmp_path, 1, 2, 3)
    assert len(set(results)) == 1, "the same error at the same step"
    (error_type, message), step = results[0]
    assert error_type == "ReplicationError"
    assert "differ after step 3 (replica_check_steps=3; it is the first check of this process)" in message
    assert f"\n  rank 1 (host {HOST}) differs from ranks 0, 2 in {NAME}\n" in message
    assert f"forgather replay {tmp_path} --step 3 --each-rank --nproc 3" in message
    assert step <= 5, "the digest of step 3 travels with the batches of the next steps"
    assert saved_steps(tmp_path) == []


def test_two_ranks_have_no_majority_and_are_both_named(tmp_path: Path) -> None:
    # A bit that flips right after the check of step 4.
    for (_, message), _ in run_on_ranks(train_and_flip, 2, tmp_path, 1, 4, 4):
        assert "differ after step 8 (replica_check_steps=4; the check of step 4 found no difference)" in message
        told = f"rank 0 (host {HOST}) and rank 1 (host {HOST}) differ from each other (there is no majority) in {NAME}"
        assert told in message


def flip_before_save(path: Path) -> tuple[Outcome, int]:
    # The check of step 4 is still on its way when step 4 is saved.
    return train_and_flip(path, 0, 3, 4, save_steps=2, max_steps=4)


def test_a_check_on_its_way_ends_before_the_save(tmp_path: Path) -> None:
    for (error_type, message), step in run_on_ranks(flip_before_save, 2, tmp_path):
        assert error_type == "ReplicationError" and "differ after step 4" in message and step == 4
    assert saved_steps(tmp_path) == [2]


def flip_at_the_end(path: Path) -> Outcome:
    return train_and_flip(path, 0, 3, 4, save_strategy="no", max_steps=4)[0]


def test_the_check_of_the_last_step_counts_without_a_save(tmp_path: Path) -> None:
    for error_type, message in run_on_ranks(flip_at_the_end, 2, tmp_path):
        assert error_type == "ReplicationError" and "differ after step 4" in message


class MixedModel(nn.Module):
    """Model with parameters of many dtypes; only the first is trained."""

    DTYPES = (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.int64, torch.bool, torch.complex64),
    )

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.DTYPES:
            values = torch.full((12,), 1.0).to(dtype)
            trains = dtype is torch.float32
            self.register_parameter(name_of(dtype), nn.Parameter(values, requires_grad=trains))
        # A NaN is compared by its bits.
        self.weights_float64.data[0] = torch.nan

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weights_float32 * input_ids.float().mean()).sum()}


def name_of(dtype: torch.dtype) -> str:
    return f"weights_{dtype}".replace("torch.", "")


def flip_each_dtype(path: Path) -> dict[str, Outcome]:
    outcomes = {}
    data = [{"input_ids": sample["input_ids"]} for sample in token_samples(40)]
    for dtype in (None, *MixedModel.DTYPES):
        name = "" if dtype is None else name_of(dtype)
        # The updates of the trained parameter would round its last bit away.
        flipper = Flipper(1, 0 if dtype is None else 1, name, bit=22 if dtype is torch.float32 else 0)
        # gloo cannot broadcast all of these dtypes.
        settings = {"replica_check_steps": 2, "max_steps": 4, "ddp": {"init_sync": False}}
        trainer = ddp_trainer(path / name, MixedModel(), data, flipper, **settings)
        outcomes[name] = raised(trainer.train)
    return outcomes


def test_one_bit_of_any_dtype_is_found(tmp_path: Path) -> None:
    for outcomes in run_on_ranks(flip_each_dtype, 2, tmp_path):
        assert outcomes.pop("") == ("", "")
        for name, (error_type, message) in outcomes.items():
            assert error_type == "ReplicationError" and f"(there is no majority) in {name}\n" in message, name


def flip_hybrid(path: Path, culprit: int) -> tuple[Outcome, list[str]]:
    names: list[str] = []

    def flip_own(state: Any, trainer: Any, **_: Any) -> None:
        if state.global_step == 1:
            name, parameter = trainer._named_parameters()[0]
            names.append(name)
            if dist.get_rank() == culprit:
                flip(parameter)

    recorder = Recorder(on_step_end=flip_own)
    settings = {"dp_size": 2, "pp_size": 2, "n_microbatches": 2, "per_device_train_batch_size": 2, "max_steps": 6}
    trainer = trainer_of(
        HybridTrainer, path, llama, token_samples(60), recorder, schedule="1f1b", replica_check_steps=2, **settings
    )
    return raised(trainer.train), names


@pytest.mark.parametrize(("culprit", "pair"), [(2, (0, 2)), (1, (1, 3))])
def test_flipped_bit_in_a_copy_of_a_stage_names_its_replicas(tmp_path: Path, culprit: int, pair: Any) -> None:
    results = run_on_ranks(flip_hybrid, 4, tmp_path, culprit)
    assert len({outcome for outcome, _ in results}) == 1
    (error_type, message), _ = results[0]
    (name,) = results[culprit][1]
    assert error_type == "ReplicationError" and "differ after step 2" in message
    told = " and ".join(f"rank {rank} (host {HOST})" for rank in pair)
    assert f"\n  {told} differ from each other (there is no majority) in {name}\n" in message
    assert message.count("differ from each other") == 1, "the other stage is not reported"


def flip_shard(path: Path) -> Outcome:
    trainer = fsdp2_trainer(
        path,
        tiny_llama,
        token_samples(40),
        Flipper(3, 1),
        max_steps=4,
        fsdp2={"replicate_size": 2},
        replica_check_steps=2,
    )
    return raised(trainer.train)


def test_flipped_bit_in_a_shard_of_one_replica_is_found(tmp_path: Path) -> None:
    outcomes = set(run_on_ranks(flip_shard, 4, tmp_path))
    assert len(outcomes) == 1
    ((error_type, message),) = outcomes
    assert error_type == "ReplicationError", message
    assert f"rank 1 (host {HOST}) and rank 3 (host {HOST}) differ from each other" in message and NAME in message


def flip_accelerated(path: Path) -> Outcome:
    options = {"accelerator": Accelerator(cpu=True)}
    trainer = quiet_trainer(
        path,
        tiny_llama(),
        token_samples(40),
        Flipper(0, 1),
        trainer_class=AccelTrainer,
        trainer_options=options,
        replica_check_steps=2,
        max_steps=4,
    )
    return raised(trainer.train)


def test_flipped_bit_is_found_with_accelerate(tmp_path: Path) -> None:
    for error_type, message in run_on_ranks(flip_accelerated, 2, tmp_path):
        assert error_type == "ReplicationError" and f"in {NAME}" in message


def train_resumed(path: Path, every: int) -> tuple[Result, Result, list[int]]:
    """Train 7 steps at once, and in two processes' worth of steps; return both results and the steps of checks."""
    steps: list[int] = []

    def note(state: Any, trainer: Any, **_: Any) -> None:
        if trainer.replica_check is not None and state.global_step in trainer.replica_check.steps_under_way:
            steps.append(state.global_step)

    def trainer(name: str, **settings: Any) -> DDPTrainer:
        options = {"save_strategy": "steps", "save_steps": 4, "logging_strategy": "steps", "logging_steps": 1}
        data = token_samples(60)
        return ddp_trainer(
            path / f"{name} {every}",
            tiny_llama(),
            data,
            Recorder(on_step_end=note),
            momentum=0.9,
            gradient_accumulation_steps=2,
            replica_check_steps=every,
            **{**options, **settings},
        )

    whole = run(trainer("whole", max_steps=7))
    steps.clear()
    trainer("parts", max_steps=4).train()
    resumed = run(trainer("parts", max_steps=7, resume_from_checkpoint=True))
    return whole, resumed, steps


def test_checks_change_no_bit_and_keep_their_steps_after_a_resume(tmp_path: Path) -> None:
    without, with_checks = (
        run_on_ranks(train_resumed, 2, tmp_path, 0)[0],
        run_on_ranks(train_resumed, 2, tmp_path, 3)[0],
    )
    assert with_checks[2] == [3, 6] and without[2] == []
    for plain, checked in zip(without[:2], with_checks[:2], strict=True):
        assert plain.losses == checked.losses and plain.norms == checked.norms
        assert all(torch.equal(checked.weights[name], tensor) for name, tensor in plain.weights.items())


def refused(path: Path) -> dict[str, str]:
    cases: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
        "single": (Trainer, {}),
        "fsdp2": (FSDP2Trainer, {}),
        "pipeline": (PipelineTrainer, {"n_microbatches": 1}),
        "sharded stages": (HybridTrainer, {"dp_strategy": "shard", "pp_size": 2, "n_microbatches": 1}),
        "post-local SGD": (DDPTrainer, {"post_local_sgd": {"enabled": True}}),
    }
    return {
        name: raised(
            lambda cls=kind, settings=settings: trainer_of(  # type: ignore[misc]
                cls, path, llama, token_samples(8), replica_check_steps=2, **settings
            )
        )[1]
        for name, (kind, settings) in cases.items()
    }


def test_trainers_without_replicas_refuse_the_check(tmp_path: Path) -> None:
    messages = refused(tmp_path)
    assert "between two averages the replicas differ on purpose" in messages.pop("post-local SGD")
    for name, message in messages.items():
        assert "replica_check_steps has no effect with" in message and "every parameter exists once" in message, name


def test_one_process_of_ddp_says_once_that_the_check_has_no_effect(tmp_path: Path) -> None:
    with captured_logs() as lines:
        trainer = quiet_trainer(
            tmp_path, tiny_llama(), token_samples(8), trainer_class=DDPTrainer, replica_check_steps=1, max_steps=3
        )
        trainer.train()
    assert sum("replica_check_steps=1 has no effect in this job" in line for line in lines) == 1
    with pytest.raises(ValueError, match="replica_check_steps=-1 cannot be used"):
        trainer.arguments_class(output_dir=str(tmp_path), replica_check_steps=-1)
    assert issubclass(ReplicationError, RuntimeError)
