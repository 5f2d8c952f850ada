"""Gradient accumulation and evaluation: results do not depend on the split into micro-batches or batches."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from tests.support.sampling import sampled
from tests.support.tiny_models import (
    IGNORED,
    VOCAB_SIZE,
    Recorder,
    TokenModel,
    quiet_trainer,
    tiny_llama,
    token_samples,
    weights,
)

NUM_STEPS = 10
TOLERANCE = 1e-6


def unshifted(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all targets, NaN without targets."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return unshifted(logits[:, :-1], labels[:, 1:])


def with_num_items(logits: Tensor, labels: Tensor, num_items_in_batch: int) -> Tensor:
    total = functional.cross_entropy(logits[:, :-1].flatten(0, -2), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


class WithOwnLoss(TokenModel):
    """Model with its own loss, and logits that the trainer has no loss for."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids).flatten(0, -2)
        loss = None if labels is None else functional.cross_entropy(logits, labels.flatten())
        return {"loss": loss, "logits": logits}


LOSSES: dict[str, Callable[..., Tensor] | None] = {
    "num_items_in_batch": with_num_items,
    "num_targets": CausalLoss(),
    "plain shifted": shifted,
    "plain unshifted": unshifted,
    "default": None,
}
BUILDERS: dict[str, Callable[..., nn.Module]] = {"module": TokenModel, "llama": tiny_llama}
CASES: list[Any] = [
    pytest.param(model, loss, id=f"{name}, {kind}") for name, model in BUILDERS.items() for kind, loss in LOSSES.items()
] + [pytest.param(WithOwnLoss, None, id="module, own loss")]


def run(
    output_dir: Path,
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    batch_size: int,
    accumulation: int,
    samples: list[dict[str, Tensor]],
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    recorder = Recorder()
    quiet_trainer(
        output_dir,
        model,
        samples,
        recorder,
        momentum=0.9,
        trainer_options={"compute_loss_func": loss},
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        logging_strategy="steps",
        logging_steps=1,
        **settings,
    ).train()
    return [logs["loss"] for _, logs in recorder.logs], weights(model)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


@pytest.mark.parametrize(("build", "loss"), CASES)
def test_step_does_not_depend_on_the_split_into_micro_batches(
    tmp_path: Path, build: Callable[[], nn.Module], loss: Callable[..., Tensor] | None
) -> None:
    samples = token_samples(8 * NUM_STEPS)
    (whole_losses, whole), *parts = (
        run(tmp_path, build(), loss, batch_size, 8 // batch_size, samples) for batch_size in (8, 4, 1)
    )
    assert len(whole_losses) == NUM_STEPS
    assert largest_difference(weights(build()), whole) > 1e-2
    for losses, split in parts:
        assert losses == pytest.approx(whole_losses, rel=TOLERANCE)
        assert largest_difference(whole, split) < TOLERANCE


def test_step_loss_is_the_mean_over_its_targets(tmp_path: Path) -> None:
    samples = token_samples(8)
    losses, _ = run(tmp_path, TokenModel(), unshifted, 2, 4, samples)
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    assert losses == [pytest.approx(unshifted(TokenModel()(batch["input_ids"]), batch["labels"]).item(), rel=1e-6)]


@pytest.mark.parametrize("loss", [shifted, with_num_items, CausalLoss()], ids=["plain", "num_items", "num_targets"])
def test_step_without_token_weighting_is_the_mean_of_means(tmp_path: Path, loss: Callable[..., Tensor]) -> None:
    samples = token_samples(3)
    model, by_hand = TokenModel(), TokenModel()
    losses, after = run(tmp_path, model, loss, 1, 3, samples, token_weighted_loss=False, learning_rate=1.0)
    means = [shifted(by_hand(sample["input_ids"][None]), sample["labels"][None]) for sample in samples]
    mean_of_means = torch.stack(means).mean()
    mean_of_means.backward()
    assert losses == [pytest.approx(mean_of_means.item(), rel=TOLERANCE)]
    assert by_hand.head.weight.grad is not None
    torch.testing.assert_close(after["head.weight"], (by_hand.head.weight - by_hand.head.weight.grad).detach())
    weighted, _ = run(tmp_path, TokenModel(), loss, 1, 3, samples)
    assert abs(weighted[0] - losses[0]) > 1e-3


@pytest.mark.parametrize(
    ("build", "loss"), [*CASES[: len(LOSSES)], pytest.param(tiny_llama, None, id="llama"), CASES[-1]]
)
@pytest.mark.parametrize("token_weighted", [True, False])
def test_window_without_targets_changes_nothing(
    tmp_path: Path, build: Callable[[], nn.Module], loss: Callable[..., Tensor] | None, token_weighted: bool
) -> None:
    samples = token_samples(2)
    for sample in samples:
        sample["labels"].fill_(IGNORED)
    losses, after = run(tmp_path, build(), loss, 1, 2, samples, token_weighted_loss=token_weighted)
    assert losses == [0.0]
    before = weights(build())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("build", "loss"), CASES)
def test_evaluation_loss_does_not_depend_on_the_batch_size(
    tmp_path: Path, build: Callable[[], nn.Module], loss: Callable[..., Tensor] | None
) -> None:
    samples = token_samples(16)
    results = [
        quiet_trainer(
            tmp_path,
            build(),
            None,
            trainer_options={"compute_loss_func": loss},
            per_device_eval_batch_size=batch_size,
        ).evaluate(samples)
        for batch_size in (1, 3, 8)
    ]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=TOLERANCE)
    assert results[2]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=TOLERANCE)
    assert math.isfinite(results[0]["eval_loss"])
    shift = 0 if loss is unshifted or build is WithOwnLoss else 1
    num_targets = sum(int((sample["labels"][shift:] != IGNORED).sum()) for sample in samples)
    assert {result["eval_tokens"] for result in results} == {num_targets}


def tiny_bert(**options: Any) -> BertConfig:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(vocab_size=VOCAB_SIZE, intermediate_size=8, max_position_embeddings=8, **sizes, **options)


def tiny_t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB_SIZE, **{**sizes, "decoder_start_token_id": 0}))


def tiny_mixtral() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    router: dict[str, Any] = {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(vocab_size=VOCAB_SIZE, intermediate_size=8, num_key_value_heads=1, **sizes, **router)
    return MixtralForCausalLM(config)


class NeedsLabels(TokenModel):
    """Model that requires labels and returns a tuple."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids)
        return unshifted(logits, labels), logits


OWN_LOSSES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "masked": (lambda: BertForMaskedLM(tiny_bert()), 5),
    "tokens": (lambda: BertForTokenClassification(tiny_bert(num_labels=VOCAB_SIZE)), 5),
    "encoder-decoder": (tiny_t5, 5),
    "router": (tiny_mixtral, 4),
    "required labels": (NeedsLabels, 5),
}


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": nn.Module.eval,
    "module": nn.DataParallel,
    "compiled": compiled,
}
WRAPPED = [(name, wrapper) for name in OWN_LOSSES for wrapper in WRAPPERS]
# Compilation takes seconds per model.
QUICK = [(name, wrapper) for name, wrapper in WRAPPED if wrapper != "compiled" or name == "masked"]


@pytest.mark.parametrize(("name", "wrapper"), sampled(WRAPPED, QUICK))
def test_three_dimensional_logits_do_not_imply_a_causal_loss(
    name: str, wrapper: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, num_targets = OWN_LOSSES[name]
    model = build().eval()
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]])}
    labels = torch.tensor([[7, 8, 9, 10], [IGNORED, IGNORED, 3, IGNORED]])
    model_loss = ModelLoss(None, token_weighted=True)
    wrapped = WRAPPERS[wrapper](model)
    with caplog.at_level(logging.INFO), torch.no_grad():
        loss = model_loss.forward(wrapped, inputs, labels).own_loss
        model_loss.forward(wrapped, inputs, labels)
        outputs = model(**inputs, labels=labels)
    assert loss is not None
    torch.testing.assert_close(loss, outputs[0] if isinstance(outputs, tuple) else outputs.loss)
    assert model_loss.count(labels, {"labels": labels}) == num_targets
    assert caplog.text.count("Loss: the model's own") == 1


def test_causal_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model_loss = ModelLoss(None, token_weighted=True)
    tokens = torch.tensor([[3, 4, 5, 6]])
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert model_loss.forward(tiny_llama(), {"input_ids": tokens}, tokens).own_loss is None
    assert caplog.text.count("shifted causal cross entropy") == 1
