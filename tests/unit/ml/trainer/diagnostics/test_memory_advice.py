"""Out-of-memory advice: proposals for a run, and the text about its memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from forgather.ml.distributed import DistributedError
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.diagnostics.failures import batch_line, out_of_memory_in
from forgather.ml.trainer.diagnostics.memory_advice import is_accepted, proposals
from forgather.ml.trainer.diagnostics.memory_use import MemoryUse, bytes_on, tensors_in
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples

GIB = 2**30
MOSTLY_ACTIVATIONS = MemoryUse(GIB, GIB, 2 * GIB, 0, 60 * GIB, 62 * GIB, 80 * GIB)
MOSTLY_STATE = MemoryUse(15 * GIB, 15 * GIB, 30 * GIB, 0, 70 * GIB, 72 * GIB, 80 * GIB)


def settings(tmp_path: Path, use: MemoryUse = MOSTLY_ACTIVATIONS, **arguments: Any) -> list[str]:
    """Return the proposed settings for a trainer with a model."""
    options = arguments.pop("options", {})
    trainer_class = arguments.pop("trainer_class", Trainer)
    model = arguments.pop("model", None)
    data = arguments.pop("data", token_samples(8))
    options = options if model else {"model_init": tiny_llama, **options}
    trainer = quiet_trainer(
        tmp_path, model, data, trainer_class=trainer_class, trainer_options=options, **{"max_steps": 1, **arguments}
    )
    if model is None:
        trainer.model = tiny_llama()
    return [proposal.setting for proposal in proposals(trainer, use)]


def test_all_settings_are_proposed_for_a_plain_run(tmp_path: Path) -> None:
    found = settings(tmp_path, per_device_train_batch_size=8)
    assert found[:5] == [
        "gradient_checkpointing=True",
        "per_device_train_batch_size=4 with gradient_accumulation_steps=2",
        "mixed_precision='bf16'",
        "fused_loss_factory=LinearCrossEntropyLoss",
        "enable_activation_offloading=True",
    ]
    assert found[-1] == "fuse_optim_with_backward=True"


def test_settings_for_the_larger_part_come_first(tmp_path: Path) -> None:
    found = settings(tmp_path, MOSTLY_STATE)
    assert found.index("fuse_optim_with_backward=True") < found.index("gradient_checkpointing=True")
    assert found[-1] == "FSDP2Trainer, PipelineTrainer or HybridTrainer"


def test_settings_that_are_on_are_not_proposed(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        mixed_precision="bf16",
        enable_activation_offloading=True,
        ema_decay=0.9,
        max_grad_norm=1.0,
        default_dtype="bfloat16",
        options={"compute_loss_func": CausalLoss()},
    )
    # Clipping refuses a step in the backward pass.
    assert found == ["shorter sequences", "ema_decay=None"]


def test_rejected_settings_are_not_proposed(tmp_path: Path) -> None:
    found = settings(tmp_path, fuse_optim_with_backward=True, max_grad_norm=None)
    assert not any("gradient_accumulation_steps" in setting or "fuse_optim" in setting for setting in found)
    found = settings(tmp_path, trainer_class=DDPTrainer, ddp={"static_graph": True, "find_unused_parameters": True})
    assert not any("accumulation" in one or "fused" in one or "fuse_optim" in one for one in found)
    # A ready model has its dtype already, and this one cannot recompute activations.
    found = settings(tmp_path, model=nn.Linear(2, 2))
    assert not any("default_dtype" in one or "checkpointing" in one or "fused_loss" in one for one in found)


def test_a_ready_dataloader_has_its_own_batch_size(tmp_path: Path) -> None:
    found = settings(tmp_path, data=DataLoader(token_samples(8), batch_size=2))  # type: ignore[arg-type]
    assert "a smaller batch size of the DataLoader that you passed" in found


def test_a_probe_does_not_change_the_trainer(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, nn.Linear(2, 2), token_samples(8), max_steps=1)
    before = trainer.args.to_dict()
    assert is_accepted(trainer, mixed_precision="bf16")
    assert not is_accepted(trainer, mixed_precision="fp8")
    assert trainer.args.to_dict() == before


def test_memory_is_shown_by_purpose() -> None:
    assert str(MOSTLY_ACTIVATIONS) == (
        "Allocated 60.00 GiB of 80.00 GiB: parameters 1.00 GiB, gradients 1.00 GiB, optimizer moments 2.00 GiB, "
        "activations and other tensors 56.00 GiB. Reserved but unused: 2.00 GiB."
    )


def test_shared_storages_count_once() -> None:
    tensor = torch.zeros(10)
    state = {"a": {"m": tensor, "n": [tensor[:5], torch.ones(2)]}, "step": 3}
    assert bytes_on(torch.device("cpu"), [*tensors_in(state), None]) == 48
    assert bytes_on(torch.device("meta"), tensors_in(state)) == 0


def test_batch_and_sequence_size_are_shown() -> None:
    args = TrainingArguments(per_device_train_batch_size=8)
    tail = "(per_device_train_batch_size=8, gradient_accumulation_steps=1)."
    batches = [{"x": torch.zeros(3), "input_ids": torch.zeros(8, size)} for size in (16, 32)]
    assert batch_line(args, batches) == f"Batch: 8 samples x 32 tokens {tail}"
    assert batch_line(args, [{"value": torch.zeros(8)}]) == f"Batch: 8 samples {tail}"
    assert batch_line(args, []) == f"Batch: {tail.strip('().')}."


def test_the_cause_of_a_distributed_error_is_found() -> None:
    cause = torch.OutOfMemoryError("out of memory")
    error = DistributedError.describing(cause, "evaluating a batch", 0)
    assert out_of_memory_in(error) is None
    error.__cause__ = cause
    assert out_of_memory_in(error) is cause
    assert out_of_memory_in(ValueError()) is None


def test_an_error_on_a_cpu_is_not_changed(tmp_path: Path) -> None:
    class Failing(nn.Linear):
        def forward(self, **_: Any) -> Any:  # type: ignore[override]
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        quiet_trainer(tmp_path, Failing(2, 2), token_samples(8), max_steps=1).train()
