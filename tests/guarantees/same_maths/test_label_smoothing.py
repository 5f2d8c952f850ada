"""Label smoothing: the loss of transformers' LabelSmoother, as one mean over all targets of a step, in every trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.trainer_pt_utils import LabelSmoother

from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, environment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, quiet_trainer, sgd, tiny_llama, token_samples, weights

FACTOR = 0.2
STEPS = {"max_steps": 3, "label_smoothing_factor": FACTOR}


def smoothed(logits: Tensor, labels: Tensor, shifts: bool) -> Tensor:
    loss: Tensor = LabelSmoother(FACTOR)({"logits": logits}, labels, shift_labels=shifts)
    return loss


def bert(kind: type) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=32, num_labels=4, max_position_embeddings=16, hidden_dropout_prob=0.0, **sizes)
    config.attention_probs_dropout_prob = 0.0
    model: nn.Module = kind(config)
    return model


def classes(num_samples: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": one["input_ids"], "labels": one["input_ids"].sum() % 4} for one in token_samples(num_samples)]


def tags(num_samples: int) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": one["input_ids"], "labels": torch.where(one["labels"] < 0, one["labels"], one["labels"] % 4)}
        for one in token_samples(num_samples)
    ]


CASES: dict[str, tuple[Any, Any, bool]] = {
    "causal": (tiny_llama, token_samples, True),
    "sequence classes": (lambda: bert(BertForSequenceClassification), classes, False),
    "token classes": (lambda: bert(BertForTokenClassification), tags, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "num_passes"), [(8, 1), (2, 4)])
def test_step_has_the_smoothed_mean_over_all_targets(case: str, size: int, num_passes: int, tmp_path: Path) -> None:
    make, data, shifts = CASES[case]
    samples, recorder = data(8), Recorder()
    trainer = quiet_trainer(
        tmp_path,
        make(),
        samples,
        recorder,
        max_steps=1,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=num_passes,
        label_smoothing_factor=FACTOR,
        trainer_options={"eval_dataset": samples},
    )
    expected_model = make()
    batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    expected = smoothed(expected_model(input_ids=batch["input_ids"]).logits, batch["labels"], shifts)
    assert float(trainer.evaluate()["eval_loss"]) == pytest.approx(float(expected), rel=1e-5)
    trainer.train()
    (loss,) = recorder.details("on_train_metrics", "loss")
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    expected.backward()
    for name, parameter in expected_model.named_parameters():
        if parameter.grad is not None:
            updated = parameter.detach() - 0.1 * parameter.grad
            torch.testing.assert_close(weights(trainer.model)[name], updated, rtol=1e-4, atol=1e-6)


def on_ranks(folder: str, kind: str) -> dict[str, Tensor]:
    options = {"distributed_env": environment(), "optimizer_cls_and_kwargs": sgd()}
    if kind == "ddp":
        trainer: Trainer = ddp_trainer(
            Path(folder), tiny_llama(), token_samples(24), per_device_train_batch_size=2, **STEPS
        )
    else:
        usual = {"output_dir": folder, "use_cpu": True, "seed": 0, "shuffle": False, "save_strategy": "no"}
        usual |= {"logging_strategy": "no", "lr_scheduler_type": "constant", "per_device_train_batch_size": 4}
        trainer = PipelineTrainer(
            args={**usual, **STEPS, "n_microbatches": 2},
            model_init=tiny_llama,
            train_dataset=token_samples(24),
            default_callbacks=False,
            **options,
        )
    trainer.train()
    return weights(trainer.unwrapped_model())


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
def test_ranks_train_like_one_process(kind: str, tmp_path: Path) -> None:
    expected = quiet_trainer(tmp_path / "one", tiny_llama(), token_samples(24), per_device_train_batch_size=4, **STEPS)
    expected.train()
    together: dict[str, Tensor] = {}
    for part in run_on_ranks(on_ranks, 2, str(tmp_path / kind), kind):
        together |= part
    for name, value in weights(expected.model).items():
        torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6)


class Weighted(nn.Module):
    """Model that returns a loss other than cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = bert(BertForTokenClassification)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": 2 * outputs.loss, "logits": outputs.logits}


def test_loss_that_is_no_cross_entropy_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, Weighted(), tags(4), max_steps=1, label_smoothing_factor=FACTOR)
    with pytest.raises(ValueError, match="needs a cross-entropy loss, but the own loss of Weighted is another one"):
        trainer.train()


def test_loss_of_the_user_is_refused_at_construction(tmp_path: Path) -> None:
    options = {"compute_loss_func": CausalLoss()}
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.2 cannot be combined with compute_loss_func"):
        quiet_trainer(tmp_path, tiny_llama(), [], label_smoothing_factor=FACTOR, trainer_options=options)


@pytest.mark.parametrize("factor", [-0.1, 1.0])
def test_factor_out_of_range_is_refused(factor: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 0 and less than 1"):
        quiet_trainer(tmp_path, tiny_llama(), [], label_smoothing_factor=factor)


def test_small_other_part_of_the_loss_is_refused(tmp_path: Path) -> None:
    """The load balancing of experts is 0.06% of the loss, and smoothing would drop it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **sizes)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.001
    trainer = quiet_trainer(tmp_path, MixtralForCausalLM(config), token_samples(4), **STEPS)
    with pytest.raises(ValueError, match="the own loss of MixtralForCausalLM is another one"):
        trainer.train()
