"""Models, data and callbacks small enough to check a trainer's numbers by hand."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.trainer.trainer import Trainer

IGNORED = -100
VOCAB_SIZE = 32


class ScalarModel(nn.Module):
    """Model with its own loss, weight x mean value of the batch: the gradient of a sample is its value."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        return {"loss": self.weight * value.mean()}


class TokenModel(nn.Module):
    """Model with logits that depend on the same token only, without biases, because their gradients would be noise."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embedding(input_ids)))
        return logits


def tiny_llama(seed: int | None = 0, **options: Any) -> LlamaForCausalLM:
    """Build a small Llama; without a seed, its weights come from the current random state."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if seed is not None:
        torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **options}))


def scalars(*values: float) -> list[dict[str, Tensor]]:
    """Return samples for `ScalarModel`."""
    return [{"value": torch.tensor(float(value))} for value in values]


def token_samples(num_samples: int, length: int = 6, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return token sequences with different numbers of targets; every fourth has none."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(num_samples):
        input_ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        labels = input_ids.clone()
        labels[: (number % 4) * 2 if number % 4 < 3 else length] = IGNORED
        samples.append({"input_ids": input_ids, "labels": labels})
    return samples


class Stream(IterableDataset[Any]):
    """Iterable dataset without a length."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class Recorder:
    """Callback that records every event with its step and metrics; `also` may react to events by name."""

    def __init__(self, **also: Callable[..., Any]) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self._also = also

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_load_model_weights":
            raise AttributeError(name)
        return partial(self._note, name)

    def _note(self, event: str, args: Any, state: Any, control: Any, **details: Any) -> Any:
        own: dict[str, Any] = {
            name: details[name] for name in ("logs", "metrics", "loss", "tokens", "grad_norm") if name in details
        }
        self.events.append((event, state.global_step, own))
        if event not in self._also:
            return None
        return self._also[event](args=args, state=state, control=control, **details)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]

    def steps(self, event: str) -> list[int]:
        return [step for name, step, _ in self.events if name == event]

    def details(self, event: str, key: str) -> list[Any]:
        return [details[key] for name, _, details in self.events if name == event]

    @property
    def logs(self) -> list[tuple[int, dict[str, Any]]]:
        """Step and record of each training log, without the final record."""
        return [
            (step, details["logs"])
            for name, step, details in self.events
            if name == "on_log" and "train_runtime" not in details["logs"]
        ]


def sgd(learning_rate: float = 0.1, momentum: float = 0.0) -> tuple[type, dict[str, Any]]:
    return torch.optim.SGD, {"lr": learning_rate, "momentum": momentum}


def quiet_trainer(
    output_dir: Path,
    model: nn.Module | None,
    train: Any,
    *callbacks: Any,
    trainer_class: type[Trainer] = Trainer,
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    trainer_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Build a CPU trainer with SGD and no shuffling that saves and logs nothing by default."""
    # Threads gain nothing on tensors of this size, and block each other on busy cores.
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "seed": 0,
        "shuffle": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
    }
    options: dict[str, Any] = {"optimizer_cls_and_kwargs": sgd(learning_rate, momentum), **(trainer_options or {})}
    return trainer_class(
        args={**defaults, **settings},
        model=model,
        train_dataset=train,
        callbacks=list(callbacks),
        default_callbacks=False,
        **options,
    )


def saved_steps(output_dir: Path) -> list[int]:
    """Return the steps of the existing checkpoints."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in output_dir.glob("checkpoints/checkpoint-*"))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights by name; collective for a sharded model."""
    return {name: full(tensor.detach()).clone() for name, tensor in model.state_dict().items()}


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a shard; collective over the ranks that share it. Other tensors are returned unchanged."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole
