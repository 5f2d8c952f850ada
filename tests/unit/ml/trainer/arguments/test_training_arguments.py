"""Training arguments: defaults, conversion of values, and messages for rejected values."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import SchedulerType

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.trainer.arguments.training_arguments import (
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    arguments_from,
)
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import IntervalStrategy
from tests.support.tiny_models import ScalarModel, quiet_trainer, scalars


def test_defaults_are_the_documented_ones() -> None:
    args = TrainingArguments()
    expected: dict[str, Any] = {
        "output_dir": "tmp_trainer",
        "per_device_train_batch_size": 16,
        "num_train_epochs": 1,
        "max_steps": -1,
        "seed": -1,
        "epoch_train_steps": 100000,
        "eval_strategy": "no",
        "eval_steps": 100,
        "logging_strategy": "steps",
        "logging_steps": 50,
        "save_strategy": "steps",
        "save_steps": 1000,
        "save_total_limit": 2,
        "resume_from_checkpoint": True,
        "lr_scheduler_type": "linear",
        "learning_rate": 5e-5,
        "max_grad_norm": None,
        "metric_for_best_model": "loss",
        "preserve_n_best": 1,
        "max_eval_steps": -1,
        "construct_model_on": "default",
        "on_save_error": "raise",
        "shuffle": True,
        "token_weighted_loss": True,
        "gc_threshold": 0.5,
    }
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_strategy": "sometimes"}, ["eval_strategy='sometimes'", "'no', 'steps', 'epoch'"]),
        ({"logging_steps": 0}, ["logging_steps=0", "1 or more"]),
        ({"save_steps": -1}, ["save_steps=-1", "1 or more"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0", "1 or more"]),
        ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size=0", "1 or more"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm=-1.0", "0 or more"]),
        ({"learning_rate": -1e-3}, ["learning_rate=-0.001", "0 or more"]),
        ({"logging_steps": 2.5}, ["logging_steps=2.5", "float", "expected int"]),
        ({"logging_steps": True}, ["logging_steps=True", "bool", "expected int"]),
        ({"max_steps": "many"}, ["max_steps='many'", "str", "expected int"]),
        ({"seed": None}, ["seed=None", "NoneType", "expected int"]),
        ({"shuffle": "perhaps"}, ["shuffle='perhaps'", "str", "expected bool"]),
        ({"max_grad_norm": "big"}, ["max_grad_norm='big'", "expected float or None."]),
        ({"output_dir": 7}, ["output_dir=7", "int", "expected str"]),
        ({"checkpoint_components": "model"}, ["checkpoint_components='model'", "str", "expected list"]),
        ({"lr_scheduler_type": "zigzag"}, ["lr_scheduler_type='zigzag'", "'linear'", "'cosine'"]),
        ({"mixed_precision": "int8"}, ["mixed_precision='int8'", "None, 'no', 'bf16', 'fp16'"]),
        ({"float32_matmul_precision": "low"}, ["float32_matmul_precision='low'", "'highest', 'high', 'medium'"]),
        ({"default_dtype": "float12"}, ["default_dtype='float12'", "bfloat16"]),
        ({"default_dtype": "int8"}, ["default_dtype='int8'", "floating point"]),
        ({"construct_model_on": "moon"}, ["construct_model_on='moon'", "'default', 'meta', 'device'"]),
        ({"on_save_error": "ignore"}, ["on_save_error='ignore'", "'raise', 'warn'"]),
        ({"preserve_n_best": 0}, ["preserve_n_best=0", "1 or more"]),
        ({"adam_beta1": 1.0}, ["adam_beta1=1.0", "less than 1"]),
        ({"adam_beta2": -0.1}, ["adam_beta2=-0.1", "at least 0"]),
        ({"max_eval_steps": 0}, ["max_eval_steps=0", "-1 for all"]),
        ({"dataloader_prefetch_factor": 2}, ["dataloader_prefetch_factor=2", "dataloader_num_workers"]),
        ({"default_dtype": "float8_e4m3fn"}, ["default_dtype='float8_e4m3fn'", "16 bits or more"]),
        *(
            ({name: float("nan")}, [f"{name}=nan", "set a number"])
            for name in ("max_grad_norm", "learning_rate", "weight_decay", "num_train_epochs", "gc_threshold")
        ),
        *(
            ({name: float("inf")}, [f"{name}=inf", "set a finite number"])
            for name in ("learning_rate", "weight_decay", "adam_epsilon", "gc_threshold")
        ),
        *(
            ({name: 10**25}, [f"{name}={10**25}", "at most 2**63 - 1"])
            for name in (
                "save_steps",
                "eval_steps",
                "logging_steps",
                "max_steps",
                "warmup_steps",
                "seed",
                "save_total_limit",
            )
        ),
        ({"seed": -(10**5000)}, ["seed=an integer of 16610 bits", "at most 2**63 - 1"]),
        ({"skip_samples": [10**25]}, [f"skip_samples={10**25}", "at most 2**63 - 1"]),
        ({"save_total_limit": 0}, ["save_total_limit=0", "1 or more", "None keeps all"]),
        ({"save_total_limit": -1}, ["save_total_limit=-1", "1 or more", "None keeps all"]),
        ({"max_steps": -5}, ["max_steps=-5", "number of steps, or -1"]),
        ({"num_train_epochs": 0}, ["num_train_epochs=0", "above 0, or -1 for no limit"]),
        ({"num_train_epochs": -3}, ["num_train_epochs=-3", "above 0, or -1 for no limit"]),
        ({"num_train_epochs": float("inf")}, ["num_train_epochs=inf", "above 0, or -1 for no limit"]),
        ({"watch": {"step_timeout": float("nan")}}, ["step_timeout=nan", "set a number"]),
        ({"adam_epsilon": -1.0}, ["adam_epsilon=-1.0", "0 or more"]),
        ({"save_steps": float("inf")}, ["save_steps=inf", "float", "expected int"]),
        ({"device": "nope"}, ["device='nope'", "'cuda:1'"]),
        ({"dynamo_recompile_limit": 0}, ["dynamo_recompile_limit=0", "1 or more"]),
    ],
)
def test_wrong_values_are_rejected_with_the_allowed_ones(settings: dict[str, Any], words: list[str]) -> None:
    for make in (lambda: TrainingArguments(**settings), lambda: arguments_from(TrainingArguments, settings)):
        with pytest.raises(ValueError) as error:
            make()
        assert all(word in str(error.value) for word in words), error.value


def test_largest_periods_and_a_length_that_max_steps_overrides_train(tmp_path: Path) -> None:
    periods = dict.fromkeys(
        ("save_steps", "logging_steps", "eval_steps", "warmup_steps", "save_total_limit"), 2**63 - 1
    )
    trainer = quiet_trainer(
        tmp_path, ScalarModel(), scalars(1), **periods, max_steps=2, num_train_epochs=0, max_grad_norm=float("inf")
    )
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fuse_optim_with_backward": True, "max_grad_norm": 1.0}, ["max_grad_norm=1.0", "norm"]),
        (
            {"fuse_optim_with_backward": True, "gradient_accumulation_steps": 2},
            ["gradient_accumulation_steps=2", "applied and freed"],
        ),
        ({"fuse_optim_with_backward": True, "mixed_precision": "fp16"}, ["mixed_precision='fp16'", "GradScaler"]),
        (
            {"fp8_recipe": "tensorwise", "qat_recipe": "int4-weight-only"},
            ["fp8_recipe='tensorwise'", "qat_recipe='int4"],
        ),
        ({"activation_memory_budget": 0.5}, ["activation_memory_budget=0.5", "torch_compile=True"]),
        ({"load_best_model_at_end": True}, ["load_best_model_at_end=True", "eval_strategy='no'"]),
        ({"preserve_best_model": True}, ["preserve_best_model=True", "eval_strategy='no'"]),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "no"},
            ["load_best_model_at_end=True", "save_strategy='no'"],
        ),
        (
            {"preserve_best_model": True, "eval_on_save": True, "save_strategy": "no"},
            ["preserve_best_model=True", "save_strategy='no'"],
        ),
        ({"use_cpu": True, "device": "cuda:1"}, ["use_cpu=True", "device='cuda:1'"]),
        (
            {"mixed_precision": "fp16", "default_dtype": "float16"},
            ["mixed_precision='fp16'", "default_dtype", "float32"],
        ),
        ({"metric_for_best_model": "ema_loss"}, ["metric_for_best_model='ema_loss'", "eval_ema=True"]),
    ],
)
def test_impossible_combinations_are_rejected(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        TrainingArguments(**settings)
    assert all(word in str(error.value) for word in words), error.value


class WithOwnState(Trainer):
    """Trainer that declares an additional component."""

    def get_state_components(self) -> list[StateComponent]:
        return [*super().get_state_components(), StateComponent("own", self.rng, SharingPattern.GLOBAL)]


@pytest.mark.parametrize("name", ["checkpoint_components", "skip_checkpoint_components"])
def test_unknown_components_are_rejected(tmp_path: Path, name: str) -> None:
    model = ScalarModel()
    settings: dict[str, Any] = {name: ["optimiser"]}
    message = f"^{name} names the unknown component 'optimiser'.*'optimizer'"
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, model, scalars(1), **settings)
    own = quiet_trainer(tmp_path, model, scalars(1), trainer_class=WithOwnState, **settings)
    with pytest.raises(ValueError, match=message):
        own.train()
    assert model.weight.item() == 1.0
    quiet_trainer(tmp_path, model, scalars(1), trainer_class=WithOwnState, **{name: ["own"]}).train()


def test_state_sharing_lists_the_actual_components(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(1), ema_decay=0.5)
    trainer.train()
    assert [component.key for component in trainer.get_state_components()] == list(trainer.state_sharing)


def test_unknown_keys_are_rejected_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"no argument 'learning_rat'\. Did you mean 'learning_rate'\?"):
        arguments_from(TrainingArguments, {"learning_rat": 1.0})
    with pytest.raises(ValueError, match=r"no argument 'zzz'\.$"):
        arguments_from(TrainingArguments, {"zzz": 1.0})


def test_non_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"args must be \S+\.TrainingArguments or a dict of its fields, not \S+list"):
        arguments_from(TrainingArguments, [])  # type: ignore[arg-type]


def test_values_of_a_dict_are_converted_to_the_field_types() -> None:
    args = arguments_from(
        TrainingArguments,
        {"max_steps": "5", "learning_rate": "1e-3", "use_cpu": "true", "num_train_epochs": 2, "save_total_limit": None},
    )
    assert (args.max_steps, args.learning_rate, args.use_cpu, args.save_total_limit) == (5, 1e-3, True, None)
    assert isinstance(args.max_steps, int) and isinstance(args.learning_rate, float)
    assert isinstance(args.num_train_epochs, float)


def test_paths_devices_dtypes_and_enums_are_converted_to_strings() -> None:
    args = TrainingArguments(
        output_dir=Path("a") / "b",  # type: ignore[arg-type]
        device=torch.device("cpu"),  # type: ignore[arg-type]
        default_dtype=torch.bfloat16,  # type: ignore[arg-type]
        eval_strategy=IntervalStrategy.EPOCH,  # type: ignore[arg-type]
        resume_from_checkpoint=Path("c"),  # type: ignore[arg-type]
    )
    assert (args.output_dir, args.device, args.default_dtype) == ("a/b", "cpu", "torch.bfloat16")
    assert (args.eval_strategy, args.resume_from_checkpoint) == ("epoch", "c")


def test_arguments_of_a_base_class_are_converted() -> None:
    args = arguments_from(TrainingArguments, MinimalTrainingArguments(max_steps=3))
    assert isinstance(args, TrainingArguments) and args.max_steps == 3
    base = arguments_from(BaseTrainingArguments, TrainingArguments(max_steps=4))
    assert base.max_steps == 4


def test_copy_is_independent_and_equal() -> None:
    args = TrainingArguments(max_steps=3, metric_for_best_model="accuracy", greater_is_better=True)
    copy = args.copy()
    assert copy == args and copy is not args
    copy.max_steps = 4
    assert args.max_steps == 3


def test_transformers_names_for_the_best_model_are_aliases() -> None:
    args = TrainingArguments(metric_for_best_model="accuracy", greater_is_better=True)
    assert (args.best_model_metric, args.best_model_greater_is_better) == ("accuracy", True)
    ours = TrainingArguments(best_model_metric="score", best_model_greater_is_better=False)
    assert (ours.best_model_metric, ours.best_model_greater_is_better) == ("score", False)
    same = TrainingArguments(metric_for_best_model="eval_f1", best_model_metric="f1")
    assert same.best_model_metric == "f1"
    with pytest.raises(ValueError, match="metric_for_best_model='f1' and best_model_metric='score' contradict"):
        TrainingArguments(metric_for_best_model="f1", best_model_metric="score")
    with pytest.raises(ValueError, match="greater_is_better=True and best_model_greater_is_better=False contradict"):
        TrainingArguments(greater_is_better=True, best_model_greater_is_better=False)


@pytest.mark.parametrize(("metric", "greater"), [("loss", False), ("accuracy", True)])
def test_callbacks_read_the_best_model_metric_under_both_names(tmp_path: Path, metric: str, greater: bool) -> None:
    args = quiet_trainer(tmp_path, ScalarModel(), None, best_model_metric=metric).args
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)


def test_every_transformers_schedule_is_accepted_unless_it_needs_a_metric() -> None:
    need_a_metric = {"reduce_lr_on_plateau", "greedy"}
    for schedule in SchedulerType:
        if schedule.value in need_a_metric:
            with pytest.raises(ValueError, match="lr_scheduler_type"):
                TrainingArguments(lr_scheduler_type=schedule.value)
        else:
            assert TrainingArguments(lr_scheduler_type=schedule.value).lr_scheduler_type == schedule.value


def test_every_argument_is_keyword_only() -> None:
    for cls in (MinimalTrainingArguments, BaseTrainingArguments, TrainingArguments):
        assert all(field.kw_only for field in dataclasses.fields(cls))
    with pytest.raises(TypeError):
        TrainingArguments("out")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "hint"), [("bf16", "mixed_precision='bf16'"), ("evaluation_strategy", "it is called eval_strategy")]
)
def test_different_transformers_names_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"no argument '{name}': .*{hint}"):
        arguments_from(TrainingArguments, {name: True})


def test_transformers_arguments_object_is_rejected_with_a_hint() -> None:
    given: Any = type("TrainingArguments", (), {"__module__": "transformers.training_args"})()
    with pytest.raises(ValueError, match=r"not transformers\.training_args\.TrainingArguments\. .*as a dict"):
        arguments_from(TrainingArguments, given)


def test_best_model_works_with_evaluations_at_saves() -> None:
    assert TrainingArguments(load_best_model_at_end=True, eval_on_save=True).load_best_model_at_end


def test_use_cpu_and_device_cpu_may_be_combined() -> None:
    assert TrainingArguments(use_cpu=True, device="cpu").device == "cpu"


def test_copy_shares_no_mutable_values() -> None:
    args = TrainingArguments(lr_scheduler_kwargs={"num_cycles": 2})
    copied = args.copy()
    assert copied == args
    assert copied.lr_scheduler_kwargs is not None
    copied.lr_scheduler_kwargs["num_cycles"] = 3
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
