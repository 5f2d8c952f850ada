"""Health check: nothing on the CPU, and its dtypes. Devices and links are tested on the rehearsal device."""

import torch

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.diagnostics.health import carries, device_problem, dtypes_of


def test_dtypes_of_training_are_checked() -> None:
    assert dtypes_of(TrainingArguments()) == [torch.float32]
    assert dtypes_of(TrainingArguments(mixed_precision="bf16")) == [torch.float32, torch.bfloat16]
    assert dtypes_of(TrainingArguments(param_precision="bf16_master")) == [torch.float32, torch.bfloat16]
    assert dtypes_of(TrainingArguments(default_dtype="float16")) == [torch.float32, torch.float16]


def test_products_are_exact_in_all_precisions() -> None:
    assert device_problem(torch.device("cpu"), [torch.float32, torch.bfloat16, torch.float16]) is None


def test_a_failing_device_is_a_problem_not_an_error() -> None:
    # The meta device has no values to compare.
    problem = device_problem(torch.device("meta"), [torch.float32])
    assert problem is not None and "the device failed with" in problem


def test_a_process_without_a_group_has_no_links() -> None:
    assert not carries("cuda")
