"""Fused losses train like the plain loss with every trainer, and never materialise logits."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
)

from forgather.ml.loss import CausalLoss, LinearCrossEntropyLoss, RescaleLoss
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.step_loss.fused import unfused as unfused_loss
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.recipes.fused_losses import FUSED, OPT, SETTINGS, losses, plain_fused_loss
from tests.support.data_parallel import Result, assert_same_training, ddp_trainer, run
from tests.support.pipelines import llama, tied_gpt2, trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import (
    IGNORED,
    VOCAB_SIZE,
    Recorder,
    quiet_trainer,
    tiny_llama,
    token_samples,
    weights,
)

# A vocabulary of 32 has five chunks.
IN_CHUNKS = functools.partial(LinearCrossEntropyLoss, chunk_size=7)
MODELS = {"llama": functools.partial(llama, 4), "gpt2": functools.partial(tied_gpt2, 4)}


class Bias(nn.Module):
    """Custom model that returns hidden states on request; its head has a bias."""

    can_return_hidden_states = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.head = nn.Linear(8, VOCAB_SIZE)

    def forward(self, input_ids: Tensor, return_hidden_states: bool = False) -> Tensor:
        hidden = torch.tanh(self.embedding(input_ids))
        result: Tensor = hidden if return_hidden_states else self.head(hidden)
        return result

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("build", [tiny_llama, tied_gpt2, Bias])
def test_fused_loss_trains_and_evaluates_like_unfused(build: Any, tmp_path: Path) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        results.append(losses(tmp_path / str(fused), build(), fused))
    assert_same_training(results[0][0], results[1][0], 1e-5)
    assert results[1][1]["eval_loss"] == pytest.approx(results[0][1]["eval_loss"], rel=1e-6)


def test_logits_are_not_computed_in_training_or_evaluation(tmp_path: Path) -> None:
    model = tiny_llama()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    trainer = quiet_trainer(
        tmp_path, model, token_samples(8), trainer_options={**FUSED, "eval_dataset": token_samples(4)}, max_steps=2
    )
    trainer.train()
    num_by_the_trial = len(calls)
    trainer.evaluate()
    assert num_by_the_trial == len(calls) == 2, "only the trial on a few tokens calls the head"


def test_training_makes_no_kv_cache(tmp_path: Path) -> None:
    model = tiny_llama()
    asked: list[Any] = []
    model.model.register_forward_pre_hook(
        lambda _, __, keywords: asked.append(keywords.get("use_cache")), with_kwargs=True
    )
    quiet_trainer(tmp_path, model, token_samples(2), trainer_options=FUSED, max_steps=1).train()
    assert asked[-1] is False


def test_callbacks_that_want_logits_get_them(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    recorder = Recorder(on_prediction_step=lambda logits, **_: seen.append(logits))
    options = {**FUSED, "eval_dataset": token_samples(4)}
    model = tiny_llama()
    trainer = quiet_trainer(tmp_path, model, None, recorder, trainer_options=options)
    trainer.evaluate()
    samples = torch.stack([sample["input_ids"] for sample in token_samples(4)])
    torch.testing.assert_close(torch.cat(seen), model(samples).logits.detach())


@pytest.mark.parametrize("mixed_precision", ["bf16"])
def test_mixed_precision_trains_like_unfused(mixed_precision: str, tmp_path: Path) -> None:
    results = [losses(tmp_path / str(fused), tiny_llama(), fused, mixed_precision=mixed_precision) for fused in (0, 1)]
    assert results[1][0].losses == pytest.approx(results[0][0].losses, rel=2e-3)


def test_rescaled_loss_is_not_rescaled_in_an_evaluation(tmp_path: Path) -> None:
    options = {"fused_loss_factory": lambda head: RescaleLoss(LinearCrossEntropyLoss(head), 3.0)}
    options["eval_dataset"] = token_samples(4)  # type: ignore[assignment]
    trainer = quiet_trainer(tmp_path, tiny_llama(), None, trainer_options=options)
    reference = quiet_trainer(tmp_path, tiny_llama(), None, trainer_options={"eval_dataset": token_samples(4)})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], rel=1e-6)


# --- other trainers


def parallel_run(
    output_dir: Path, kind: type[Trainer], model: str, factory: Any, settings: dict[str, Any]
) -> tuple[Result, float]:
    options: dict[str, Any] = {"eval_dataset": token_samples(9, seed=5)}
    if factory is not None:
        options["fused_loss_factory"] = factory
    merged = {**SETTINGS, **settings}
    trainer = trainer_of(kind, output_dir, MODELS[model], token_samples(30), trainer_options=options, **merged)
    result = run(trainer) if kind is Trainer else whole_result(trainer)
    return result, trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def unfused(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Result, float]]:
    """Results of the plain loss on one device, by model and accumulation."""
    return {
        (model, accumulation): parallel_run(
            tmp_path_factory.mktemp("unfused"), Trainer, model, None, {"gradient_accumulation_steps": accumulation}
        )
        for model, accumulation in (("llama", 2), ("gpt2", 2), ("llama", 1))
    }


def assert_same_on_ranks(output_dir: Path, num_ranks: int, expected: tuple[Result, float], *how: Any) -> None:
    for result, evaluation in run_on_ranks(parallel_run, num_ranks, output_dir, *how):
        assert_same_training(expected[0], result, 1e-5)
        assert evaluation == pytest.approx(expected[1], rel=1e-5)


DDP = {"per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("kind", "model", "factory", "settings"),
    [
        (DDPTrainer, "llama", IN_CHUNKS, DDP),
        (DDPTrainer, "gpt2", plain_fused_loss, DDP),
        (PipelineTrainer, "llama", LinearCrossEntropyLoss, {"schedule": "1f1b"}),
        (PipelineTrainer, "gpt2", plain_fused_loss, {"schedule": "gpipe"}),
        (PipelineTrainer, "llama", IN_CHUNKS, {"schedule": "interleaved1f1b"}),
        (PipelineTrainer, "llama", LinearCrossEntropyLoss, {"schedule": "loopedbfs"}),
        (PipelineTrainer, "gpt2", LinearCrossEntropyLoss, {"schedule": "zbv"}),
        (PipelineTrainer, "llama", LinearCrossEntropyLoss, {"schedule": "interleavedzerobubble"}),
        (PipelineTrainer, "llama", LinearCrossEntropyLoss, {"schedule": "dualpipev"}),
    ],
)
def test_other_trainers_train_like_unfused_on_one_device(
    kind: Any, model: str, factory: Any, settings: dict[str, Any], unfused: dict[Any, Any], tmp_path: Path
) -> None:
    assert_same_on_ranks(tmp_path, 2, unfused[model, 2], kind, model, factory, settings)


def on_ranks_of_which_one_has_no_targets(output_dir: Path) -> Result:
    samples = token_samples(8)
    for sample in samples[2:4] + samples[6:8]:
        sample["labels"][:] = IGNORED
    settings = {**SETTINGS, "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    options = {"fused_loss_factory": plain_fused_loss}
    return run(ddp_trainer(output_dir, tiny_llama(), samples, trainer_options=options, **settings))


def test_rank_without_targets_does_not_block_the_others(tmp_path: Path) -> None:
    # Without a gradient for the head on one rank, the other rank would wait forever.
    first, second = run_on_ranks(on_ranks_of_which_one_has_no_targets, 2, tmp_path)
    assert_same_training(first, second)
    assert len(first.losses) == 2


def test_split_backward_schedule_uses_unfused_loss_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = unfused_loss(LinearCrossEntropyLoss(nn.Linear(4, VOCAB_SIZE), ignore_index=0), "zbv")
    assert isinstance(plain, CausalLoss) and plain.ignore_index == 0
    assert "computed from logits, not fused with the head: schedule='zbv'" in caplog.text


def test_hybrid_trains_like_unfused_on_one_device(unfused: dict[Any, Any], tmp_path: Path) -> None:
    settings = {"schedule": "1f1b", "pp_size": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert_same_on_ranks(tmp_path, 4, unfused["llama", 1], HybridTrainer, "llama", plain_fused_loss, settings)


def bf16_hybrid(output_dir: Path) -> list[float]:
    """Train with bf16 hidden states and a last step without a batch for one pipeline; return the losses."""
    trainer = trainer_of(
        HybridTrainer,
        output_dir,
        opt,
        token_samples(12),
        trainer_options={"fused_loss_factory": plain_fused_loss},
        mixed_precision="bf16",
        pp_size=2,
        n_microbatches=2,
        per_device_train_batch_size=4,
        logging_strategy="steps",
        logging_steps=1,
    )
    return run(trainer).losses


def opt() -> nn.Module:
    return AutoModelForCausalLM.from_config(OPT)


def test_pipeline_without_a_batch_does_not_hang(tmp_path: Path) -> None:
    assert all(len(losses) == 2 for losses in run_on_ranks(bf16_hybrid, 4, tmp_path))


def accelerated(output_dir: Path, fused: bool) -> Result:
    options: dict[str, Any] = {"accelerator": Accelerator(cpu=True), **(FUSED if fused else {})}
    settings = {**SETTINGS, **DDP, "ema_decay": 0.9}
    trainer = quiet_trainer(
        output_dir,
        tiny_llama(),
        token_samples(30),
        trainer_class=AccelTrainer,
        trainer_options=options,
        **settings,
    )
    result = run(trainer)
    with trainer.averaged_weights():
        return result._replace(weights=weights(trainer.unwrapped_model()))


def test_accelerate_trains_like_unfused_and_averages_weights(tmp_path: Path) -> None:
    assert_same_training(*(accelerated(tmp_path / str(fused), fused) for fused in (False, True)), tolerance=1e-5)
