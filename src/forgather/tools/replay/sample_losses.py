"""Losses of single samples and tokens, from the logits of a micro-batch that was trained on."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX
from forgather.ml.trainer.step_loss.model_loss import Forward, ModelLoss
from forgather.tools.replay.report import SampleLoss, TokenLoss, badness
from forgather.tools.samples.step_order import StepSample

NUM_WORST_TOKENS = 10
_CONTEXT_TOKENS = 24
_NO_TARGET = -1.0


@dataclass(frozen=True)
class _Token:
    row: int
    place: int
    loss: float
    token_id: int
    predicted_id: int
    before: list[int]


class LossBook:
    """Losses of the samples of a step, micro-batch by micro-batch, and the worst tokens."""

    def __init__(self, samples: list[StepSample] | None, tokenizer: Any, dataset: object) -> None:
        """`samples` are the samples of the step in order, without skipped ones; None for a stream."""
        self._samples = samples
        self._tokenizer = tokenizer
        self._dataset = dataset
        self._losses: list[SampleLoss] = []
        self._worst: list[TokenLoss] = []

    def add(self, logits: Tensor | None, inputs: dict[str, Any], labels: Any, loss: ModelLoss, number: int) -> None:
        """Record the samples of micro-batch `number`."""
        num_rows = _num_rows(inputs, labels)
        targets = None if logits is None else _targets_of(logits, labels, loss)
        first = len(self._losses)
        for row in range(num_rows):
            count = int(loss.count(labels[row : row + 1], {})) if isinstance(labels, Tensor) and labels.ndim else 1
            value = _loss_of_row(logits, labels, loss, targets, row, count)
            self._losses.append(self._sample_loss(first + row, number, row, value, count))
        if targets is not None and targets.losses.ndim == 2:
            found = [*self._worst, *(self._named(first, one) for one in _worst(targets, inputs, labels))]
            self._worst = heapq.nlargest(NUM_WORST_TOKENS, found, key=lambda one: badness(one.loss))

    @property
    def samples(self) -> list[SampleLoss]:
        return self._losses

    @property
    def worst_tokens(self) -> list[TokenLoss]:
        """The tokens with the largest losses, worst first."""
        return self._worst

    def _sample_loss(self, number: int, micro_batch: int, row: int, loss: float | None, count: int) -> SampleLoss:
        known = None if self._samples is None or number >= len(self._samples) else self._samples[number]
        if known is None:
            return SampleLoss(number, None, None, micro_batch, row, loss, count)
        source = describe_source(self._dataset, known.index)
        return SampleLoss(known.position, known.index, known.rank, known.micro_batch, known.row, loss, count, source)

    def _named(self, first: int, token: _Token) -> TokenLoss:
        sample = self._losses[first + token.row]
        return TokenLoss(
            sample.position,
            sample.index,
            token.place,
            token.token_id,
            token.loss,
            token.predicted_id,
            self._text(token.before),
            self._text([token.token_id]),
            self._text([token.predicted_id]),
        )

    def _text(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else str(self._tokenizer.decode(ids))


def describe_source(dataset: object, index: int) -> str | None:
    """Return file, document and offset of a sample, for datasets that know them."""
    if not hasattr(dataset, "source_of"):
        return None
    spans = dataset.source_of(index)
    if not spans or spans[0].place is None:
        return None
    place, more = spans[0].place, len(spans) - 1
    others = f", and {more} more document{'s' if more > 1 else ''}" if more else ""
    return f"{place.file or 'documents'}, document {place.number + 1}, token {spans[0].offset}{others}"


def _num_rows(inputs: dict[str, Any], labels: Any) -> int:
    for value in (labels, *inputs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    return 1


class _Targets(NamedTuple):
    """Cross entropy of each label, and the token with the largest logit at its place."""

    losses: Tensor
    """-1 for labels that are no targets."""
    predicted: Tensor


def _targets_of(logits: Tensor, labels: Any, loss: ModelLoss) -> _Targets | None:
    """Return the losses of single targets; None if labels are no classes of the logits."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return None
    targets = labels.clone()
    if labels.ndim == 2 and _shifts(labels, loss):
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        targets[:, 0] = IGNORE_INDEX
    flat = cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    losses = flat.view(labels.shape).masked_fill(targets == IGNORE_INDEX, _NO_TARGET)
    return _Targets(losses, logits.argmax(-1))


def _shifts(labels: Tensor, loss: ModelLoss) -> bool:
    """Return whether the loss predicts each token from the tokens before it, so that the first label is no target."""
    only_first = torch.full_like(labels[:1], IGNORE_INDEX)
    only_first[:, 0] = 0
    return int(loss.count(only_first, {})) == 0


def _loss_of_row(
    logits: Tensor | None, labels: Any, loss: ModelLoss, targets: _Targets | None, row: int, count: int
) -> float | None:
    if count == 0:
        return None
    if logits is not None and isinstance(labels, Tensor) and not loss.uses_own:
        # The loss function of the run itself, on one row.
        return float(loss.mean(Forward(logits[row : row + 1], None), labels[row : row + 1], count))
    if targets is None:
        return None
    own = targets.losses[row]
    return float(own[own != _NO_TARGET].mean()) if own.ndim else float(own)


def _worst(targets: _Targets, inputs: dict[str, Any], labels: Tensor) -> Iterator[_Token]:
    losses = targets.losses
    # NaN counts as the worst.
    ranked = torch.nan_to_num(losses, nan=torch.inf).flatten()
    ids = inputs.get("input_ids")
    for place in torch.topk(ranked, min(NUM_WORST_TOKENS, ranked.numel())).indices.tolist():
        row, column = divmod(place, losses.shape[1])
        if losses[row, column] == _NO_TARGET:
            continue
        before: list[int] = []
        if isinstance(ids, Tensor) and ids.shape == labels.shape:
            before = ids[row, max(column - _CONTEXT_TOKENS, 0) : column].tolist()
        predicted = int(targets.predicted[row, column])
        yield _Token(row, column, float(losses[row, column]), int(labels[row, column]), predicted, before)
