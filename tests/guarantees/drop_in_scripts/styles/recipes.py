"""Recipes: one style of using a Trainer, with model and data small enough to compare two trainers weight by weight."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

NUM_CLASSES = 3
VOCAB_SIZE = 20
LENGTH = 6


@dataclass
class Recipe:
    """Trainer class of a style and its arguments; `notes` collects the observations of the style."""

    trainer_class: type[Any]
    model: nn.Module | None
    train: Sequence[Any]
    evaluation: Sequence[Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


Style = Callable[[Any], Recipe]


@dataclass
class StyleResult:
    """Results of a recipe that two trainers must share."""

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    notes: list[Any]
    trainer: Any


def run_recipe(style: Style, module: str, folder: Path, **settings: Any) -> StyleResult:
    """Train and evaluate the style with the Trainer of the module."""
    torch.set_num_threads(1)
    hf = importlib.import_module(module)
    recipe = style(hf)
    trainer = build(hf, recipe, folder, **settings)
    trainer.train()
    metrics = trainer.evaluate() if recipe.evaluation is not None else {}
    return StyleResult(
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        metrics={
            name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second", "time"))
        },
        weights={name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        notes=recipe.notes,
        trainer=trainer,
    )


def build(hf: Any, recipe: Recipe, folder: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "adam_epsilon": 0.1,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    args = hf.TrainingArguments(**{**defaults, **recipe.settings, **settings})
    return recipe.trainer_class(
        model=recipe.model,
        args=args,
        train_dataset=recipe.train,
        eval_dataset=recipe.evaluation,
        **recipe.options,
    )


def classifier(seed: int = 0) -> transformers.BertForSequenceClassification:
    """Return a BERT of two layers without dropout."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=NUM_CLASSES,
        initializer_range=0.2,
    )
    return transformers.BertForSequenceClassification(config)


def labelled(number: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return token sequences with a class."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        input_ids = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=generator)
        label = torch.randint(0, NUM_CLASSES, (), generator=generator)
        samples.append({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": label})
    return samples


def classification(trainer_class: type[Any], **parts: Any) -> Recipe:
    """Return a recipe that trains the classifier on 16 samples and evaluates it on 6."""
    return Recipe(trainer_class, classifier(), labelled(16), labelled(6, seed=2), **parts)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
