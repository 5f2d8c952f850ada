"""Styles that change parts of the loop: order of the data, optimizer, scheduler, steps, logging."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from tests.guarantees.drop_in_scripts.styles.recipes import Recipe, accuracy, classification, classifier, labelled


class Backwards(Sampler[int]):
    """Order from the last sample to the first."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples - 1, -1, -1))

    def __len__(self) -> int:
        return self.num_samples


def own_sampler(hf: Any) -> Recipe:
    """Return a sampler from _get_train_sampler."""

    class BackwardsTrainer(hf.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            dataset = self.train_dataset if train_dataset is None else train_dataset
            recipe.notes.append(len(dataset))
            return Backwards(len(dataset))

    recipe = classification(BackwardsTrainer, settings={"train_sampling_strategy": "random"})
    return recipe


def own_loader(hf: Any) -> Recipe:
    """Return a DataLoader with a WeightedRandomSampler from get_train_dataloader."""

    class BalancedTrainer(hf.Trainer):
        def get_train_dataloader(self) -> Any:
            weights = [1.0 + float(sample["labels"]) for sample in self.train_dataset]
            generator = torch.Generator().manual_seed(11)
            sampler = WeightedRandomSampler(weights, num_samples=16, generator=generator)
            recipe.notes.append("loader")
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                sampler=sampler,
                collate_fn=self.data_collator,
            )

    recipe = classification(BalancedTrainer)
    return recipe


def layerwise_learning_rates(hf: Any) -> Recipe:
    """Build an optimizer with a smaller learning rate for lower layers."""

    class LayerwiseTrainer(hf.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                rates = {"embeddings": 0.1, "layer.0": 0.3, "layer.1": 0.6}
                groups = [
                    {
                        "params": [value],
                        "lr": self.args.learning_rate * next((rates[key] for key in rates if key in name), 1.0),
                    }
                    for name, value in self.model.named_parameters()
                ]
                self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

    return classification(LayerwiseTrainer)


def own_schedule(hf: Any) -> Recipe:
    """Build a schedule that halves the learning rate each step."""

    class HalvingTrainer(hf.Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            recipe.notes.append(num_training_steps)
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return self.lr_scheduler

    recipe = classification(HalvingTrainer)
    return recipe


def ready_optimizer(hf: Any) -> Recipe:
    """Pass optimizer and scheduler."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    return Recipe(hf.Trainer, model, labelled(16), labelled(6, seed=2), options={"optimizers": (optimizer, scheduler)})


def optimizer_class(hf: Any) -> Recipe:
    """Pass the class of the optimizer and its arguments."""
    options = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}
    return classification(hf.Trainer, options=options)


def own_training_step(hf: Any) -> Recipe:
    """Make the backward pass in training_step, with a second one through noisy embeddings."""

    class NoisyTrainer(hf.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            shifted = {**inputs, "input_ids": (inputs["input_ids"] + 1) % 20}
            self.accelerator.backward(0.5 * self.compute_loss(model, shifted))
            recipe.notes.append(self.state.global_step)
            return loss.detach()

    recipe = classification(NoisyTrainer)
    return recipe


def timed_training_step(hf: Any) -> Recipe:
    """Call super().training_step with the arguments that came."""

    class CountingTrainer(hf.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            recipe.notes.append(float(loss))
            return loss

    recipe = classification(CountingTrainer)
    return recipe


def own_prediction_step(hf: Any) -> Recipe:
    """Forbid one class in prediction_step."""

    class ForbiddingTrainer(hf.Trainer):
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, Any, Any]:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            if logits is not None:
                logits[:, 0] = -100.0
            return loss, logits, labels

    def chosen(prediction: Any) -> dict[str, float]:
        return {**accuracy(prediction), "first_class": float((prediction.predictions.argmax(-1) == 0).mean())}

    return classification(ForbiddingTrainer, options={"compute_metrics": chosen})


def own_log(hf: Any) -> Recipe:
    """Add a value to each record of the log."""

    class LoggingTrainer(hf.Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["weight_norm"] = self.model.classifier.weight.norm().item()
            super().log(logs, start_time)

    return classification(LoggingTrainer)


def own_evaluation(hf: Any) -> Recipe:
    """Evaluate on a second dataset after each evaluation."""

    class TwiceTrainer(hf.Trainer):
        def evaluate(
            self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
        ) -> dict[str, float]:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            if metric_key_prefix == "eval":
                other = super().evaluate(labelled(8, seed=5), ignore_keys, metric_key_prefix="other")
                metrics.update(other)
            recipe.notes.append(sorted(name for name in metrics if name.endswith("loss")))
            return metrics

    recipe = classification(TwiceTrainer, settings={"eval_strategy": "epoch"})
    return recipe


def undecayed_names(hf: Any) -> Recipe:
    """Choose the parameters with weight decay."""

    class DecayTrainer(hf.Trainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name in super().get_decay_parameter_names(model) if "classifier" not in name]

    return classification(DecayTrainer, settings={"weight_decay": 0.5})


def frozen_layers(hf: Any) -> Recipe:
    """Train the head only."""
    model: nn.Module = classifier()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    return Recipe(hf.Trainer, model, labelled(16), labelled(6, seed=2))


def model_factory(hf: Any) -> Recipe:
    """Pass model_init, which the Trainer calls for each training."""

    def model_init() -> nn.Module:
        recipe.notes.append("built")
        return classifier()

    recipe = Recipe(hf.Trainer, None, labelled(16), labelled(6, seed=2), options={"model_init": model_init})
    return recipe
