"""LoRA training: exact resume, checkpoints that PEFT reads, and clear errors for adapters without their base model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.finalize import finalize
from forgather.ml.sharded_checkpoint import load_checkpoint
from forgather.ml.trainer.trainer import Trainer
from tests.support.foreign_directories import content_of, moments_of, train_with_transformers
from tests.support.tiny_models import quiet_trainer, tiny_llama, token_samples, weights


def lora_llama(base_seed: int = 0, adapter_seed: int = 5, **options: Any) -> Any:
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "modules_to_save": ["lm_head"]}
    base, name = tiny_llama(base_seed), options.pop("adapter_name", "default")
    torch.manual_seed(adapter_seed)
    return get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM, **{**settings, **options}), adapter_name=name)


def lora_trainer(output_dir: Path, model: Any, trainer_class: Any = Trainer, **settings: Any) -> Trainer:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "seed": 3, **settings}
    trainer_options = options.pop("trainer_options", {})
    trainer_options = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.05}), **trainer_options}
    return quiet_trainer(
        output_dir, model, token_samples(16), trainer_class=trainer_class, trainer_options=trainer_options, **options
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("settings", [{}, {"checkpoint_layout": "output_dir", "async_save": True}], ids=str)
def test_resume_is_bit_exact(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = lora_trainer(tmp_path / "whole", lora_llama(), **settings)
    whole.train()
    lora_trainer(tmp_path / "parts", lora_llama(), **settings, max_steps=4).train()
    # Other adapters, so that all trained values must come from the checkpoint.
    resumed = lora_trainer(tmp_path / "parts", lora_llama(adapter_seed=9), **settings)
    resumed.train()
    assert resumed.state.global_step == 6
    assert same(weights(whole.unwrapped_model()), weights(resumed.unwrapped_model()))
    ours, theirs = (moments_of(one.unwrapped_model(), one.optimizer) for one in (whole, resumed))
    assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    assert not any("base_layer" in name for name in ours), "frozen parameters have no moments"


def test_step_equals_plain_torch(tmp_path: Path) -> None:
    """The loss over all targets of the batch, and gradients of the trained parameters only."""
    samples = token_samples(4)
    expected = lora_llama(lora_dropout=0.0).train()
    inputs, labels = (torch.stack([one[name] for one in samples]) for name in ("input_ids", "labels"))
    expected(input_ids=inputs, labels=labels).loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.0 if parameter.grad is None else 0.1 * parameter.grad
    trainer = quiet_trainer(tmp_path, lora_llama(lora_dropout=0.0), samples, max_steps=1, per_device_train_batch_size=4)
    trainer.train()
    trained = weights(trainer.unwrapped_model())
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(trained[name], tensor)
    assert not same(trained, weights(lora_llama(lora_dropout=0.0)))


@pytest.mark.parametrize("construct_on", ["default", "meta"])
def test_resume_with_model_init_builds_the_same_base_model(tmp_path: Path, construct_on: str) -> None:
    def model_init() -> Any:
        return lora_llama(None)  # type: ignore[arg-type] # drawn from the seed of the run

    for steps in (2, 4):
        trainer = lora_trainer(
            tmp_path,
            None,
            max_steps=steps,
            construct_model_on=construct_on,
            trainer_options={"model_init": model_init},
        )
        assert trainer.train().global_step == steps
    assert trainer.args.resume_from_checkpoint is not False


def test_peft_reads_the_checkpoint_and_the_export(tmp_path: Path) -> None:
    trainer = lora_trainer(tmp_path, lora_llama(), checkpoint_layout="output_dir")
    trainer.train()
    trainer.save_model(str(tmp_path / "exported"))
    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-6") and store.verify_checkpoint(last) == []
    trained = weights(trainer.unwrapped_model())
    for folder in (last, str(tmp_path / "exported")):
        assert same(weights(PeftModel.from_pretrained(tiny_llama(), folder)), trained)
    assert not (tmp_path / "exported" / "model.safetensors").exists()
    stored = sum(path.stat().st_size for path in (tmp_path / "checkpoint-6").glob("model*"))
    assert stored < sum(tensor.nbytes for tensor in trained.values()) / 2, "frozen weights are not stored"


def test_changed_base_model_is_an_error(tmp_path: Path) -> None:
    lora_trainer(tmp_path, lora_llama(), max_steps=2).train()
    with pytest.raises(CheckpointLoadError, match=r"differs from the base model of the checkpoint.*such as base_model"):
        lora_trainer(tmp_path, lora_llama(base_seed=1)).train()
    with pytest.raises(CheckpointLoadError, match=r"adapters do not fit.*modules_to_save"):
        lora_trainer(tmp_path, lora_llama(modules_to_save=None)).train()
    with pytest.raises(CheckpointLoadError, match=r"has shape \(2, 16\) in the checkpoint"):
        lora_trainer(tmp_path, lora_llama(r=4)).train()


def test_checkpoint_of_a_named_adapter_never_fills_a_plain_model(tmp_path: Path) -> None:
    # PEFT writes adapters with another name than "default" to a subfolder.
    lora_trainer(tmp_path, lora_llama(adapter_name="other"), max_steps=2).train()
    with pytest.raises(CheckpointError, match=r"only PEFT adapters \(other/adapter_config.json"):
        lora_trainer(tmp_path, tiny_llama()).train()
    with pytest.raises(CheckpointError, match="only PEFT adapters"):
        load_checkpoint(str(tmp_path / "checkpoints" / "checkpoint-2"), tiny_llama())


def test_directory_with_adapters_only_never_fills_a_plain_model(tmp_path: Path) -> None:
    trainer = lora_trainer(tmp_path / "run", lora_llama(), max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    ours = str(tmp_path / "run" / "checkpoints" / "checkpoint-2")
    for path in (ours, str(tmp_path / "adapter")):
        for use in (
            lambda path=path: lora_trainer(tmp_path / "new", tiny_llama(), resume_from_checkpoint=path).train(),
            lambda path=path: lora_trainer(tmp_path / "other", tiny_llama()).load_checkpoint(path),
            lambda path=path: load_checkpoint(path, tiny_llama()),
        ):
            with pytest.raises(CheckpointError, match=r"only PEFT adapters.*PeftModel.from_pretrained"):
                use()
    with pytest.raises(CheckpointError, match="only PEFT adapters"):
        finalize(ours, str(tmp_path / "final"))


def test_full_model_is_not_taken_for_adapters(tmp_path: Path) -> None:
    lora_trainer(tmp_path, tiny_llama(), max_steps=2).train()
    with pytest.raises(CheckpointLoadError, match=r"weights of a full model.*base model first"):
        lora_trainer(tmp_path, lora_llama()).train()


def test_transformers_lora_run_is_imported(tmp_path: Path) -> None:
    theirs = train_with_transformers(tmp_path, lora_llama(), lr_scheduler_type="linear")
    path = tmp_path / "checkpoint-4"
    before = content_of(path)
    trainer = quiet_trainer(
        tmp_path / "run",
        lora_llama(adapter_seed=9),
        token_samples(16),
        trainer_options={"optimizer_cls_and_kwargs": None},
        weight_decay=0.1,
        learning_rate=0.01,
        lr_scheduler_type="linear",
        max_steps=8,
    )
    trainer.load_checkpoint(str(path))
    assert theirs.model is not None
    assert same(weights(theirs.model), weights(trainer.unwrapped_model()))
    ours, others = moments_of(trainer.unwrapped_model(), trainer.optimizer), moments_of(theirs.model, theirs.optimizer)
    assert ours.keys() == others.keys() and all(same(ours[name], others[name]) for name in ours)
    assert trainer.state.global_step == 4 and trainer.train().global_step == 8
    assert content_of(path) == before


def test_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = lora_trainer(
        tmp_path,
        lora_llama(),
        trainer_options={"eval_dataset": token_samples(4)},
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None and not best.endswith("checkpoint-6"), "the loss rises"
    assert same(weights(PeftModel.from_pretrained(tiny_llama(), best)), weights(trainer.unwrapped_model()))
