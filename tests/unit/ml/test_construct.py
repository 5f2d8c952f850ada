"""Dtypes by name."""

from typing import Any

import pytest
import torch

from forgather.ml.construct import torch_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("float", torch.float32),
        ("fp32", torch.float32),
        ("int64", torch.int64),
        (torch.float64, torch.float64),
    ],
)
def test_common_dtype_names_are_accepted(name: str | torch.dtype, dtype: torch.dtype) -> None:
    assert torch_dtype(name) is dtype


@pytest.mark.parametrize("name", ["float17", "nn", "", None])
def test_unknown_dtype_name_lists_the_choices(name: Any) -> None:
    with pytest.raises(ValueError, match=r"choose one of .*bf16, bfloat16,.*float32"):
        torch_dtype(name)
