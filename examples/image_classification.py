"""Trains an image classifier, a plain torch module, with accuracy as metric; keeps the best checkpoint.

    python examples/image_classification.py

The images are circles, squares and crosses, drawn with noise. Run the command again to resume.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction

from forgather import Trainer, TrainingArguments

NUM_CLASSES, SIZE = 3, 24


class Shapes(Dataset[dict[str, Tensor]]):
    """Sample i is drawn on access from the seed `first + i`, so every epoch and every resume sees the same images."""

    def __init__(self, first: int, num_images: int) -> None:
        self.first, self.num_images = first, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % NUM_CLASSES
        x, y, radius = (torch.rand(3, generator=generator) * torch.tensor([8, 8, 4]) + torch.tensor([8, 8, 4])).tolist()
        down, right = torch.meshgrid(torch.arange(SIZE) - y, torch.arange(SIZE) - x, indexing="ij")
        farther, nearer = torch.maximum(down.abs(), right.abs()), torch.minimum(down.abs(), right.abs())
        drawn = [down**2 + right**2 < radius**2, farther < 0.9 * radius, (farther < radius) & (nearer < 0.3 * radius)]
        image = drawn[label] + 0.2 * torch.randn(SIZE, SIZE, generator=generator)
        return {"pixel_values": image[None], "labels": torch.tensor(label)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, NUM_CLASSES)),
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


trainer = Trainer(
    args=TrainingArguments(
        output_dir="runs/image_classification",
        num_train_epochs=4,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        logging_steps=15,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        load_best_model_at_end=True,
        seed=1,
    ),
    model_init=Classifier,
    train_dataset=Shapes(0, 960),
    eval_dataset=Shapes(1_000_000, 300),
    compute_loss_func=nn.functional.cross_entropy,
    compute_metrics=accuracy,
)
trainer.train()
print(f"best accuracy {trainer.state.best_metric:.2f}")
