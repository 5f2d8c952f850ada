"""Weight decay skips biases and norms in every kind of trainer, and a resumed run keeps its parameter groups."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.trainer.setup.optimizer_construction import undecayed_names
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, pipeline_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, tiny_llama, token_samples, weights

DECAY = {"weight_decay": 0.5, "learning_rate": 0.1}


class Mixed(nn.Module):
    """Layers of many kinds, some with names that only resemble biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 4)
        self.unbiased_layer = nn.Linear(4, 4)
        self.on_heads = nn.LayerNorm((2, 2))
        self.batch = nn.BatchNorm1d(4)
        self.position_bias = nn.Embedding(VOCAB_SIZE, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.head = nn.Linear(4, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.unbiased_layer(self.embedding(input_ids) + self.position_bias(input_ids))
        hidden = self.on_heads(hidden.unflatten(-1, (2, 2))).flatten(-2)
        logits: Tensor = self.head(self.batch(hidden.transpose(1, 2)).transpose(1, 2) * self.scale)
        return logits


def trainer_for(output_dir: Path, model: nn.Module, settings: dict[str, Any] | None = None, **options: Any) -> Trainer:
    usual: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    # The arguments give AdamW, unless options set the optimizer.
    options = options or {"optimizer_cls_and_kwargs": None}
    return quiet_trainer(
        output_dir, model, token_samples(16), trainer_options=options, **{**usual, **DECAY, **(settings or {})}
    )


def test_biases_and_norms_are_found_by_module_name_and_dimensions() -> None:
    assert undecayed_names(Mixed()) == {
        *("unbiased_layer.bias", "on_heads.weight", "on_heads.bias", "batch.weight", "batch.bias"),
        *("position_bias.weight", "scale"),
    }


def plain_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = [parameter for _, parameter in parameters]
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize(
    ("settings", "options", "num_groups"),
    [
        ({}, {}, 2),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5})}, 2),
        ({}, {"optimizer_factory": plain_adamw}, 2),
        ({"fuse_optim_with_backward": True}, {}, 2),
        ({"weight_decay_groups": "all"}, {}, 1),
        ({"weight_decay": 0.0}, {}, 1),
        ({}, {"optimizer_factory": two_groups}, 2),
        ({}, {"optimizer_groups": {"heads": {"regex": "head"}}, "optimizer_cls_and_kwargs": None}, 2),
    ],
    ids=["adamw", "class", "factory", "fused", "all", "no decay", "factory of groups", "optimizer_groups"],
)
def test_weight_decay_is_skipped_only_in_groups_of_the_trainer(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], num_groups: int
) -> None:
    model = Mixed()
    trainer = trainer_for(tmp_path, model, {**settings, "max_steps": 1}, **options)
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert len(groups) == num_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    undecayed = {names[one] for group in groups for one in group["params"] if not group["weight_decay"]}
    own_groups = "optimizer_groups" in options or options.get("optimizer_factory") is two_groups
    if settings.get("weight_decay") == 0.0:
        assert undecayed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    elif own_groups or "weight_decay_groups" in settings:
        assert undecayed == set()
    else:
        assert undecayed == undecayed_names(model)


def test_passed_optimizer_is_unchanged(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = plain_adamw(model.parameters())
    trainer_for(tmp_path, model, {"max_steps": 1}, optimizer=optimizer, optimizer_cls_and_kwargs=None).train()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def test_updates_equal_manual_groups(tmp_path: Path) -> None:
    """For a Llama, transformers makes the same groups: its only undecayed parameters are norms."""
    groups = {"norms": {"regex": "norm", "config": {"weight_decay": 0.0}}}
    by_hand = trainer_for(tmp_path / "hand", tiny_llama(), optimizer_groups=groups, optimizer_cls_and_kwargs=None)
    automatic = trainer_for(tmp_path / "auto", tiny_llama())
    for trainer in (by_hand, automatic):
        trainer.train()
    expected = weights(by_hand.unwrapped_model())
    assert all(torch.equal(value, expected[name]) for name, value in weights(automatic.unwrapped_model()).items())


def test_model_without_decayed_parameters_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(VOCAB_SIZE, VOCAB_SIZE), nn.LayerNorm(VOCAB_SIZE))
    model[0].requires_grad_(False)

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.layers(input_ids)
            return logits

    trainer = trainer_for(tmp_path, Norm(), {"max_steps": 1})
    trainer.train()
    assert "weight_decay=0.5 has no effect: the model has only biases, norms" in caplog.text
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0]


# --- resume


def cosine(optimizer: Any) -> Any:
    """Return a schedule with one state per group, which fits only the same number of groups."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


@pytest.mark.parametrize(
    ("first", "then", "fused", "by_hand"),
    [("all", "auto", False, False), ("auto", "all", True, False), ("all", "auto", True, True)],
    ids=["one group", "two groups, in backward", "one group, by load_checkpoint"],
)
def test_resumed_run_keeps_its_groups_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, then: str, fused: bool, by_hand: bool
) -> None:
    settings = {"fuse_optim_with_backward": fused}
    options: dict[str, Any] = {"lr_scheduler_factory": cosine, "optimizer_cls_and_kwargs": None}
    straight = trainer_for(tmp_path, tiny_llama(), {**settings, "weight_decay_groups": first}, **options)
    straight.train()
    checkpoint = tmp_path / "checkpoints/checkpoint-2"
    changed = {**settings, "weight_decay_groups": then, "resume_from_checkpoint": str(checkpoint)}
    resumed = trainer_for(tmp_path, tiny_llama(seed=1), changed, **options)
    with caplog.at_level(logging.INFO, logger="forgather"):
        if by_hand:
            assert resumed.load_checkpoint(str(checkpoint)) == str(checkpoint)
            caplog.clear()
        resumed.train()
    said = [
        record.getMessage() for record in caplog.records if "groups of the checkpoint are kept" in record.getMessage()
    ]
    assert len(said) == 1 and f"weight_decay_groups='{then}' applies to new runs" in said[0]
    assert len(resumed.optimizer.param_groups) == (1 if first == "all" else 2)
    expected = weights(straight.unwrapped_model())
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed.unwrapped_model()).items())


def test_resume_without_the_optimizer_uses_the_requested_groups(tmp_path: Path) -> None:
    trainer_for(tmp_path, tiny_llama(), {"weight_decay_groups": "all"}).train()
    fresh = {"skip_checkpoint_components": ["optimizer", "scheduler"], "max_steps": 5}
    resumed = trainer_for(tmp_path, tiny_llama(), fresh)
    resumed.train()
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.0]


def groups_on_ranks(output_dir: str, then: str) -> list[tuple[float, int]]:
    """Resume on ranks with another setting; return the decay and number of parameters of each group."""
    options: dict[str, Any] = {"optimizer_cls_and_kwargs": None, "lr_scheduler_factory": cosine}
    settings: dict[str, Any] = {**DECAY, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
    make: Callable[..., Trainer] = pipeline_trainer
    for number, grouping in enumerate(("auto" if then == "all" else "all", then)):
        changed = {**settings, "weight_decay_groups": grouping, "max_steps": number + 1}
        trainer = make(Path(output_dir), llama, token_samples(16), trainer_options=options, **changed)
        trainer.train()
    return [(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize("then", ["all", "auto"])
def test_stages_resume_with_the_groups_of_the_checkpoint(tmp_path: Path, then: str) -> None:
    for groups in run_on_ranks(groups_on_ranks, 2, str(tmp_path), then):
        assert [decay for decay, _ in groups] == ([0.5, 0.0] if then == "all" else [0.5])
        assert all(number > 0 for _, number in groups)
