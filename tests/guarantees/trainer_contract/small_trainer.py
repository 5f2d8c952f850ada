"""Small subclass of BaseTrainer with its own training loop, for the tests of the trainer contract."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.trainer.base_trainer import BaseTrainer
from forgather.ml.trainer.trainer_types import BaseDataset, MinimalTrainingArguments, TrainOutput
from tests.support.tiny_models import token_samples

SAMPLES = token_samples(12)
NUM_STEPS = 8


@dataclass(kw_only=True)
class SmallArguments(MinimalTrainingArguments):
    momentum: float = 0.9


class DropoutModel(nn.Module):
    """Model with dropout, which reveals a resume without random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(32, 8), nn.Dropout(0.5), nn.Linear(8, 32, bias=False))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(input_ids)
        return logits


class Batches:
    """Endless batches of two samples, with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        while True:
            chosen = [SAMPLES[(2 * self.position + number) % len(SAMPLES)] for number in range(2)]
            self.position += 1
            yield {name: torch.stack([one[name] for one in chosen]) for name in chosen[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SmallTrainer(BaseTrainer[SmallArguments]):
    """Trainer with the three abstract methods; everything else is inherited."""

    def _prepare(self, train_dataset: BaseDataset | None, eval_dataset: BaseDataset | None) -> None:
        options = {"lr": self.args.learning_rate, "momentum": self.args.momentum}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **options)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.train_dataloader = None if train_dataset is None else Batches()
        self.eval_dataloader = eval_dataset

    def _train_loop(self) -> TrainOutput:
        self.model.train()
        loss = torch.tensor(0.0)
        for batch in self.train_dataloader:
            if self.state.global_step >= self.args.max_steps or self.control.should_training_stop:
                break
            loss = self._loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.lr_scheduler.step()
            self.state.global_step += 1
            self._dispatch_event("on_step_end")
            self.log({"loss": loss.item()})
            if self.state.global_step % self.args.save_steps == 0:
                self.save_checkpoint()
        return TrainOutput(self.state.global_step, {"train_loss": loss.item()})

    @torch.no_grad()
    def _eval_loop(self) -> dict[str, float]:
        self.model.eval()
        losses = [self._loss({name: value[None] for name, value in one.items()}) for one in self.eval_dataloader]
        return {"eval_loss": torch.stack(losses).mean().item()}

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def small_trainer(
    output_dir: Path, *callbacks: Any, trainer_class: type[BaseTrainer[Any]] = SmallTrainer, **settings: Any
) -> Any:
    """Return a trainer of this class that saves at every third step."""
    torch.set_num_threads(1)
    options = {
        name: settings.pop(name) for name in ("eval_dataset", "lr_scheduler", "optimizer", "model") if name in settings
    }
    args = {
        "output_dir": str(output_dir),
        "max_steps": NUM_STEPS,
        "save_steps": 3,
        "learning_rate": 0.5,
        "use_cpu": True,
    }
    return trainer_class(
        {**args, **settings},
        options.pop("model", None) or DropoutModel(),
        train_dataset=SAMPLES,
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(first == second and torch.equal(mine, theirs) for (first, mine), (second, theirs) in pairs)
