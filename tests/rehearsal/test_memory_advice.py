"""Out-of-memory errors on the rehearsal device: memory by purpose, batch, and settings that help."""

import gc
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.rehearsal.test_health import nccl_group
from tests.support.pipelines import llama
from tests.support.ranks import outcomes_on_ranks
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples

GIB = 2**30


def fail_at(trainer: Trainer[Any], call: int) -> None:
    """Let the last module of this rank run out of memory in a forward pass, with a large activation allocated."""
    count = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += module.training
        if count > call:
            held = torch.empty(GIB // 16, device=next(module.parameters()).device)
            raise torch.OutOfMemoryError(f"CUDA out of memory with {held.numel()} elements")

    class Install:
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            modules = [one for one in trainer._forward_modules().modules() if isinstance(one, nn.Linear)]
            modules[-1].register_forward_pre_hook(hook)

    trainer.add_callback(Install())


def trainer_of(path: Path, trainer_class: type[Trainer[Any]] = Trainer, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {"use_cpu": False, "max_steps": 4, "per_device_train_batch_size": 4}
    options = {"model_init": tiny_llama, **settings.pop("options", {})}
    optimizer = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {})}
    return quiet_trainer(
        path,
        None,
        token_samples(64),
        trainer_class=trainer_class,
        trainer_options={**optimizer, **options},
        **{**defaults, **settings},
    )


def test_error_lists_memory_batch_and_settings(tmp_path: Path) -> None:
    # Tensors of earlier tests in this process would count as activations.
    gc.collect()
    trainer = trainer_of(tmp_path)
    fail_at(trainer, 2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory with")
    assert "Out of memory on rank 0 on host" in text and "device cuda:0" in text and "in step 2" in text
    assert "Batch: 4 samples x 6 tokens (per_device_train_batch_size=4, gradient_accumulation_steps=1)" in text
    for part in ("parameters", "gradients", "optimizer moments"):
        assert part in text
    activations = re.search(r"activations and other tensors (\d+)\.\d* MiB", text)
    assert activations is not None and 256 <= int(activations[1]) < 320, text
    for setting in ("gradient_checkpointing=True", "per_device_train_batch_size=2 with", "mixed_precision='bf16'"):
        assert f"\n  {setting}" in text
    assert "fused_loss_factory=LinearCrossEntropyLoss" in text and "enable_activation_offloading=True" in text
    snapshot = tmp_path / "memory_snapshot_rank0.pickle"
    # Not every device can take snapshots.
    assert snapshot.exists() == hasattr(torch._C, "_cuda_memorySnapshot") == (str(snapshot) in text)
    assert not snapshot.exists() or "segments" in pickle.loads(snapshot.read_bytes())


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)

    class Stop:
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("other")

    trainer.add_callback(Stop())
    with pytest.raises(KeyError, match="other"):
        trainer.train()


def _fail_on_last_rank(path: str, kind: str) -> None:
    with nccl_group() as environment:
        options: dict[str, Any] = {"distributed_env": environment}
        if kind == "pipeline":
            options["model_init"] = llama
            trainer = trainer_of(Path(path), PipelineTrainer, options=options, n_microbatches=2)
        else:
            trainer = trainer_of(Path(path), DDPTrainer, options=options)
        if environment.rank == 1:
            fail_at(trainer, 1)
        trainer.train()


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
def test_rank_without_memory_explains_the_error(tmp_path: Path, kind: str) -> None:
    outcome = outcomes_on_ranks(_fail_on_last_rank, 2, str(tmp_path), kind)[1]
    assert outcome.error_type == "OutOfMemoryError"
    text = str(outcome.error_message)
    assert text.startswith("CUDA out of memory")
    assert "Out of memory on rank 1 on host" in text and "device cuda:1" in text
    assert "gradient_checkpointing=True" in text and "fuse_optim_with_backward" not in text
    assert ("n_microbatches=4" in text) == (kind == "pipeline")
    assert ("ddp.shard_optimizer=True: divides the moments between 2 ranks" in text) == (kind == "ddp")
