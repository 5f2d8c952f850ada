"""LoRA training on ranks: every strategy equals one process, resumes exactly, and writes adapters that PEFT reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor

from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.hugging_face.test_adapter_training import lora_llama, lora_trainer, same
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama, token_samples, weights
from tests.support.tiny_parallel import Outcome, raised

STRATEGIES: dict[str, Any] = {"ddp": DDPTrainer, "fsdp2": FSDP2Trainer, "accelerate": AccelTrainer}


def full_weights(trainer: Any) -> dict[str, Tensor]:
    state = trainer.unwrapped_model().state_dict().items()
    return {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in state}


def made(output_dir: str, strategy: str, max_steps: int, **settings: Any) -> Any:
    cls = STRATEGIES.get(strategy, Trainer)
    options: dict[str, Any] = {"eval_dataset": token_samples(4)}
    if cls is AccelTrainer:
        options["accelerator"] = Accelerator(cpu=True)
    return lora_trainer(
        Path(output_dir),
        lora_llama(lora_dropout=0.0),
        cls,
        max_steps=max_steps,
        per_device_train_batch_size=4 if cls is Trainer else 2,
        checkpoint_layout="output_dir",
        trainer_options=options,
        **settings,
    )


def train_twice(output_dir: str, strategy: str) -> list[dict[str, Tensor]]:
    """Return the weights after four steps, and after two steps and a resume; the best weights are loaded at the end."""
    whole = made(f"{output_dir}/whole", strategy, 4)
    whole.train()
    made(f"{output_dir}/parts", strategy, 2).train()
    resumed = made(f"{output_dir}/parts", strategy, 4)
    resumed.train()
    resumed.save_model(f"{output_dir}/exported")
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    chosen = made(f"{output_dir}/best", strategy, 6, **best)
    chosen.train()
    return [full_weights(one) for one in (whole, resumed, chosen)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    trainer = made(str(tmp_path_factory.mktemp("one")), "single", 4)
    trainer.train()
    return full_weights(trainer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_equal_one_process_and_resume_exactly(
    tmp_path: Path, strategy: str, reference: dict[str, Tensor]
) -> None:
    first, second = run_on_ranks(train_twice, 2, str(tmp_path), strategy)
    whole, resumed, best = first
    assert all(same(one, other) for one, other in zip(first, second, strict=True))
    assert same(whole, resumed)
    for name, tensor in reference.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=1e-5)
    for folder in ("exported", "parts/checkpoint-4"):
        assert same(weights(PeftModel.from_pretrained(tiny_llama(), tmp_path / folder)), whole)
    assert not same(best, whole)
    assert same(
        weights(PeftModel.from_pretrained(tiny_llama(), sorted((tmp_path / "best").glob("checkpoint-*"))[0])), best
    )


def test_sharded_adapters_resume_in_one_process_and_back(tmp_path: Path) -> None:
    run_on_ranks(train_steps, 2, str(tmp_path), 2)
    one = made(str(tmp_path), "single", 4)
    one.train()
    assert one.args.resume_from_checkpoint is not False
    steps = run_on_ranks(train_steps, 2, str(tmp_path), 6)
    assert steps == [6, 6]
    other = lora_trainer(tmp_path, lora_llama(base_seed=1, lora_dropout=0.0), checkpoint_layout="output_dir")
    with pytest.raises(Exception, match="base model differs"):
        other.train()


def train_steps(output_dir: str, max_steps: int) -> int:
    trainer = made(output_dir, "fsdp2", max_steps)
    return int(trainer.train().global_step)


def built_by_function(output_dir: str) -> Outcome:
    options = {"model_init": lora_llama}
    return raised(lora_trainer(Path(output_dir), None, FSDP2Trainer, trainer_options=options).train)


def test_sharded_trainer_refuses_a_function_that_builds_adapters(tmp_path: Path) -> None:
    outcomes = run_on_ranks(built_by_function, 2, str(tmp_path))
    assert all("does not take it from model_init" in message for _, message in outcomes), outcomes
