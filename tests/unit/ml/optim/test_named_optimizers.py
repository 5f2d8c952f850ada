"""Optimizers by name: the choice of transformers, refused names, and exact resume of each optimizer that runs here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.training_args import OptimizerNames

from forgather.ml.optim.named_optimizers import OPTIMIZER_NAMES, parsed_options
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import TokenModel, sgd, tiny_llama, token_samples, weights

RUNNABLE = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "sgd": "momentum=0.9, nesterov=true",
    "adagrad": "lr_decay=0.1",
    "rmsprop": "momentum=0.5,centered=True",
    "adafactor": None,
}


def large_enough() -> nn.Module:
    """Build a model with parameters of 4096 elements, the least that torchao quantises."""
    return tiny_llama(hidden_size=64, intermediate_size=64, vocab_size=64, num_hidden_layers=1)


def trainer(folder: Path, name: str, options: str | None = None, **settings: Any) -> Trainer:
    torch.set_num_threads(1)
    given = {"model": tiny_llama(), **settings.pop("given", {})}
    usual = {"output_dir": str(folder), "use_cpu": True, "seed": 1, "logging_strategy": "no", "save_total_limit": None}
    usual |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "save_steps": 3}
    return Trainer(
        args={**usual, "max_steps": 6, "optim": name, "optim_args": options, **settings},
        train_dataset=token_samples(12),
        default_callbacks=False,
        **given,
    )


def test_names_are_the_names_of_transformers() -> None:
    assert set(OPTIMIZER_NAMES) == {one.value for one in OptimizerNames}


@pytest.mark.parametrize(("name", "options"), RUNNABLE.items())
def test_optimizer_resumes_exactly(name: str, options: str | None, tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight", name, options)
    straight.train()
    trainer(tmp_path / "stopped", name, options, max_steps=3, lr_scheduler_type="constant").train()
    whole = trainer(tmp_path / "whole", name, options, lr_scheduler_type="constant")
    whole.train()
    resumed = trainer(tmp_path / "stopped", name, options, lr_scheduler_type="constant")
    resumed.train()
    assert resumed.state.global_step == 6
    for (key, expected), value in zip(weights(whole.model).items(), weights(resumed.model).values(), strict=True):
        assert torch.equal(expected, value), key
    assert type(straight.optimizer).__name__.lower().startswith(name.split("_")[0].replace("adamw", "adam"))


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_quantised_moments_resume_exactly(name: str, tmp_path: Path) -> None:
    def run(folder: str, **settings: Any) -> Trainer:
        options = {"given": {"model": large_enough()}, "lr_scheduler_type": "constant", **settings}
        made = trainer(tmp_path / folder, name, **options)
        # The compiler would take a minute on a CPU. Eager operations are the same ones.
        with torch.compiler.set_stance("force_eager"):
            made.train()
        return made

    straight = run("straight")
    run("stopped", max_steps=3)
    resumed = run("stopped")
    state = next(iter(straight.optimizer.state.values()))
    assert set(state["exp_avg"]) == {"codes", "scale", "qmap"}, "quantised, and stored as plain tensors"
    for (key, expected), value in zip(weights(straight.model).items(), weights(resumed.model).values(), strict=True):
        assert torch.equal(expected, value), key


def test_default_is_the_optimizer_without_a_name(tmp_path: Path) -> None:
    named = trainer(tmp_path / "named", "adamw_torch")
    named.train()
    args = TrainingArguments(learning_rate=1e-2, weight_decay=0.1)
    assert type(named.optimizer) is torch.optim.AdamW and args.optim == "adamw_torch"
    assert [group["fused"] for group in named.optimizer.param_groups] == [True, True]


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "adafactor"])
def test_biases_and_norms_are_not_decayed(name: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, name, max_steps=1)
    made.train()
    names = {parameter: key for key, parameter in made.unwrapped_model().named_parameters()}
    by_decay = {group["weight_decay"]: [names[one] for one in group["params"]] for group in made.optimizer.param_groups}
    assert sorted(by_decay) == [0.0, 0.1]
    assert all("norm" in key for key in by_decay[0.0]) and len(by_decay[0.0]) == 5
    assert not any("norm" in key or "bias" in key for key in by_decay[0.1])


def test_options_reach_the_optimizer(tmp_path: Path) -> None:
    made = trainer(tmp_path, "sgd", "momentum=0.9, nesterov=true", max_steps=1)
    made.train()
    group = made.optimizer.param_groups[0]
    assert type(made.optimizer) is torch.optim.SGD and group["momentum"] == 0.9 and group["nesterov"] is True
    assert parsed_options("a=1, b = x") == {"a": "1", "b": "x"} and parsed_options(None) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"name": "adamx"},
            "optim='adamx' cannot be used: choose one of 'adamw_torch', 'adamw_torch_fused', 'adafactor'",
        ),
        ({"name": "lion_8bit"}, "needs the package bitsandbytes, which is not installed: pip install bitsandbytes"),
        ({"name": "stable_adamw"}, "needs the package optimi, which is not installed: pip install torch-optimi"),
        ({"name": "galore_adamw"}, "projects the gradients of chosen linear layers. Pass optimizer_factory"),
        ({"name": "schedule_free_adamw"}, "weights differ between training and evaluation"),
        ({"name": "lomo"}, "fuse_optim_with_backward=True"),
        ({"name": "sgd", "options": "momentum"}, "'momentum' is not of the form name=value"),
        ({"name": "sgd", "options": "alpha=1"}, "optim='sgd' does not read alpha"),
        ({"name": "adamw_torch", "options": "eps=1"}, "optim='adamw_torch' does not read eps"),
        ({"name": "sgd", "options": "momentum=much"}, "could not convert string to float"),
        ({"name": "sgd", "given": {"optimizer_cls_and_kwargs": sgd()}}, "has no effect beside an optimizer"),
    ],
)
def test_refused_at_construction(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        trainer(tmp_path, **settings)
    assert words in str(caught.value)


def test_unknown_shapes_of_a_model_do_not_matter(tmp_path: Path) -> None:
    made = trainer(tmp_path, "adafactor", max_steps=1)
    made.model = TokenModel()
    made.train()
    assert type(made.optimizer).__name__ == "Adafactor"
