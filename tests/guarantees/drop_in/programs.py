"""Small models, data and subclasses for the tests of the drop-in. Functions run in one process and on ranks."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from forgather.hf import Trainer, TrainingArguments
from forgather.hf.methods import CALLED
from forgather.ml.distributed import get_world_size
from tests.support.tiny_models import tiny_llama

LENGTHS = (5, 9, 7, 6, 8, 5, 9, 4)


def rows(number: int = 8) -> list[dict[str, Any]]:
    """Return token rows of different lengths, so that micro-batches have different numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(3, 32, (LENGTHS[index % 8],), generator=generator).tolist()}
        for index in range(number)
    ]


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    labels = [sample["input_ids"] + [-100] * (width - len(sample["input_ids"])) for sample in samples]
    mask = (torch.tensor(labels) != -100).long()
    return {"input_ids": torch.tensor(ids), "attention_mask": mask, "labels": torch.tensor(labels)}


def collate_unlabelled(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return batches of equal width without labels, which are weighted by their samples."""
    ids = torch.zeros(len(samples), max(LENGTHS), dtype=torch.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def arguments(output_dir: Any, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "fg_options": {"shuffle": False},
    }
    return TrainingArguments(str(output_dir), **{**settings, **options})


def made(cls: type[Trainer], output_dir: Any, model: nn.Module | None = None, **options: Any) -> Trainer:
    given = {name: options.pop(name) for name in ("callbacks", "compute_loss_func", "optimizers") if name in options}
    collator = collate_unlabelled if cls is Contrastive else collate
    trainer = cls(
        tiny_llama() if model is None else model,
        arguments(output_dir, **options),
        collator,
        rows(),
        rows(4),
        **given,
    )
    trainer.remove_callback(_progress())
    return trainer


def _progress() -> type[Any]:
    from transformers import ProgressCallback

    return ProgressCallback


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def trained(cls: type[Trainer], output_dir: Any, batch_size: int, accumulation: int, **options: Any) -> Tensor:
    """Return the weights after two steps of eight samples, in whatever division."""
    trainer = made(
        cls,
        output_dir,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        **options,
    )
    trainer.train()
    return weights(trainer)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class IgnoringLoss(Trainer):
    """Override with the signature of older scripts; its loss is the mean of a micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class UsingLoss(Trainer):
    """Override that divides a sum by `num_items_in_batch`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed_loss(outputs.logits, labels) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class RankAwareLoss(UsingLoss):
    """Override that multiplies by the number of processes, as transformers needs."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class SuperLoss(Trainer):
    """Override that calls the default loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class DividingStep(Trainer):
    """Override of training_step that divides by gradient_accumulation_steps, as older scripts do."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, inputs)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class SuperStep(Trainer):
    """Override of training_step around the default."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
        return super().training_step(model, inputs, *rest)


def loss_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Loss of model outputs, as compute_loss_func gets them."""
    total = summed_loss(outputs.logits, labels)
    return total / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class Contrastive(Trainer):
    """Loss with two forward passes. SGD, because AdamW amplifies the rounding of gradients near zero."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        first = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        second = model(input_ids=inputs["input_ids"].flip(1), attention_mask=inputs["attention_mask"].flip(1))
        loss = (first.logits.mean((1, 2)) - second.logits.mean((1, 2)) - 1.0).square().mean()
        return (loss, first) if return_outputs else loss


LOSSES: tuple[type[Trainer], ...] = (IgnoringLoss, UsingLoss, RankAwareLoss, SuperLoss, DividingStep, SuperStep)


def trained_on_ranks(cls: type[Trainer], output_dir: str, accumulation: int, batch_size: int) -> Tensor:
    return trained(cls, output_dir, batch_size, accumulation)


class Counts(Trainer):
    """Subclass that overrides many methods and counts their calls."""

    def __init__(self, *values: Any, **keywords: Any) -> None:
        self.calls: dict[str, int] = {}
        super().__init__(*values, **keywords)


def _counting(name: str) -> Callable[..., Any]:
    def method(self: Any, *values: Any, **keywords: Any) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(super(Counts, self), name)(*values, **keywords)

    return method


COUNTED = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "evaluation_loop",
    "evaluate",
    "predict",
    "get_train_dataloader",
    "get_eval_dataloader",
    "get_test_dataloader",
    "_get_train_sampler",
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
    "get_decay_parameter_names",
    "log",
    "_save",
    "save_model",
    "_prepare_inputs",
    "_prepare_input",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
)
for _name in COUNTED:
    setattr(Counts, _name, _counting(_name))


def count_calls(output_dir: str) -> dict[str, int]:
    """Train, evaluate, predict and save with every method overridden; return the number of calls."""
    trainer = made(Counts, output_dir, eval_strategy="steps", eval_steps=1)
    assert isinstance(trainer, Counts)
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows(4))
    trainer.save_model()
    return trainer.calls


def copied_bodies(**attributes: Any) -> type[Trainer]:
    """Return a trainer with the method bodies of transformers, as overrides that copy a body and change a line."""
    left_out = {"init_hf_repo", "push_to_hub"}
    bodies = {name: body for name, body in vars(transformers.Trainer).items() if name in CALLED - left_out}
    return type("Copied", (Trainer,), {**bodies, **attributes, "__module__": __name__})


def with_copied_bodies(output_dir: str, **attributes: Any) -> tuple[Tensor, int]:
    """Return the weights after an epoch with an incomplete last step, and the number of samples of an evaluation."""
    options: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 3 // get_world_size(),
    }
    options |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
    trainer = made(copied_bodies(**attributes) if attributes else Trainer, output_dir, **options)
    trainer.compute_metrics = lambda prediction: {"number": len(prediction.label_ids)}
    trainer.train()
    trainer.save_model()
    trainer.predict(rows(3))
    return weights(trainer), trainer.evaluate()["eval_number"]
