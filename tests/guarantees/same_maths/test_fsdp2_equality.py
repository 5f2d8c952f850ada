"""FSDP2 and HSDP: ranks that share a batch and a model train like one device with the full batch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, assert_same_training, fsdp2_trainer, run
from tests.support.pipelines import tied_gpt2
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled_keys
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, quiet_trainer, tiny_llama, token_samples

SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "max_grad_norm": 0.5,
    "shuffle": True,
    "eval_strategy": "steps",
    "eval_steps": 4,
}
GLOBAL_BATCH = 8
NUM_SAMPLES = 50
"""The last round of an epoch has two samples: with four ranks, two or more of them have an empty batch."""
NUM_EVAL_SAMPLES = 4
"""With batches of three, the second of two ranks has one sample; of four ranks, two have no batch at all."""

# The large epsilon prevents updates from rounding noise in gradients that are really zero.
ADAMW: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "fused": True})}


class Tied(nn.Module):
    """Model with tied weights and one more parameter than rows per rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(VOCAB_SIZE, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, VOCAB_SIZE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        logits: Tensor = self.head(hidden)
        return logits


def seeded_gpt2() -> nn.Module:
    torch.manual_seed(2)
    return tied_gpt2(2)


@dataclass(frozen=True)
class Case:
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = tiny_llama
    options: dict[str, Any] = field(default_factory=dict)
    whole_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run on one device too."""
    gives_model: bool = False


CASES: dict[str, Case] = {
    "2 ranks": Case(2),
    "2 ranks, model given": Case(2, gives_model=True),
    "2 ranks, every rank reads": Case(2, {"dispatch_batches": False}),
    "2 ranks, accumulation, adamw": Case(2, whole_settings={"gradient_accumulation_steps": 3}, options=ADAMW),
    "2 ranks, only evaluation sharded": Case(2, {"dispatch_eval_batches": False}),
    "2 ranks, tied": Case(2, model=Tied, options=ADAMW),
    "2 ranks, tied gpt2": Case(2, model=seeded_gpt2),
    "2 ranks, kept after forward": Case(
        2, {"fsdp2": {"reshard_after_forward": False}}, whole_settings={"gradient_accumulation_steps": 2}
    ),
    "2 ranks, one unit": Case(2, {"fsdp2": {"shard_transformer_layers": False}}),
    "2 ranks, layers by name": Case(2, {"fsdp2": {"transformer_layers_path": "model.layers"}}),
    "2 ranks, no layers": Case(2, model=TokenModel),
    "2 ranks, host memory": Case(2, {"fsdp2": {"cpu_offload": True}}, options=ADAMW),
    "2 ranks, gradient checkpointing": Case(2, whole_settings={"gradient_checkpointing": True}),
    "2 ranks, strong clipping": Case(2, whole_settings={"max_grad_norm": 0.05}),
    "2 ranks, average": Case(2, whole_settings={"ema_decay": 0.8, "eval_ema": True}),
    "4 ranks, accumulation": Case(4, whole_settings={"gradient_accumulation_steps": 2}),
    "4 ranks, every rank reads, tied": Case(4, {"dispatch_batches": False}, model=Tied, options=ADAMW),
    "4 ranks, divided over two after forward": Case(4, {"fsdp2": {"reshard_after_forward": 2}}),
    "2 replicas of 2 shards, accumulation, adamw": Case(
        4,
        {"fsdp2": {"replicate_size": 2}},
        options=ADAMW,
        whole_settings={"gradient_accumulation_steps": 2},
    ),
    "2 replicas of 2 shards, every rank reads": Case(
        4, {"fsdp2": {"replicate_size": 2}, "dispatch_batches": False}, model=Tied
    ),
}
CASES = sampled_keys(
    CASES,
    "2 ranks",
    "2 ranks, model given",
    "2 ranks, accumulation, adamw",
    "2 ranks, tied gpt2",
    "2 ranks, kept after forward",
    "2 ranks, one unit",
    "2 ranks, no layers",
    "2 ranks, host memory",
    "2 ranks, gradient checkpointing",
    "2 ranks, average",
    "4 ranks, every rank reads, tied",
    "4 ranks, divided over two after forward",
    "2 replicas of 2 shards, accumulation, adamw",
)
Outcome = tuple[Result, dict[str, float]]
"""Result of a run, and the losses of an evaluation after it."""


def train(build: Callable[..., Trainer], batch: int, output_dir: Path, case: Case, **settings: Any) -> Outcome:
    options = {"eval_dataset": token_samples(NUM_EVAL_SAMPLES, seed=3), **case.options}
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": 3}
    trainer = build(
        output_dir,
        train=token_samples(NUM_SAMPLES),
        trainer_options=options,
        **{**SETTINGS, **sizes, **case.whole_settings, **settings},
    )
    result = run(trainer)
    return result, {name: value for name, value in trainer.evaluate().items() if name.endswith("loss")}


class References:
    """Runs on one device, each only once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._outcomes: dict[str, Outcome] = {}

    def of(self, case: Case) -> Outcome:
        key = f"{case.model} {case.options} {case.whole_settings}"
        if key not in self._outcomes:
            build = functools.partial(quiet_trainer, model=case.model())
            self._outcomes[key] = train(build, GLOBAL_BATCH, self._directory, case)
        return self._outcomes[key]


def train_cases(output_dir: Path, names: list[str]) -> dict[str, Outcome]:
    outcomes = {}
    for name in names:
        case = CASES[name]
        build = functools.partial(fsdp2_trainer, model=case.model() if case.gives_model else case.model)
        outcomes[name] = train(build, GLOBAL_BATCH // case.num_ranks, output_dir / name, case, **case.settings)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Outcomes of all ranks by case; one launch for each world size."""
    found: dict[str, list[Outcome]] = {}
    for num_ranks in (2, 4):
        names = [name for name, case in CASES.items() if case.num_ranks == num_ranks]
        results = run_on_ranks(train_cases, num_ranks, tmp_path_factory.mktemp("parts"), names)
        found.update({name: [result[name] for result in results] for name in names})
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_like_one_device(name: str, outcomes: dict[str, list[Outcome]], references: References) -> None:
    whole, whole_losses = references.of(CASES[name])
    for parts, parts_losses in outcomes[name]:
        assert_same_training(parts, whole)
        assert parts_losses == pytest.approx(whole_losses, rel=1e-6) and whole_losses
        for key in ("total_tokens", "train_samples", "effective_batch_size", "epoch", "step"):
            assert parts.metrics[key] == whole.metrics[key], key
        assert parts.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=1e-6)


def test_every_rank_reports_the_same(outcomes: dict[str, list[Outcome]]) -> None:
    for name, ranks in outcomes.items():
        for result, losses in ranks[1:]:
            assert (result.losses, result.norms, losses) == (ranks[0][0].losses, ranks[0][0].norms, ranks[0][1]), name
