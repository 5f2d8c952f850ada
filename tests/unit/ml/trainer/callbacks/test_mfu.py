"""MFU: peaks by the names that torch reports, precision of a run, and FLOPs of attention."""

import pytest
import torch
from torch import nn

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.mfu import attention_flops, peak_flops, peak_of_run, precision_of
from tests.support.pipelines import tied_gpt2
from tests.support.tiny_models import tiny_llama


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA GeForce RTX 3090", "fp32", 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA RTX A1000", "bf16", None),
        ("Rehearsal GPU", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(name: str, precision: str, tera: float | None) -> None:
    assert peak_flops(name, precision) == (None if tera is None else pytest.approx(tera * 1e12))


def test_precision_follows_autocast_weights_and_tf32() -> None:
    model = nn.Linear(2, 2)
    assert precision_of(TrainingArguments(mixed_precision="bf16"), model) == "bf16"
    assert precision_of(TrainingArguments(), model) == "fp32"
    assert precision_of(TrainingArguments(), model.to(torch.float16)) == "fp16"
    assert precision_of(TrainingArguments(), model.to(torch.float64)) is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert precision_of(TrainingArguments(), model.to(torch.float32)) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_attention_counts_both_products_of_every_layer() -> None:
    # 2 layers, width 16, 10 positions; forward 2 x 2, and twice that in the backward pass.
    assert attention_flops(tiny_llama(), 10) == 12 * 2 * 16 * 10
    # GPT-2 has other names in its configuration.
    model = tied_gpt2(2)
    assert attention_flops(model, 10) == 12 * 2 * model.config.n_embd * 10
    assert attention_flops(nn.Linear(2, 2), 10) == 0


def test_a_cpu_has_no_peak() -> None:
    assert peak_of_run(TrainingArguments(), torch.device("cpu"), nn.Linear(2, 2)) is None
