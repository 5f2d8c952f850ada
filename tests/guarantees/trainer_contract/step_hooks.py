"""Mixins that override step hooks as users would write them, for one device and for ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.base_trainer import logits_from_outputs, loss_from_outputs
from forgather.ml.trainer.trainer import Trainer


def causal_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the targets, NaN without targets."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Printed:
    """Override of the step exactly as printed in the contract."""

    def _forward_backward_step(self: Any, input_dict: dict[str, Any], labels: Tensor) -> Tensor:
        if self.use_fused_loss:
            input_dict["return_hidden_states"] = True
        with self.amp_context.autocast():
            outputs = self.model(**input_dict)
            loss = self.loss_fn(logits_from_outputs(outputs), labels)
        self._backward(loss)
        return loss.detach()


class Rescaled:
    """Override that computes the mean itself and calls `rescale`."""

    def _forward_backward_step(self: Any, input_dict: dict[str, Any], labels: Tensor) -> Tensor:
        mean = causal_mean(logits_from_outputs(self.model(**input_dict)), labels)
        loss = self.loss_fn.rescale(mean, labels)
        self._backward(loss)
        return loss.detach()


class Unweighed:
    """Override that uses neither the loss function nor `rescale`."""

    def _forward_backward_step(self: Any, input_dict: dict[str, Any], labels: Tensor) -> Tensor:
        loss = torch.nan_to_num(causal_mean(logits_from_outputs(self.model(**input_dict)), labels))
        self._backward(loss)
        return loss.detach()


class ByRange:
    """Override of the full step, with `gradient_accumulation_steps` micro-batches."""

    def _train_step(self: Any, data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor | None, Any]:
        losses, tokens = [], 0
        for _ in range(self.args.gradient_accumulation_steps):
            input_dict, labels = self._prepare_batch(next(data_iterator))
            losses.append(self._forward_backward_step(input_dict, labels))
            tokens += self._count_batch_tokens(input_dict, labels)
        return finished(self, losses, tokens)


class UntilSync:
    """Override of the full step, up to the micro-batch that synchronises gradients."""

    def _train_step(self: Any, data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor | None, Any]:
        losses, tokens = [], 0
        while True:
            input_dict, labels = self._prepare_batch(next(data_iterator))
            losses.append(self._forward_backward_step(input_dict, labels))
            tokens += self._count_batch_tokens(input_dict, labels)
            if self._should_sync_gradients():
                return finished(self, losses, tokens)


def finished(trainer: Any, losses: list[Tensor], tokens: int) -> tuple[Tensor, Tensor | None, int]:
    norm = trainer._clip_grad_norm(trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.optimizer.zero_grad()
    return torch.stack(losses).sum(), norm, tokens


class OwnBatches:
    """Override that prepares batches and masks a target in each: the returned labels are counted."""

    prepared: list[int]

    def _prepare_batch(self: Any, batch: Any) -> tuple[dict[str, Any], Tensor]:
        self.prepared.append(int(batch["input_ids"].flatten()[0]))
        labels = batch["labels"].clone()
        labels[:, 1] = -100
        return {"input_ids": batch["input_ids"]}, labels


class MaskingCollator:
    """Collator that applies the same mask without a hook."""

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 1] = -100
        return batch


class OwnBackward:
    def _backward(self: Any, loss: Tensor) -> None:
        self.amp_context.scale_loss(loss).backward()


class OwnClipping:
    def _clip_grad_norm(self: Any, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm or 1e9, norm_type)


class WithSuper:
    """Override of every step hook that calls super()."""

    def _train_step(self: Any, data_iterator: Iterator[Any]) -> Any:
        return super()._train_step(data_iterator)  # type: ignore[misc]

    def _prepare_batch(self: Any, batch: Any) -> Any:
        return super()._prepare_batch(batch)  # type: ignore[misc]

    def _forward_backward_step(self: Any, input_dict: Any, labels: Any) -> Any:
        return super()._forward_backward_step(input_dict, labels)  # type: ignore[misc]

    def _backward(self: Any, loss: Any) -> None:
        super()._backward(loss)  # type: ignore[misc]

    def _clip_grad_norm(self: Any, max_grad_norm: Any, norm_type: float = 2.0) -> Any:
        return super()._clip_grad_norm(max_grad_norm, norm_type)  # type: ignore[misc]

    def _should_sync_gradients(self: Any) -> bool:
        return bool(super()._should_sync_gradients())  # type: ignore[misc]

    def _count_batch_tokens(self: Any, input_dict: Any, labels: Any) -> Any:
        return super()._count_batch_tokens(input_dict, labels)  # type: ignore[misc]


class OwnLossModel(nn.Module):
    """Model with its own loss, which is not causal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 4))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(input_ids).mean(1)
        outputs = {"logits": logits}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits, labels)
        return outputs


class RescaledOwnLoss:
    def _forward_backward_step(self: Any, input_dict: dict[str, Any], labels: Tensor) -> Tensor:
        outputs = self.model(**input_dict, labels=labels)
        loss = self.loss_fn.rescale(loss_from_outputs(outputs), labels)
        self._backward(loss)
        return loss.detach()


STEP_HOOKS = (Printed, Rescaled, ByRange, UntilSync, OwnBackward, OwnClipping, WithSuper)


def with_hooks(base: type[Trainer[Any]], *hooks: type) -> Any:
    return type("".join(one.__name__ for one in hooks) + base.__name__, (*hooks, base), {"prepared": []})
