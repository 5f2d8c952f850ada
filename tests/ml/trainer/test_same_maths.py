"""A step is the same step however it is split into micro-batches, and an evaluation however it is batched."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forgather.ml.loss import CausalLoss
from tests.support.tiny_models import (
    IGNORED,
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
    """The mean over all targets; NaN without any."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return unshifted(logits[:, :-1], labels[:, 1:])


def with_num_items(logits: Tensor, labels: Tensor, num_items_in_batch: int) -> Tensor:
    total = functional.cross_entropy(logits[:, :-1].flatten(0, -2), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


class WithOwnLoss(TokenModel):
    """Gives logits that the trainer knows no loss for, and a loss of its own."""

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
def test_a_step_is_the_same_however_it_is_split(
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


def test_the_loss_of_a_step_is_the_mean_over_its_targets(tmp_path: Path) -> None:
    samples = token_samples(8)
    losses, _ = run(tmp_path, TokenModel(), unshifted, 2, 4, samples)
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    assert losses == [pytest.approx(unshifted(TokenModel()(batch["input_ids"]), batch["labels"]).item(), rel=1e-6)]


@pytest.mark.parametrize("loss", [shifted, with_num_items, CausalLoss()], ids=["plain", "num_items", "num_targets"])
def test_without_weighting_a_step_is_the_mean_of_means(tmp_path: Path, loss: Callable[..., Tensor]) -> None:
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
def test_a_window_without_targets_changes_nothing(
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
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(
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
