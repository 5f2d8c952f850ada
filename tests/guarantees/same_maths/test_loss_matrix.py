"""Matrix of losses and label types: splitting into micro-batches changes no step, and every step has targets."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.sampling import sampled
from tests.support.tiny_models import Recorder, quiet_trainer, weights

NUM_CLASSES = 3
WIDTH = 4
LENGTH = 5
NUM_SAMPLES = 6
IGNORED = -100

Loss = Callable[[Tensor, Tensor], Tensor]


class Scores(nn.Module):
    """Model with scores for each sample, or for each position of a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores


class OwnLoss(Scores):
    """Model with an own, undeclared loss over all columns besides its input."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, x: Tensor, labels: Tensor | None = None, **columns: Tensor) -> Any:  # type: ignore[override]
        scores = super().forward(x)
        columns = columns if labels is None else {**columns, "labels": labels}
        return {"loss": self._loss(scores, **columns) if columns else None, "logits": scores}


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each label, zero for ignored labels."""
    flat = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shifted_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits[:, :-1], labels[:, 1:])


def safe_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropies(logits, labels).sum() / (labels != IGNORED).sum().clamp(min=1)


def ignores_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


def sum_that_ignores_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum()


def clamps_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels.clamp(min=0))


def sum_over_targets(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropies(logits, labels).sum()


def shifted_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropies(logits[:, :-1], labels[:, 1:]).sum()


def mean_over_all_positions(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropies(logits, labels).mean()


def mean_of_means_of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    return (cross_entropies(logits, labels).sum(-1) / (labels != IGNORED).sum(-1).clamp(min=1)).mean()


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.mean(-1) - labels.to(logits.dtype)).square()


def regression(logits: Tensor, labels: Tensor) -> Tensor:
    return squares(logits, labels).mean()


def summed_regression(logits: Tensor, labels: Tensor) -> Tensor:
    return squares(logits, labels).sum()


def two_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits.mean(-1), labels.to(logits.dtype))


ANY: list[Loss] = [ignores_labels, sum_that_ignores_labels]
CLASSES: list[Loss] = [mean, safe_mean, clamps_labels, sum_over_targets, mean_over_all_positions, *ANY]
POSITIONS: list[Loss] = [*CLASSES, shifted_mean, shifted_sum, mean_of_means_of_samples]
NUMBERS: list[Loss] = [regression, summed_regression, *ANY]
FLAGS: list[Loss] = [two_classes, regression, summed_regression, *ANY]


def classes(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, NUM_CLASSES, shape, generator=generator)


def with_ignored(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Return a generator of labels with a random number of leading ignored labels, up to all of them."""

    def make(generator: torch.Generator) -> Tensor:
        labels = torch.randint(0, NUM_CLASSES, shape, generator=generator)
        flat = labels.view(-1) if shape else labels.view(1)
        flat[: int(torch.randint(0, flat.numel() + 1, (), generator=generator))] = IGNORED
        return labels

    return make


LABELS: dict[str, tuple[Callable[[torch.Generator], Tensor], bool, list[Loss]]] = {
    # Label generator, whether there are scores for each position, and the losses that fit.
    "(B,)": (classes(), False, CLASSES),
    "(B,) with ignored": (with_ignored(), False, CLASSES),
    "(B, 1)": (classes(1), True, CLASSES),
    "(B, 1) without positions": (classes(1), False, CLASSES),
    "(B, 1) with ignored": (with_ignored(1), True, CLASSES),
    "(B, T)": (classes(LENGTH), True, POSITIONS),
    "(B, T) with ignored": (with_ignored(LENGTH), True, POSITIONS),
    "(B, T) int32": (lambda generator: classes(LENGTH)(generator).int(), True, ANY),
    "float (B,)": (lambda generator: torch.randn((), generator=generator), False, NUMBERS),
    "float (B, T)": (lambda generator: torch.randn(LENGTH, generator=generator), True, NUMBERS),
    "bool (B,)": (lambda generator: torch.rand((), generator=generator) > 0.5, False, FLAGS),
    "bool (B, 1)": (lambda generator: torch.rand(1, generator=generator) > 0.5, True, FLAGS),
    "bool (B, T)": (lambda generator: torch.rand(LENGTH, generator=generator) > 0.5, True, FLAGS),
}
MATRIX = [
    pytest.param(kind, loss, own, id=f"{kind}, {loss.__name__}, {'own' if own else 'given'}")
    for kind, (_, _, losses) in LABELS.items()
    for loss in losses
    for own in (False, True)
]
# Every loss with every kind of labels, given or as the model's own in turn.
ALTERNATING = [MATRIX[number + number // 2 % 2] for number in range(0, len(MATRIX), 2)]


def samples_of(make: Callable[[torch.Generator], Tensor] | None, has_positions: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    length = [] if not has_positions else [LENGTH]
    samples = []
    for _ in range(NUM_SAMPLES):
        labels = None if make is None else make(generator)
        length = [len(labels)] if has_positions and labels is not None else length
        sample = {"x": torch.randn(*length, WIDTH, generator=generator)}
        samples.append(sample if labels is None else {**sample, "labels": labels})
    return samples


def step(
    output_dir: Path, model: nn.Module, loss: Loss | None, samples: list[dict[str, Tensor]], batch_size: int
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Evaluate, then train one step over all samples; return the logged loss, the new weights and the evaluation."""
    recorder = Recorder()
    trainer = quiet_trainer(
        output_dir,
        model,
        samples,
        recorder,
        trainer_options={"compute_loss_func": loss, "eval_dataset": samples},
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=NUM_SAMPLES // batch_size,
        logging_strategy="steps",
        logging_steps=1,
        learning_rate=0.01,
    )
    evaluated = trainer.evaluate()
    trainer.train()
    return recorder.logs[0][1]["loss"], weights(model), evaluated


def assert_same_step(
    output_dir: Path, build: Callable[[], nn.Module], loss: Loss | None, samples: list[dict[str, Tensor]]
) -> None:
    before = weights(build())
    (logged, whole, evaluated), *others = (
        step(output_dir, build(), loss, samples, batch_size) for batch_size in (NUM_SAMPLES, 2, 1)
    )
    assert any(not torch.equal(before[name], whole[name]) for name in before), "the gradients are zero"
    assert math.isfinite(evaluated["eval_loss"])
    for other_logged, split, other_evaluated in others:
        assert other_logged == pytest.approx(logged, rel=1e-5)
        assert other_evaluated["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-5)
        assert other_evaluated["eval_tokens"] == evaluated["eval_tokens"] > 0
        for name, tensor in whole.items():
            torch.testing.assert_close(split[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "loss", "is_own"), sampled(MATRIX, ALTERNATING))
def test_split_step_is_equal_and_has_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, loss: Loss, is_own: bool
) -> None:
    make, has_positions, _ = LABELS[kind]
    samples = samples_of(make, has_positions)
    assert_same_step(tmp_path, lambda: OwnLoss(loss) if is_own else Scores(), None if is_own else loss, samples)
    assert "nothing is learned" not in caplog.text


# --- model losses over other inputs than labels


def reconstruction(scores: Tensor, x: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(scores, x[..., :NUM_CLASSES], reduction=reduction)


class Reconstructs(Scores):
    """Model with a loss over its inputs; it takes no labels."""

    reduction = "mean"

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"loss": reconstruction(scores, x, self.reduction), "logits": scores}


class SumOfReconstructions(Reconstructs):
    reduction = "sum"


class OfOtherColumn(Scores):
    """Model with a loss over another column; labels are optional."""

    def forward(self, x: Tensor, target: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        scores = super().forward(x)
        return {"loss": functional.mse_loss(scores.mean(-1), target), "scores": scores}


class OfOtherColumnWithRank3(OfOtherColumn):
    def forward(self, x: Tensor, target: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        outputs = super().forward(x, target)
        return {"loss": outputs["loss"], "logits": outputs["scores"].unsqueeze(1)}


class Nested(Scores):
    """Model for batches without a tensor on the first level."""

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return {"loss": super().forward(batch["x"]).square().mean()}


def with_column(samples: list[dict[str, Tensor]], name: str, make: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [{**sample, name: make(number)} for number, sample in enumerate(samples)]


def without_labels() -> list[dict[str, Any]]:
    return samples_of(None, False)


def targets(number: int) -> Tensor:
    return torch.tensor(float(number) - 1.5)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Any]]]]] = {
    "inputs": (Reconstructs, without_labels),
    "inputs, sum": (SumOfReconstructions, without_labels),
    "inputs, with labels": (
        Reconstructs,
        lambda: with_column(without_labels(), "labels", lambda _: torch.tensor([IGNORED])),
    ),
    "column": (OfOtherColumn, lambda: with_column(without_labels(), "target", targets)),
    "column, with labels": (
        OfOtherColumn,
        lambda: with_column(samples_of(classes(1), False), "target", targets),
    ),
    "column, all labels ignored": (
        OfOtherColumnWithRank3,
        lambda: with_column(
            with_column(without_labels(), "target", targets), "labels", lambda _: torch.tensor([IGNORED])
        ),
    ),
    "nested": (Nested, lambda: [{"batch": sample} for sample in without_labels()]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_loss_over_other_inputs_than_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    build, samples = OTHERS[name]
    assert_same_step(tmp_path, build, None, samples())
    assert "nothing is learned" not in caplog.text


class ZeroHead(Scores):
    """Model with initial scores of zero, so all positions have the same loss."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


@pytest.mark.parametrize("kind", ["(B, 1)", "(B, T) with ignored"])
def test_zero_initialised_head_hides_no_target(tmp_path: Path, kind: str) -> None:
    make, has_positions, _ = LABELS[kind]
    samples = samples_of(make, has_positions)
    assert_same_step(tmp_path, ZeroHead, mean, samples)
    if has_positions and kind != "(B, 1)":
        assert_same_step(tmp_path, ZeroHead, shifted_mean, samples)


# --- warnings about steps without targets


def test_labels_without_targets_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A causal loss over a single position has no target."""
    samples = samples_of(classes(1), True)
    trainer = quiet_trainer(
        tmp_path, Scores(), samples, trainer_options={"compute_loss_func": shifted_mean, "eval_dataset": samples}
    )
    trainer.train()
    assert math.isnan(trainer.evaluate()["eval_loss"])
    told = [record.message for record in caplog.records if "Check the labels" in record.message]
    assert len(told) == 2, caplog.text
    assert "Step 1 of this process had labels other than -100 (shape (1, 1)), but the loss counts none" in told[0]
    assert "compute_loss_func" in told[0] and "num_targets(labels)" in told[0]
    assert "The evaluation had 6 batches but no targets, so eval_loss is NaN" in told[1]


def test_first_steps_without_targets_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of(lambda _: torch.full((LENGTH,), IGNORED), True)
    quiet_trainer(tmp_path, Scores(), samples, trainer_options={"compute_loss_func": mean}).train()
    assert caplog.text.count("The first 3 steps had no targets: loss and gradients are 0") == 1


def test_later_steps_without_targets_do_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of(classes(LENGTH), True)
    for sample in samples[1:]:
        sample["labels"].fill_(IGNORED)
    quiet_trainer(tmp_path, Scores(), samples, trainer_options={"compute_loss_func": mean}).train()
    assert "nothing is learned" not in caplog.text


def test_sum_reduction_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of(classes(LENGTH), True)
    quiet_trainer(tmp_path, Scores(), samples, trainer_options={"compute_loss_func": sum_over_targets}).train()
    assert caplog.text.count("returns a sum over its targets") == 1


def ignores_minus_one(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)


def test_loss_that_cannot_ignore_labels_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of(classes(LENGTH), True)
    assert_same_step(tmp_path, Scores, ignores_minus_one, samples)
    assert "num_targets(labels)" in caplog.text and "such as -1" in caplog.text
