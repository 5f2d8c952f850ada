"""Assignment of parameters to optimizer groups and optimizers."""

import logging
import types
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer

from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.optim.opt_utils import (
    OptimGroupMap,
    build_optimizer_buckets,
    build_parameter_groups,
    check_group_map,
    make_grouped_optimizer,
    optimizer_of_nothing,
    warn_of_unknown_options,
)


def make_model() -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(4, 3), "norm": nn.LayerNorm(3), "proj": nn.Linear(3, 2)})


def make_sgd(groups: Iterable[Any]) -> Optimizer:
    return SGD(groups, lr=0.1)


def make_adamw(groups: Iterable[Any]) -> Optimizer:
    return AdamW(groups, lr=0.01)


def names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [[name for name, _ in group["params"]] for group in groups]


def groups_of(group_map: OptimGroupMap, **kwargs: Any) -> list[dict[str, Any]]:
    return build_parameter_groups(make_model().named_parameters(), group_map, **kwargs)


def test_first_match_wins_and_the_rest_comes_last() -> None:
    groups = groups_of(
        {
            "norm": {"regex": "norm", "config": {"lr": 0.5}},
            "no_decay": {"regex": "bias$", "config": {"weight_decay": 0.0}},
        }
    )
    assert names(groups) == [["norm.weight", "norm.bias"], ["proj.bias"], ["embed.weight", "proj.weight"]]
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
        {"lr": 0.5},
        {"weight_decay": 0.0},
        {},
    ]


def test_group_without_regex_takes_the_rest_in_any_position() -> None:
    groups = groups_of({"decay": {"config": {"weight_decay": 0.1}}, "biases": {"regex": "bias"}})
    assert names(groups) == [["norm.bias", "proj.bias"], ["embed.weight", "norm.weight", "proj.weight"]]
    assert groups[1]["weight_decay"] == 0.1


def test_group_set_to_none_is_switched_off() -> None:
    assert names(groups_of({"norm": None, "biases": {"regex": "bias"}, "other": None})) == [
        ["norm.bias", "proj.bias"],
        ["embed.weight", "norm.weight", "proj.weight"],
    ]


def test_no_groups_make_one_group() -> None:
    assert len(groups_of({})) == 1


def test_torch_optimizer_keeps_the_names() -> None:
    optimizer = make_adamw(groups_of({"biases": {"regex": "bias", "config": {"weight_decay": 0.0}}}))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["norm.bias", "proj.bias"],
        ["embed.weight", "norm.weight", "proj.weight"],
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]


def test_frozen_parameters_are_skipped() -> None:
    model = make_model()
    model["embed"].requires_grad_(False)  # type: ignore[index]
    groups = build_parameter_groups(model.named_parameters(), {"biases": {"regex": "bias"}})
    assert names(groups) == [["norm.bias", "proj.bias"], ["norm.weight", "proj.weight"]]
    with pytest.raises(ValueError, match="nothing to train"):
        build_parameter_groups(model.requires_grad_(False).named_parameters(), {})


def test_empty_groups_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    groups = groups_of({"all": {"regex": "."}, "typo": {"regex": "biass"}, "late": {"regex": "bias"}})
    assert len(groups) == 1
    assert caplog.messages == [
        "Optimizer group 'typo' is not used: its regex 'biass' matches no trainable parameter.",
        "Optimizer group 'late' is not used: its regex 'bias' matches only parameters that earlier groups took.",
    ]


def test_assignment_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        groups_of({"biases": {"regex": "bias", "config": {"lr": 0.5}}}, debug=True)
    assert caplog.messages == [
        "Optimizer group biases: 2 parameters, {'lr': 0.5}\n    norm.bias (3,)\n    proj.bias (2,)",
        "Optimizer group (rest): 3 parameters, default options\n    embed.weight (4, 3)\n    norm.weight (3,)"
        "\n    proj.weight (2, 3)",
    ]


def test_groups_are_collected_by_factory() -> None:
    group_map: OptimGroupMap = {
        "embed": {"regex": "embed", "factory": make_sgd, "config": {"lr": 0.5}},
        "norm": {"regex": "norm"},
        "biases": {"regex": "bias", "factory": make_sgd},
    }
    buckets = build_optimizer_buckets(make_model().named_parameters(), group_map, make_adamw)
    assert [(factory, names(groups)) for factory, groups in buckets] == [
        (make_sgd, [["embed.weight"], ["proj.bias"]]),
        (make_adamw, [["norm.weight", "norm.bias"], ["proj.weight"]]),
    ]


def test_groups_filled_on_other_ranks_exist_and_are_empty(caplog: pytest.LogCaptureFixture) -> None:
    group_map: OptimGroupMap = {
        "head": {"regex": "head", "config": {"lr": 0.5}},
        "embed": {"regex": "embed", "factory": make_sgd},
        "nothing": {"regex": "no such name"},
    }
    named = [(name, parameter) for name, parameter in make_model().named_parameters() if "embed" not in name]
    optimizer = make_grouped_optimizer(named, group_map, make_adamw, names_elsewhere=["embed.weight", "head.weight"])
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 4, 0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01, 0.1]
    for _, parameter in named:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    assert [record.args[0] for record in caplog.records] == ["nothing"]
    nobody = make_grouped_optimizer([], group_map, make_adamw, names_elsewhere=["embed.weight"])
    assert [len(group["params"]) for group in nobody.param_groups] == [0]


def test_factories_are_never_called_without_parameters() -> None:
    def flattened(groups: Any) -> Optimizer:
        return SGD([member for group in groups for member in group["params"]], lr=0.3)

    group_map: OptimGroupMap = {"embed": {"regex": "embed", "factory": flattened}}
    named = [(name, parameter) for name, parameter in make_model().named_parameters() if "embed" not in name]
    optimizer = make_grouped_optimizer(named, group_map, make_adamw, names_elsewhere=["embed.weight"])
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.3, 0), (0.01, 4)]
    assert optimizer_of_nothing(Adagrad).state_dict()["state"] == {}
    matrices = optimizer_of_nothing(lambda members: Muon(members, lr=0.02))
    assert [(group["lr"], group["params"]) for group in matrices.param_groups] == [(0.02, [])]
    matrices.step()


def test_optimizers_of_any_class_may_have_groups() -> None:
    class Own:
        def __init__(self, groups: Any) -> None:
            self.param_groups = list(groups)

    group_map: OptimGroupMap = {"norm": {"regex": "norm", "config": {"lr": 0.5}}}
    for optimizer in (Own([]), types.SimpleNamespace(optimizers={"one": Own([])})):
        warn_of_unknown_options(optimizer, group_map)  # type: ignore[arg-type]


def test_unknown_optimizer_options_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    group_map: OptimGroupMap = {"norm": {"regex": "norm", "config": {"lrr": 1.0, "lr": 0.5}}, "off": None}
    warn_of_unknown_options(make_grouped_optimizer(make_model().named_parameters(), group_map, make_adamw), group_map)
    assert "Optimizer group 'norm' sets lrr, which AdamW does not list among its options" in caplog.text


def test_one_factory_makes_one_plain_optimizer() -> None:
    optimizer = make_grouped_optimizer(make_model().named_parameters(), {"norm": {"regex": "norm"}}, make_adamw)
    assert isinstance(optimizer, AdamW) and len(optimizer.param_groups) == 2


def test_several_factories_make_a_multiopt() -> None:
    group_map: OptimGroupMap = {"embed": {"regex": "embed", "factory": make_sgd, "config": {"lr": 0.5}}}
    optimizer = make_grouped_optimizer(make_model().named_parameters(), group_map, make_adamw)
    assert isinstance(optimizer, Multiopt)
    assert [type(part) for part in optimizer.optimizers] == [SGD, AdamW]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]


@pytest.mark.parametrize(
    ("group_map", "message"),
    [
        ({"a": {"regex": "("}}, r"'a': '\(' is not a regular expression"),
        ({"a": {"regex": "x", "lr": 1.0}}, r"'a' has \['lr'\].*\"config\""),
        ({"a": {}, "b": {"config": {"lr": 1.0}}}, "'a', 'b' have no regex"),
        ({"a": {"regex": "x", "config": {"lr": -1.0}}}, "'a' has lr=-1.0, but a learning rate must be 0 or more"),
        ({"a": {"regex": "x", "config": {"lr": float("nan")}}}, "'a' has lr=nan"),
        ({"a": {"regex": "x", "factory": "SGD"}}, "'a' has factory='SGD', but a factory must take"),
        ({"a": {"regex": 5}}, "'a' has regex=5, but a regular expression must be a string"),
        ({"a": {"regex": "x", "config": ["lr"]}}, r"'a' has config=\['lr'\], but it must map options to values"),
        ({"a": "embed"}, "'a' is 'embed', but must be a mapping of regex, config, factory"),
        (["a"], r"optimizer_groups=\['a'\] cannot be used: pass a mapping"),
    ],
)
def test_invalid_group_maps_are_rejected(group_map: OptimGroupMap, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_group_map(group_map)


def test_documented_keywords_work() -> None:
    groups: OptimGroupMap = {"norm": {"regex": "norm", "config": {"lr": 0.5}}}
    named = list(make_model().named_parameters())
    optimizer = make_grouped_optimizer(named, optimizer_groups=groups, optimizer_factory=make_adamw)
    assert optimizer.param_groups[0]["lr"] == 0.5
    ((factory, made),) = build_optimizer_buckets(named, groups, default_factory=make_adamw, debug=True)
    assert factory is make_adamw and len(made) == 2
    assert len(build_parameter_groups(named, groups=groups, debug=False)) == 2
    assert len(make_grouped_optimizer(named, optimizer_factory=make_adamw).param_groups) == 1


def test_group_without_a_factory_is_rejected() -> None:
    named = list(make_model().named_parameters())
    every: OptimGroupMap = {"all": {"factory": make_sgd}}
    assert isinstance(make_grouped_optimizer(named, every), SGD)
    with pytest.raises(ValueError, match=r"group '\(rest\)' has no factory.*optimizer_factory"):
        make_grouped_optimizer(named, {"embed": {"regex": "embed", "factory": make_sgd}})


def test_package_exports_multiopt() -> None:
    from forgather.ml import optim
    from forgather.ml.optim.multiopt import Multiopt

    assert optim.Multiopt is Multiopt
