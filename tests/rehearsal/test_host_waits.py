"""Host waits on the rehearsal device: none between logs, for each trainer."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.loss import LinearCrossEntropyLoss
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.pipeline.schedules import SCHEDULES
from forgather.ml.trainer.step_loss.known_masks import positions_of, to_device
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, tied_gpt2
from tests.support.ranks import run_on_ranks
from tests.support.rehearsal import watching
from tests.support.rehearsed_runs import Rehearsed, assert_no_waits, rehearse, samples
from tests.support.tiny_models import Recorder, tiny_llama
from tests.support.tiny_parallel import raised

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "mask of ones": {"data": samples(mask="ones")},
    "padding": {"data": samples(mask="padded"), "gradient_checkpointing": True},
    "positions": {"data": samples(positions="plain"), "gradient_checkpointing": True},
    "packed sequences": {"data": samples(positions="packed"), "gradient_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "offloading": {"enable_activation_offloading": True},
}


@pytest.mark.parametrize("case", CASES)
def test_one_device_does_not_wait_between_logs(tmp_path: Path, case: str) -> None:
    assert_no_waits(rehearse(tmp_path, Trainer, {"model_init": tiny_llama}, **CASES[case]))


def test_a_fused_loss_does_not_wait_between_logs(tmp_path: Path) -> None:
    assert_no_waits(
        rehearse(tmp_path, Trainer, {"model_init": tiny_llama, "fused_loss_factory": LinearCrossEntropyLoss})
    )


def test_a_padding_token_does_not_make_the_host_wait(tmp_path: Path) -> None:
    # Models such as GPT-2 look for it in every batch without a mask, to warn once.
    def gpt2() -> nn.Module:
        model = tied_gpt2(2)
        model.config.pad_token_id = 0
        return model

    assert_no_waits(rehearse(tmp_path, Trainer, {"model_init": gpt2}))


def test_fp16_waits_only_for_the_flag_of_the_step_before(tmp_path: Path) -> None:
    # The learning rate of a step depends on whether GradScaler skipped the step before.
    run = rehearse(tmp_path, Trainer, {"model_init": tiny_llama}, mixed_precision="fp16")
    assert run.hazards == 0
    assert run.waits == [1] * len(run.waits)
    assert all("nonfinite.py" in where and name == "event.synchronize" for name, where in run.where)


def _ddp(path: str) -> list[Rehearsed]:
    names = ("plain", "gradient checkpointing", "padding", "bf16")
    return [
        rehearse(f"{path}/{name}", DDPTrainer, {"model_init": tiny_llama}, **CASES[name], dispatch_batches=dispatches)
        for dispatches in (False, True)
        for name in names
    ]


def test_ddp_does_not_wait_between_logs(tmp_path: Path) -> None:
    for runs in run_on_ranks(_ddp, 2, str(tmp_path)):
        for run in runs:
            assert_no_waits(run)


def _checked_replicas(path: str) -> tuple[list[Rehearsed], str]:
    options = {"model_init": tiny_llama}
    runs = [
        rehearse(f"{path}/{every}", DDPTrainer, options, replica_check_steps=every, **CASES[name])
        for every, name in ((1, "plain"), (2, "bf16"))
    ]

    def flip(state: Any, trainer: Any, **_: Any) -> None:
        if state.global_step == 1 and trainer.team.rank == 1:
            weight = trainer.unwrapped_model().get_parameter("model.norm.weight")
            weight.data.view(torch.int32).bitwise_xor_(2**20)

    _, message = raised(
        lambda: rehearse(f"{path}/flipped", DDPTrainer, options, Recorder(on_step_end=flip), replica_check_steps=2)
    )
    return runs, message


def test_the_replica_check_does_not_make_the_host_wait(tmp_path: Path) -> None:
    for runs, message in run_on_ranks(_checked_replicas, 2, str(tmp_path)):
        for run in runs:
            assert_no_waits(run)
        assert "The replicas of the model differ after step 2" in message and "in model.norm.weight" in message


SHARDED: dict[str, dict[str, Any]] = {
    "average": {"ema_decay": 0.9},
    "accumulation": {"gradient_accumulation_steps": 2},
    "skipping": {"nonfinite_grad": "skip"},
    "master weights": {"param_precision": "bf16_master"},
}


def _sharded_moments(path: str) -> tuple[list[Rehearsed], Rehearsed]:
    options, ddp = {"model_init": tiny_llama}, {"shard_optimizer": True}
    runs = [rehearse(f"{path}/{name}", DDPTrainer, options, ddp=ddp, **case) for name, case in SHARDED.items()]
    return runs, rehearse(f"{path}/fp16", DDPTrainer, options, ddp=ddp, mixed_precision="fp16")


def test_sharded_moments_do_not_make_the_host_wait(tmp_path: Path) -> None:
    for runs, scaled in run_on_ranks(_sharded_moments, 2, str(tmp_path)):
        for run in runs:
            assert_no_waits(run)
        # GradScaler's flag of the step before, as on one device.
        assert scaled.hazards == 0 and scaled.waits == [1] * len(scaled.waits)


def _pipelines(path: str) -> list[Rehearsed]:
    return [
        rehearse(
            f"{path}/{traits.name}",
            PipelineTrainer,
            {"model_init": llama, "pipe_schedule_factory": schedule},
            n_microbatches=4,
            data=samples(mask=None if number % 2 else "padded"),
        )
        for number, (schedule, traits) in enumerate(SCHEDULES.items())
    ]


def test_no_pipeline_schedule_waits_between_logs(tmp_path: Path) -> None:
    for runs in run_on_ranks(_pipelines, 2, str(tmp_path)):
        assert len(runs) == 7
        for run in runs:
            assert_no_waits(run)


FUSED_LOSS = {"fused_loss_factory": LinearCrossEntropyLoss}
PIPELINE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient checkpointing": ({}, CASES["gradient checkpointing"]),
    "fused loss": (FUSED_LOSS, {}),
    "fused loss, checkpointing and a mask": (FUSED_LOSS, CASES["padding"]),
    "mask of ones": ({}, CASES["mask of ones"]),
    "packed sequences": ({}, CASES["packed sequences"]),
    "bf16": ({}, CASES["bf16"]),
    "master weights": ({}, {"param_precision": "bf16_master"}),
}


def _pipeline_cases(path: str) -> dict[str, Rehearsed]:
    return {
        name: rehearse(f"{path}/{name}", PipelineTrainer, {"model_init": llama, **options}, n_microbatches=4, **case)
        for name, (options, case) in PIPELINE_CASES.items()
    }


def test_no_pipeline_recipe_waits_between_logs(tmp_path: Path) -> None:
    for runs in run_on_ranks(_pipeline_cases, 2, str(tmp_path)):
        for run in runs.values():
            assert_no_waits(run)


def _hybrid(path: str) -> list[Rehearsed]:
    options = {"model_init": llama, "pipe_schedule_factory": "1f1b"}
    cases: list[dict[str, Any]] = [{}, {"dp_strategy": "shard", **CASES["accumulation"], **CASES["offloading"]}]
    return [
        rehearse(f"{path}/{number}", HybridTrainer, options, n_microbatches=4, dp_size=2, pp_size=2, **settings)
        for number, settings in enumerate(cases)
    ]


def test_hybrid_training_does_not_wait_between_logs(tmp_path: Path) -> None:
    for runs in run_on_ranks(_hybrid, 4, str(tmp_path)):
        for run in runs:
            assert_no_waits(run)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("column", ["none", "ones", "padded", "plain", "packed"])
def test_known_masks_give_the_same_logits_without_a_wait(column: str, attention: str) -> None:
    model = tiny_llama(attn_implementation=attention).to("cuda")
    mask, positions = (column if column in kinds else None for kinds in (("ones", "padded"), ("plain", "packed")))
    batch = {
        name: torch.stack([sample[name] for sample in samples(mask, positions, 6)])
        for name in samples(mask, positions, 1)[0]
        if name != "labels"
    }
    known = to_device(batch, torch.device("cuda"))
    unknown = {name: tensor.clone() for name, tensor in known.items()}
    for rows in (slice(0, 6), slice(0, 1), slice(1, 3)):
        logits, waits = _logits(
            model, {name: tensor[rows] for name, tensor in known.items()}, positions_of(model, known)
        )
        assert waits == 0
        expected, waits = _logits(model, {name: tensor[rows] for name, tensor in unknown.items()}, nullcontext())
        assert waits > 0 or (attention == "eager" and mask is not None)
        assert torch.equal(logits, expected)


def _logits(model: Any, inputs: dict[str, Tensor], context: AbstractContextManager[None]) -> tuple[Tensor, int]:
    with watching() as record, torch.no_grad(), context:
        logits = model(**inputs, use_cache=False).logits
    return logits, record.count("sync")
