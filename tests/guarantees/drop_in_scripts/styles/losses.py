"""Styles that compute their own loss: class weights, contrastive pairs, several heads, a loss function."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.guarantees.drop_in_scripts.styles.recipes import (
    NUM_CLASSES,
    VOCAB_SIZE,
    Recipe,
    accuracy,
    classification,
    labelled,
)

CLASS_WEIGHTS = (1.0, 2.0, 0.5)


def weighted_sum(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * torch.tensor(CLASS_WEIGHTS)[labels]).sum()


def weighted_loss(hf: Any) -> Recipe:
    """Ignore num_items_in_batch and return the mean of the batch, as most programs do."""

    class WeightedTrainer(hf.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = weighted_sum(outputs.logits, labels) / len(labels)
            return (loss, outputs) if return_outputs else loss

    return classification(WeightedTrainer)


def weighted_loss_of_items(hf: Any) -> Recipe:
    """Divide by num_items_in_batch, the number of labels of the whole step."""

    class WeightedTrainer(hf.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            count = len(labels) if num_items_in_batch is None else num_items_in_batch
            loss = weighted_sum(outputs.logits, labels) / count
            return (loss, outputs) if return_outputs else loss

    return classification(WeightedTrainer)


def weighted_loss_with_kwargs(hf: Any) -> Recipe:
    """Accept all keyword arguments and use none."""

    class WeightedTrainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.get("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = weighted_sum(logits.view(-1, self.model.config.num_labels), labels.view(-1)) / len(labels)
            return (loss, outputs) if return_outputs else loss

    return classification(WeightedTrainer)


def weighted_loss_of_old_signature(hf: Any) -> Recipe:
    """Override the signature before num_items_in_batch."""

    class WeightedTrainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = weighted_sum(outputs.logits, labels) / len(labels)
            return (loss, outputs) if return_outputs else loss

    return classification(WeightedTrainer)


def added_penalty(hf: Any) -> Recipe:
    """Call super().compute_loss and add a penalty."""

    class PenaltyTrainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + 0.01 * outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return classification(PenaltyTrainer, options={"compute_metrics": accuracy})


class Encoder(nn.Module):
    """Encoder of token sequences into unit vectors, without labels and without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        pooled = self.head(torch.tanh(self.embedding(input_ids)).mean(1))
        return nn.functional.normalize(pooled, dim=-1)


def contrastive_pairs(number: int, seed: int) -> list[dict[str, Tensor]]:
    samples = labelled(number, seed)
    return [{"anchor_ids": sample["input_ids"], "positive_ids": sample["input_ids"].roll(1) % 7} for sample in samples]


def contrastive_loss(hf: Any) -> Recipe:
    """Call the model twice for each batch, and compare each anchor with all positives of the batch."""

    class ContrastiveTrainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            anchors = model(input_ids=inputs["anchor_ids"])
            positives = model(input_ids=inputs["positive_ids"])
            scores = anchors @ positives.T / 0.1
            loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
            return (loss, {"scores": scores}) if return_outputs else loss

        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, Any, Any]:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                loss = self.compute_loss(model, inputs)
            return loss.detach(), None, None

    # The batches of the evaluation are equal, because this loss depends on the whole batch.
    return Recipe(
        ContrastiveTrainer,
        Encoder(),
        contrastive_pairs(16, 1),
        contrastive_pairs(8, 2),
        settings={"remove_unused_columns": False},
    )


class TwoHeads(nn.Module):
    """Model with a class for each sequence and a class for each token, which returns a dict with both losses added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.topic_head = nn.Linear(8, NUM_CLASSES)
        self.tag_head = nn.Linear(8, 4)

    def forward(
        self, input_ids: Tensor, topic_labels: Tensor | None = None, tag_labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden = torch.tanh(self.embedding(input_ids))
        topics, tags = self.topic_head(hidden.mean(1)), self.tag_head(hidden)
        if topic_labels is None or tag_labels is None:
            return {"topics": topics, "tags": tags}
        topic_loss = nn.functional.cross_entropy(topics, topic_labels)
        tag_loss = nn.functional.cross_entropy(tags.flatten(0, 1), tag_labels.flatten())
        return {"loss": topic_loss + 0.5 * tag_loss, "topics": topics, "tags": tags}


def two_heads(hf: Any) -> Recipe:
    """Train two heads together; metrics get tuples of predictions and labels."""

    def heads_accuracy(prediction: Any) -> dict[str, float]:
        (topics, tags), (topic_labels, tag_labels) = prediction.predictions, prediction.label_ids
        return {
            "topic_accuracy": float((topics.argmax(-1) == topic_labels).mean()),
            "tag_accuracy": float((tags.argmax(-1) == tag_labels).mean()),
            "num_tags": float(tags.shape[0] * tags.shape[1]),
        }

    return Recipe(
        hf.Trainer,
        TwoHeads(),
        headed_samples(16, 1),
        headed_samples(8, 2),
        settings={"label_names": ["topic_labels", "tag_labels"]},
        options={"compute_metrics": heads_accuracy},
    )


def headed_samples(number: int, seed: int) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": one["input_ids"], "topic_labels": one["labels"], "tag_labels": one["input_ids"] % 4}
        for one in labelled(number, seed)
    ]


def loss_function(hf: Any) -> Recipe:
    """Pass a loss function that gets outputs, labels and the number of items."""

    def smooth_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = nn.functional.cross_entropy(outputs["logits"], labels, label_smoothing=0.2, reduction="sum")
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    return classification(hf.Trainer, options={"compute_loss_func": smooth_loss, "compute_metrics": accuracy})
