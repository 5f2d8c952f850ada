"""AccelTrainer: training with an Accelerator equals training without one, and its checkpoints move between trainers."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ParallelismConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from tests.support.data_parallel import Result, assert_same_training, ddp_trainer, run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, tiny_llama, token_samples

SETTINGS: dict[str, Any] = {
    "max_steps": 20,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "max_grad_norm": 0.5,
    "gradient_accumulation_steps": 2,
    "shuffle": True,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
}
GLOBAL_BATCH = 8
NUM_SAMPLES = 53
"""Not a multiple of the batch, nor of a rank's share of it: the last round of an epoch has less."""


def new_accelerator(**options: Any) -> Accelerator:
    """Return an Accelerator as in a new process."""
    _forget_accelerators()
    return Accelerator(cpu=True, **options)


def _forget_accelerators() -> None:
    """Reset the state that accelerate keeps in classes for the lifetime of the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    yield
    _forget_accelerators()


def accel_trainer(output_dir: Path, model: nn.Module | None, *callbacks: Any, **settings: Any) -> AccelTrainer:
    accelerator = settings.pop("accelerator", None) or new_accelerator()
    options = {"accelerator": accelerator, **settings.pop("trainer_options", {})}
    train = settings.pop("train", None) or token_samples(NUM_SAMPLES)
    batch_size = settings.pop("per_device_train_batch_size", GLOBAL_BATCH // accelerator.num_processes)
    trainer = quiet_trainer(
        output_dir,
        model,
        train,
        *callbacks,
        trainer_class=AccelTrainer,
        trainer_options=options,
        per_device_train_batch_size=batch_size,
        **{**SETTINGS, **settings},
    )
    assert isinstance(trainer, AccelTrainer)
    return trainer


def plain_trainer(output_dir: Path, model: nn.Module | None = None, *callbacks: Any, **settings: Any) -> Trainer:
    train = token_samples(NUM_SAMPLES)
    settings = {"per_device_train_batch_size": GLOBAL_BATCH, **SETTINGS, **settings}
    return quiet_trainer(output_dir, model or tiny_llama(), train, *callbacks, **settings)


def moments(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.optimization.state.state_dict()["state"]
    return {name: entry["momentum_buffer"].clone() for name, entry in state.items()}


def assert_identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# --- the same training


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation and clipping": ({}, {}),
    "an accelerator that would accumulate too": ({"gradient_accumulation_steps": 4}, {}),
    "not clipped, other options of accelerate": (
        {"step_scheduler_with_optimizer": False},
        {"max_grad_norm": None, "gradient_accumulation_steps": 1},
    ),
    "adamw": ({}, {}),
}


def options_of(case: str) -> dict[str, Any]:
    # The large epsilon keeps rounding noise in zero gradients from becoming steps.
    adamw = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2})}
    return {"eval_dataset": token_samples(11, seed=3), **(adamw if case == "adamw" else {})}


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_like_a_single_device(case: str, tmp_path: Path) -> None:
    results = run_on_ranks(_train_case, 2, tmp_path / "parts", case)
    options = options_of(case)
    trainer = plain_trainer(tmp_path / "whole", per_device_eval_batch_size=4, trainer_options=options, **CASES[case][1])
    whole = run(trainer)
    for parts, eval_loss, rate, rates in results:
        assert_same_training(parts, whole)
        assert eval_loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
        assert rate == trainer.lr_scheduler.get_last_lr()
        assert rates == [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
        for name in ("total_tokens", "train_samples", "effective_batch_size", "epoch", "step"):
            assert parts.metrics[name] == whole.metrics[name], name
        assert parts.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=1e-6)


def _train_case(output_dir: Path, case: str) -> tuple[Result, float, list[float], list[float]]:
    accelerator = new_accelerator(**CASES[case][0])
    num_steps = accelerator.gradient_accumulation_steps
    options = options_of(case)
    trainer = accel_trainer(
        output_dir,
        tiny_llama(),
        accelerator=accelerator,
        per_device_eval_batch_size=3,
        trainer_options=options,
        **CASES[case][1],
    )
    result = run(trainer)
    assert accelerator.gradient_accumulation_steps == num_steps
    assert isinstance(trainer.model, DistributedDataParallel)
    assert isinstance(trainer.optimizer, AcceleratedOptimizer) and isinstance(
        trainer.lr_scheduler, AcceleratedScheduler
    )
    rates = [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
    return result, trainer.evaluate()["eval_loss"], trainer.lr_scheduler.get_last_lr(), rates


def test_gradients_are_reduced_once_per_step(tmp_path: Path) -> None:
    for reduced in run_on_ranks(_count_reductions, 2, tmp_path):
        assert reduced == [False, False, True, False, False, True, True], (
            "the last window of the epoch should have one batch"
        )


def _count_reductions(output_dir: Path) -> list[bool]:
    seen: list[bool] = []
    trainer = accel_trainer(output_dir, TokenModel(), gradient_accumulation_steps=3, max_steps=3, logging_strategy="no")
    backward = trainer.accelerator.backward

    def watched(loss: Tensor) -> None:
        seen.append(trainer.model.require_backward_grad_sync)
        assert trainer._should_sync_gradients() == seen[-1]
        backward(loss)

    trainer.accelerator.backward = watched
    trainer.train()
    return seen


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_single_process_trains_like_trainer(precision: str, tmp_path: Path) -> None:
    accelerator = new_accelerator(mixed_precision=precision)
    if precision == "fp16":
        _let_float16_work_on_the_cpu(accelerator)
    settings = {"max_grad_norm": None, "lr_scheduler_type": "constant"}
    trainer = accel_trainer(tmp_path / "accelerator", tiny_llama(), accelerator=accelerator, **settings)
    with_accelerator = run(trainer)
    without = run(plain_trainer(tmp_path / "plain", mixed_precision=precision, **settings))
    assert with_accelerator.losses == without.losses and with_accelerator.norms == without.norms
    assert_identical(with_accelerator.weights, without.weights)
    assert "forward" not in vars(trainer.unwrapped_model()), "autocast was left in the user's model"
    assert {one.sharing_pattern for one in trainer.get_state_components() if one.key != "rng"} == {
        SharingPattern.GLOBAL,
        SharingPattern.REPLICATED,
    }


def _let_float16_work_on_the_cpu(accelerator: Accelerator) -> None:
    """Enable float16 with a GradScaler on the CPU, as accelerate does on a GPU."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_loss_scale_is_resumed_and_does_not_outlive_a_run(max_grad_norm: float | None, tmp_path: Path) -> None:
    results = []
    for resume in (False, str(tmp_path / "run/checkpoints/checkpoint-4")):
        accelerator = new_accelerator(mixed_precision="fp16")
        _let_float16_work_on_the_cpu(accelerator)
        # The scale overflows at the first step, and again after it has grown.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        trainer = accel_trainer(
            tmp_path / "run",
            None,
            accelerator=accelerator,
            max_steps=6,
            max_grad_norm=max_grad_norm,
            save_strategy="steps",
            save_steps=4,
            resume_from_checkpoint=resume,
            trainer_options={"model_init": tiny_llama},
        )
        results.append((run(trainer), accelerator.scaler.state_dict()))
    assert results[0][1] == results[1][1] and results[0][1]["scale"] < 2.0**20
    assert None in results[0][0].norms
    assert_identical(results[0][0].weights, results[1][0].weights)
    again = trainer.train(resume_from_checkpoint=False)
    assert again.metrics["train_loss"] == results[0][0].metrics["train_loss"]


def test_bf16_on_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(_train_in_bf16, 2, tmp_path)
    whole = run(plain_trainer(tmp_path / "whole", TokenModel(), mixed_precision="bf16"))
    assert first.losses == second.losses == pytest.approx(whole.losses, rel=1e-2)
    assert_identical(first.weights, second.weights)
    assert all(tensor.dtype is torch.float32 for tensor in first.weights.values())


def _train_in_bf16(output_dir: Path) -> Result:
    dtypes: set[torch.dtype] = set()
    trainer = accel_trainer(output_dir, TokenModel(), accelerator=new_accelerator(mixed_precision="bf16"))
    trainer.unwrapped_model().head.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))  # type: ignore[union-attr]
    result = run(trainer)
    assert dtypes == {torch.bfloat16}
    return result


# --- resume and moves


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_is_bit_exact(num_workers: int, tmp_path: Path) -> None:
    straight = run_on_ranks(_train_and_save, 2, tmp_path / "straight", num_workers, False)
    checkpoint = str(tmp_path / "straight/checkpoints/checkpoint-6")
    resumed = run_on_ranks(_train_and_save, 2, tmp_path / "resumed", num_workers, checkpoint)
    for one, other in zip(straight, resumed, strict=True):
        assert_identical(one["weights"], other["weights"])
        assert_identical(one["moments"], other["moments"])
        assert one["log"][6:] == other["log"][6:] and len(one["log"]) == 10
        assert one["position"] == other["position"]
        assert one["random"] == other["random"]
    assert straight[0]["random"] != straight[1]["random"]


def _train_and_save(output_dir: Path, num_workers: int, resume: bool | str) -> dict[str, Any]:
    # 53 samples in windows of 16: the checkpoint is in the middle of the second epoch.
    trainer = accel_trainer(
        output_dir,
        tiny_llama(attention_dropout=0.2),
        train=NoisySamples(),
        max_steps=10,
        save_strategy="steps",
        save_steps=6,
        dataloader_num_workers=num_workers,
        resume_from_checkpoint=resume,
    )
    result = run(trainer)
    log = [
        (record["step"], record["loss"], record["grad_norm"])
        for record in trainer.state.log_history
        if "loss" in record
    ]
    return {
        "weights": result.weights,
        "moments": moments(trainer),
        "log": log,
        "position": trainer.train_dataloader.state_dict(),
        "random": (random.random(), numpy.random.rand(), torch.rand(3).tolist()),
    }


class NoisySamples:
    """Token sequences with another hidden label at each read."""

    def __init__(self) -> None:
        self._samples = token_samples(NUM_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {name: tensor.clone() for name, tensor in self._samples[index].items()}
        sample["labels"][int(torch.randint(6, ()))] = -100
        return sample


def test_single_device_checkpoint_resumes_on_ranks(tmp_path: Path) -> None:
    whole = run(plain_trainer(tmp_path, max_steps=8, save_strategy="steps", save_steps=5))
    checkpoint = str(tmp_path / "checkpoints/checkpoint-5")
    for result in run_on_ranks(_go_on, 2, tmp_path / "ranks", checkpoint):
        assert_same_training(result, whole._replace(losses=whole.losses[5:], norms=whole.norms[5:]))
        assert result.metrics["total_tokens"] == whole.metrics["total_tokens"]


def _go_on(output_dir: Path, checkpoint: str) -> Result:
    return run(accel_trainer(output_dir, tiny_llama(seed=5), max_steps=8, resume_from_checkpoint=checkpoint))


def test_checkpoint_of_ranks_moves_to_other_trainers_and_back(tmp_path: Path) -> None:
    (saved, saved_moments), _ = run_on_ranks(_train_by_accelerator_then_ddp, 2, tmp_path)
    checkpoint = str(tmp_path / "accelerator/checkpoints/checkpoint-4")
    with pytest.raises(RuntimeError, match=r"'dataset' was saved as per_rank by 2 ranks.*skip_checkpoint_components"):
        plain_trainer(tmp_path / "plain", max_steps=4).train(resume_from_checkpoint=checkpoint)
    trainer = plain_trainer(
        tmp_path / "skipped", tiny_llama(seed=5), max_steps=4, skip_checkpoint_components=["dataset"]
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    assert_identical(dict(trainer.unwrapped_model().state_dict()), saved)
    assert_identical(moments(trainer), saved_moments)


def _train_by_accelerator_then_ddp(output_dir: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # Use a schedule with rates that do not depend on the number of planned steps.
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "save_strategy": "steps", "max_steps": 4}
    trainer = accel_trainer(output_dir / "accelerator", tiny_llama(), **settings)
    saved, saved_moments = run(trainer).weights, moments(trainer)
    ddp_settings = {**SETTINGS, **settings, "per_device_train_batch_size": 4, "dispatch_batches": False, "max_steps": 6}
    ddp = ddp_trainer(output_dir / "ddp", tiny_llama(seed=5), token_samples(NUM_SAMPLES), **ddp_settings)
    ddp.train(resume_from_checkpoint=str(output_dir / "accelerator/checkpoints/checkpoint-4"))
    settings |= {"max_steps": 8, "save_strategy": "no"}
    checkpoint = str(output_dir / "ddp/checkpoints/checkpoint-6")
    back = run(accel_trainer(output_dir / "back", tiny_llama(seed=6), resume_from_checkpoint=checkpoint, **settings))
    straight = run(accel_trainer(output_dir / "straight", tiny_llama(), **settings))
    assert_same_training(back, straight._replace(losses=straight.losses[6:], norms=straight.norms[6:]))
    return saved, saved_moments


def test_changed_batch_size_changes_the_length_of_the_schedule(tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5}
    plain_trainer(tmp_path, **settings).train()
    settings |= {
        "resume_from_checkpoint": str(tmp_path / "checkpoints/checkpoint-5"),
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
    }
    expected = plain_trainer(tmp_path, **settings)
    trainer = accel_trainer(tmp_path, tiny_llama(), **settings)
    assert_same_training(run(trainer), run(expected))
    assert trainer.lr_scheduler.get_last_lr() == expected.lr_scheduler.get_last_lr()
    assert isinstance(trainer.lr_scheduler, AcceleratedScheduler)


# --- what it declares, and how it is used


def test_sharing_patterns_of_components(tmp_path: Path) -> None:
    for patterns, groups in run_on_ranks(_declared, 2, tmp_path):
        replicated, per_rank = SharingPattern.REPLICATED, SharingPattern.PER_RANK
        assert patterns == {
            "model": (replicated, True),
            "optimizer": (replicated, False),
            "scheduler": (replicated, False),
            "trainer": (replicated, False),
            "dataset": (per_rank, False),
            "rng": (per_rank, False),
        }
        assert groups == {}


def _declared(output_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = accel_trainer(output_dir, TokenModel(), max_steps=1)
    trainer.train()
    components = trainer.get_state_components()
    patterns = {one.key: (one.sharing_pattern, one.validate_replication) for one in components}
    return patterns, trainer.get_process_groups()


def test_arguments_equal_trainer_arguments() -> None:
    assert set(vars(AccelTrainingArguments())) == set(vars(TrainingArguments()))


def test_trainer_can_be_reused(tmp_path: Path) -> None:
    first, second = run_on_ranks(_evaluate_and_train_twice, 2, tmp_path)
    assert first == second


def _evaluate_and_train_twice(output_dir: Path) -> list[float]:
    accelerator = new_accelerator()
    options = {"model_init": TokenModel, "eval_dataset": token_samples(5, seed=3)}
    trainer = accel_trainer(output_dir, None, accelerator=accelerator, max_steps=3, trainer_options=options)
    losses = [trainer.evaluate()["eval_loss"]]
    for _ in range(2):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] != losses[1] == losses[2]
    assert [len(held) for held in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1] * 3
    return losses


def test_interrupted_accumulation_leaves_nothing_behind(tmp_path: Path) -> None:
    calls: list[int] = []

    def fail(**_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("interrupted")

    callback = Recorder(on_forward_backward_end=fail)
    trainer = accel_trainer(tmp_path / "again", tiny_llama(), callback, max_steps=4)
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer.train()
    assert_same_training(run(trainer), run(plain_trainer(tmp_path / "plain", max_steps=4)))


def test_prepared_objects_are_unwrapped(tmp_path: Path) -> None:
    for result in run_on_ranks(_train_prepared, 2, tmp_path / "ranks"):
        assert_same_training(result, run(plain_trainer(tmp_path, lr_scheduler_type="constant", max_steps=5)))


def _train_prepared(output_dir: Path) -> Result:
    accelerator = new_accelerator()
    plain = tiny_llama()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    options = {"optimizer": optimizer, "lr_scheduler": accelerator.prepare(schedule)}
    trainer = accel_trainer(output_dir, model, accelerator=accelerator, max_steps=5, trainer_options=options)
    assert trainer.model is plain
    result = run(trainer)
    assert len(accelerator._optimizers) == 1
    return result


class NormalizedModel(TokenModel):
    """Model with buffers that each rank updates from its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
        return logits


@pytest.mark.parametrize("occasion", ["save", "evaluation"])
def test_buffers_changed_by_training_are_synchronised(occasion: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(_train_with_buffers, 2, tmp_path, occasion)
    assert_identical(first, second)


def _train_with_buffers(output_dir: Path, occasion: str) -> dict[str, Tensor]:
    options = {"eval_dataset": token_samples(5, seed=3)}
    strategy = "steps" if occasion == "save" else "no"
    trainer = accel_trainer(output_dir, NormalizedModel(), max_steps=3, save_strategy=strategy, trainer_options=options)
    trainer.train()
    if occasion == "evaluation":
        trainer.evaluate()
    return dict(trainer.unwrapped_model().state_dict())


# --- what it refuses


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_accelerator_with_unsupported_distributed_type_is_rejected(kind: str, tmp_path: Path) -> None:
    accelerator = new_accelerator()
    accelerator.state.distributed_type = DistributedType(kind)
    with pytest.raises(ValueError, match=f"set up for {kind}.*Create the Accelerator without"):
        accel_trainer(tmp_path, TokenModel(), accelerator=accelerator)


def test_unsupported_parallelism_is_rejected(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=r"full model\. Remove parallelism_config"):
        accel_trainer(tmp_path, TokenModel(), accelerator=accelerator)


def test_non_accelerator_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass accelerator=Accelerator\(\)"):
        AccelTrainer(args={"output_dir": str(tmp_path)}, accelerator=Accelerator, model=TokenModel())


@pytest.mark.parametrize(
    ("name", "value"), [("mixed_precision", "bf16"), ("mixed_precision", "fp16"), ("device", "meta")]
)
def test_arguments_that_contradict_the_accelerator_are_rejected(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}='{value}' contradicts the accelerator"):
        accel_trainer(tmp_path, TokenModel(), **{"use_cpu": False, name: value})


def test_single_process_accelerator_in_a_multi_process_job_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = new_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of 2 \(WORLD_SIZE\).*cpu=True"):
        accel_trainer(tmp_path, TokenModel(), accelerator=accelerator)


def test_environment_that_contradicts_the_accelerator_is_rejected(tmp_path: Path) -> None:
    options = {"distributed_env": StaticDistributedEnvironment(rank=1, world_size=2)}
    with pytest.raises(ValueError, match="rank 1 of 2, but the accelerator has rank 0 of 1"):
        accel_trainer(tmp_path, TokenModel(), trainer_options=options)


def test_norm_of_bfloat16_gradients_is_computed_in_float32(tmp_path: Path) -> None:
    model = tiny_llama()
    settings = {"max_steps": 2, "max_grad_norm": 0.01, "gradient_accumulation_steps": 1}
    trainers = [
        plain_trainer(tmp_path / "plain", copy.deepcopy(model).bfloat16(), **settings),
        accel_trainer(tmp_path / "accelerated", copy.deepcopy(model).bfloat16(), **settings),
    ]
    plain, accelerated = [
        [record["grad_norm"] for record in trainer.train() and trainer.state.log_history if "grad_norm" in record]
        for trainer in trainers
    ]
    assert plain == accelerated and len(plain) == 2
    assert all(float(torch.tensor(norm).bfloat16()) != norm for norm in plain)
