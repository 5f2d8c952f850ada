"""Adapters outside of a PeftModel, and strategies without adapters, are rejected with a clear error."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from forgather.ml.trainer.hybrid.hybrid_trainer import HybridTrainer
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, tiny_llama, token_samples
from tests.support.tiny_parallel import Outcome, raised

LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
TRAINERS = [PipelineTrainer, HybridTrainer]


def lora_llama() -> Any:
    return get_peft_model(tiny_llama(), LoraConfig(task_type=TaskType.CAUSAL_LM, **LORA))


def prompt_llama() -> Any:
    """Return a model with prompt tuning, which has no PEFT layer inside."""
    return get_peft_model(tiny_llama(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2))


def llama_with_added_adapter() -> LlamaForCausalLM:
    model = tiny_llama()
    model.add_adapter(LoraConfig(**LORA))
    return model


def injected() -> nn.Module:
    model: nn.Module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["head"]), TokenModel())
    return model


def inside_another() -> nn.Module:
    return nn.ModuleDict({"wrapped": lora_llama()})


KINDS = [
    pytest.param(llama_with_added_adapter, "LlamaForCausalLM has adapters from add_adapter", id="add_adapter"),
    pytest.param(injected, "Linear is a BaseTunerLayer", id="injected"),
    pytest.param(inside_another, "PeftModelForCausalLM is a PeftModel", id="inside another module"),
]


def arguments(output_dir: Path | str) -> dict[str, Any]:
    return {"output_dir": str(output_dir), "use_cpu": True}


@pytest.mark.parametrize(("make", "found"), KINDS)
def test_model_with_adapters_is_rejected(tmp_path: Path, make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(ValueError, match=r"PEFT adapters.*merge_and_unload\(\)") as caught:
        Trainer(args=arguments(tmp_path), model=make())
    assert found in str(caught.value)
    assert "checkpoints and exports would lack the adapters" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_prompt_learning_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="virtual tokens"):
        Trainer(args=arguments(tmp_path), model=prompt_llama())
    trainer = quiet_trainer(tmp_path, None, token_samples(2), trainer_options={"model_init": prompt_llama})
    with pytest.raises(ValueError, match="virtual tokens"):
        trainer.train()


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_other_trainers_reject_adapters(tmp_path: Path, trainer_class: Any) -> None:
    with pytest.raises(ValueError, match=r"PEFT adapters.*Trainer, DDPTrainer, FSDP2Trainer or AccelTrainer"):
        trainer_class(args=arguments(tmp_path), model=lora_llama())


@pytest.mark.parametrize(("make", "found"), KINDS)
@pytest.mark.parametrize("construct_on", ["default", "device"])
def test_model_init_that_builds_adapters_is_rejected(
    tmp_path: Path, make: Callable[[], nn.Module], found: str, construct_on: str
) -> None:
    options = {"model_init": make}
    trainer = quiet_trainer(tmp_path, None, token_samples(2), trainer_options=options, construct_model_on=construct_on)
    with pytest.raises(ValueError, match=r"PEFT adapters.*merge_and_unload\(\)") as caught:
        trainer.train()
    assert found in str(caught.value)


def train_stages(output_dir: str) -> Outcome:
    trainer = PipelineTrainer(
        args=arguments(output_dir), model_init=lora_llama, train_dataset=token_samples(4), default_callbacks=False
    )
    return raised(trainer.train)


def test_pipeline_rejects_model_init_that_builds_adapters(tmp_path: Path) -> None:
    outcomes = run_on_ranks(train_stages, 2, str(tmp_path))
    assert all("PEFT adapters" in message for _, message in outcomes), outcomes


def test_model_with_merged_adapters_trains_and_is_exported(tmp_path: Path) -> None:
    model = lora_llama().merge_and_unload().requires_grad_()
    trainer = quiet_trainer(tmp_path, model, token_samples(2))
    trainer.train()
    trainer.save_model(str(tmp_path / "exported"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_peft_layers_with_deleted_adapters_are_rejected(tmp_path: Path) -> None:
    """Their weights still have names with `base_layer`."""
    model = llama_with_added_adapter()
    model.delete_adapter("default")
    assert any("base_layer" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="Linear is a BaseTunerLayer"):
        Trainer(args=arguments(tmp_path), model=model)


def test_model_init_keeps_its_name(tmp_path: Path) -> None:
    trainer = Trainer(args=arguments(tmp_path), model_init=tiny_llama)
    assert trainer.model_init is not None and trainer.model_init.__name__ == "tiny_llama"


def test_adapter_check_does_not_import_peft(tmp_path: Path) -> None:
    program = (
        "import sys; from torch import nn; from forgather.ml.trainer.trainer import Trainer;"
        f"Trainer(args={arguments(tmp_path)!r}, model=nn.Linear(2, 2)); print('peft' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split()[-1] == "False"
