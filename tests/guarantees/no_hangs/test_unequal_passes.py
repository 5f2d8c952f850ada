"""FSDP2 ranks that use different parameters or layers: the maths of one device, or one clear error on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.trainer.fsdp2 import layer_order
from tests.support.data_parallel import assert_same_training, fsdp2_trainer, run
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer
from tests.support.tiny_parallel import raised

SPECIAL = 3
"""First token of samples that take a branch."""
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "per_device_train_batch_size": 1,
    "max_grad_norm": 1.0,
    "shuffle": False,
}
ADAMW = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.5})}


class Layer(nn.Module):
    """Layer with two experts; each sample chooses one by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor, is_special: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            chosen = (is_special == number).nonzero().flatten()
            if len(chosen):
                hidden = hidden.index_add(0, chosen, torch.tanh(expert(hidden[chosen])))
        return hidden


class Routed(nn.Module):
    """Model with experts; `skips` names how a sample with a special token leaves a layer out."""

    def __init__(self, skips: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.skips = skips
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.layer_stack = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, VOCAB_SIZE, bias=False)
        # No rank ever uses it: on one device, AdamW leaves it as it is.
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        is_special = (input_ids[:, 0] == SPECIAL).long()
        hidden = self.embedding(input_ids)
        for number, layer in enumerate(self.layer_stack):
            if number == 1 and is_special.any() and self.skips == "middle":
                continue
            if number == 2 and is_special.any() and self.skips == "last":
                break
            hidden = layer(hidden, torch.zeros_like(is_special) if self.skips else is_special)
        logits: Tensor = self.head(hidden)
        return logits


def samples(special: set[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(12):
        tokens = torch.randint(SPECIAL + 1, VOCAB_SIZE, (6,), generator=generator)
        tokens[0] = SPECIAL if number in special else 1
        found.append({"input_ids": tokens, "labels": tokens.clone()})
    return found


# In rounds of two: both ranks without, only rank 1, only rank 0, both, none, and only rank 1.
MIXED = {3, 4, 6, 7, 11}


def train_routed(output_dir: Path, skips: str, accumulation: int) -> Any:
    settings = {**SETTINGS, "gradient_accumulation_steps": accumulation, "max_steps": 6 // accumulation}
    settings["fsdp2"] = {"find_unused_parameters": True, "shard_transformer_layers": not skips}
    trainer = fsdp2_trainer(output_dir, lambda: Routed(skips), samples(MIXED), trainer_options=dict(ADAMW), **settings)
    return run(trainer)


@pytest.mark.parametrize(
    ("skips", "accumulation"), sampled([("", 1), ("", 2), ("middle", 1)], [("", 2), ("middle", 1)])
)
def test_parameters_of_some_ranks_train_like_on_one_device(skips: str, accumulation: int, tmp_path: Path) -> None:
    """Experts inside of layers, and whole layers if the model is gathered at once."""
    settings = {**SETTINGS, "gradient_accumulation_steps": 2 * accumulation, "max_steps": 6 // accumulation}
    options = {"trainer_options": dict(ADAMW)}
    expected = run(quiet_trainer(tmp_path / "single", Routed(skips), samples(MIXED), **options, **settings))
    for result in run_on_ranks(train_routed, 2, tmp_path / "ranks", skips, accumulation):
        assert_same_training(result, expected)
        assert torch.equal(result.weights["idle"], torch.ones(3))


def train_unequal(output_dir: Path, skips: str, special: set[int], seconds: float) -> tuple[str, str]:
    layer_order.WAIT_SECONDS = seconds
    trainer = fsdp2_trainer(output_dir, lambda: Routed(skips), samples(special), **SETTINGS)
    outcome = raised(trainer.train)
    if outcome[0]:
        raise RuntimeError(": ".join(outcome))
    return outcome


CASES = {
    "": "find_unused_parameters=True",
    "middle": "Compute every layer on every rank",
    "last": "Compute every layer on every rank",
}


@pytest.mark.parametrize("skips", sampled(CASES, ["", "last"]))
def test_ranks_that_differ_at_once_name_the_difference(skips: str, tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(train_unequal, 2, tmp_path, skips, {1}, 60.0)
    messages = [str(outcome.error_message) for outcome in outcomes]
    assert messages[0] == messages[1] and messages[0].startswith("ValueError: Ranks came to different parts")
    part = {"": "experts.1.weight", "middle": "layer_stack.1", "last": "layer_stack.2"}[skips]
    assert part in messages[0] and CASES[skips] in messages[0]


@pytest.mark.parametrize("skips", sampled(CASES, ["", "middle"]))
def test_rank_that_leaves_the_order_later_names_the_layer(skips: str, tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(train_unequal, 2, tmp_path, skips, {5}, 1.0)
    assert all(outcome.failed for outcome in outcomes), "no rank hangs"
    leaving = str(outcomes[1].error_message)
    part = {"": "layer_stack.2.experts.1.weight", "middle": "layer_stack.1", "last": "layer_stack.2"}[skips]
    assert "Rank 1 came to" in leaving and part in leaving and CASES[skips] in leaving
    assert leaving in str(outcomes[0].error_message), "the other rank has the message too"


@pytest.mark.parametrize("skips", sampled(CASES, ["middle"]))
def test_ranks_that_change_together_train_on(skips: str, tmp_path: Path) -> None:
    assert run_on_ranks(train_unequal, 2, tmp_path, skips, {4, 5, 8, 9}, 60.0) == [("", "")] * 2


def count_messages(output_dir: Path) -> int:
    """Return the number of comparisons after the first step."""
    trainer = fsdp2_trainer(output_dir, lambda: Routed("middle"), samples(set()), **SETTINGS)
    counts: list[int] = []
    compare = layer_order.LayerOrder._compare

    def count(self: layer_order.LayerOrder, *args: Any) -> None:
        counts.append(trainer.state.global_step)
        compare(self, *args)

    patch = pytest.MonkeyPatch()
    patch.setattr(layer_order.LayerOrder, "_compare", count)
    try:
        trainer.train()
    finally:
        patch.undo()
    assert counts and dist.get_world_size() == 2
    return sum(step > 0 for step in counts)


def test_equal_passes_need_no_messages_after_the_first(tmp_path: Path) -> None:
    assert run_on_ranks(count_messages, 2, tmp_path) == [0, 0]
