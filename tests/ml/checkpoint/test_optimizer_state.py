"""Optimizer state by name: what a resumed run gets back, with real torch optimizers."""

import copy
import io
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.optimizer_state import OptimizerState

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01, foreach=False),
    "adamw_foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "adamw_amsgrad": lambda params: AdamW(params, lr=0.01, amsgrad=True),
    "adafactor": lambda params: Adafactor(params, lr=0.01),
}


class Model(nn.Module):
    """Its parameters are registered in either order; what it computes does not depend on that."""

    first: nn.Linear
    second: nn.Linear
    third: nn.Linear

    def __init__(self, reverse: bool = False, width: int = 4) -> None:
        super().__init__()
        layers = {"first": (3, width), "second": (width, width), "third": (width, 2)}
        for name in reversed(layers) if reverse else layers:
            self.add_module(name, nn.Linear(*layers[name]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return x


def make_model(**options: Any) -> Model:
    model = Model(**options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range, scheduler: LambdaLR | None = None) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def by_decay(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def saved_state(optimizer: Optimizer, model: nn.Module, steps: int = 2) -> dict[str, Any]:
    wrapper = OptimizerState(optimizer, model.named_parameters())
    train(model, optimizer, range(steps))
    return through_file(wrapper.state_dict())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_resume_with_reordered_and_regrouped_parameters_is_bit_exact(make: MakeOptimizer) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    wrapper = OptimizerState(optimizer, model.named_parameters())
    train(model, optimizer, range(3))
    weights, saved = copy.deepcopy(model.state_dict()), through_file(wrapper.state_dict())
    train(model, optimizer, range(3, 6))

    resumed = make_model(reverse=True)
    resumed.load_state_dict(weights)
    parameters = list(resumed.parameters())
    regrouped = make([{"params": parameters[1::2]}, {"params": parameters[0::2]}])
    OptimizerState(regrouped, resumed.named_parameters()).load_state_dict(saved)
    train(resumed, regrouped, range(3, 6))
    assert_same_parameters(model, resumed)


def test_optimizer_built_with_names_stores_them_once_and_resumes() -> None:
    model = make_model()
    optimizer = AdamW(model.named_parameters(), lr=0.01)
    state = saved_state(optimizer, model)
    assert "param_names" not in state["param_groups"][0]
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    resumed = copy.deepcopy(model)
    unnamed = AdamW(resumed.parameters(), lr=0.01)
    OptimizerState(unnamed, resumed.named_parameters()).load_state_dict(state)
    train(model, optimizer, range(2, 4))
    train(resumed, unnamed, range(2, 4))
    assert_same_parameters(model, resumed)
    assert "param_names" in optimizer.param_groups[0]


def test_state_dict_holds_the_live_tensors_by_name() -> None:
    model = make_model()
    optimizer = AdamW(by_decay(model), lr=0.01)
    wrapper = OptimizerState(optimizer, model.named_parameters())
    train(model, optimizer, range(1))
    state = wrapper.state_dict()
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    moment = state["state"]["second.weight"]["exp_avg"]
    assert moment.data_ptr() == optimizer.state[model.second.weight]["exp_avg"].data_ptr()
    assert [group["params"][0] for group in state["param_groups"]] == ["first.weight", "first.bias"]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]


def test_tied_parameter_is_stored_under_its_first_name() -> None:
    model = make_model()
    model.third.weight = nn.Parameter(torch.zeros(2, 4))
    named = [*model.named_parameters(), ("lm_head.weight", model.first.weight), *model.named_parameters()]
    optimizer = SGD(model.parameters(), lr=0.1)
    names = OptimizerState(optimizer, named).state_dict()["param_groups"][0]["params"]
    assert "first.weight" in names and "lm_head.weight" not in names


def test_one_name_for_two_parameters_is_refused() -> None:
    model, other = make_model(), make_model(width=5)
    named = [*model.named_parameters(), *other.named_parameters()]
    with pytest.raises(ValueError, match=r"both named 'first.weight', of shapes \(4, 3\) and \(5, 3\)"):
        OptimizerState(SGD(model.parameters(), lr=0.1), named)


def test_parameter_without_a_name_is_refused() -> None:
    model = make_model()
    optimizer = SGD(by_decay(model), lr=0.1)
    named = [(name, p) for name, p in model.named_parameters() if name != "second.bias"]
    with pytest.raises(ValueError, match=r"Parameter 1 of optimizer group 1, of shape \(4,\), has no name"):
        OptimizerState(optimizer, named)


def test_lbfgs_is_refused_with_the_reason() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS cannot be stored by parameter name: it keeps one flat history"):
        OptimizerState(LBFGS(model.parameters()), model.named_parameters())


def test_state_that_belongs_to_no_parameter_is_refused() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state["grad_norm"] = 1.0  # type: ignore[index]
    with pytest.raises(ValueError, match="keeps state under 'grad_norm'"):
        OptimizerState(optimizer, model.named_parameters()).state_dict()


class TestLoading:
    def test_existing_tensors_are_filled_in_place(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model, steps=3)
        other = make_model()
        optimizer = AdamW(other.parameters())
        train(other, optimizer, range(1))
        before = optimizer.state[other.first.weight]["exp_avg"]
        OptimizerState(optimizer, other.named_parameters()).load_state_dict(state)
        after = optimizer.state[other.first.weight]
        assert after["exp_avg"] is before
        assert torch.equal(before, state["state"]["first.weight"]["exp_avg"])
        assert after["step"].item() == 3

    def test_loaded_tensors_are_adopted_without_copy(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        optimizer = AdamW(model.parameters())
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert optimizer.state[model.first.weight][key] is state["state"]["first.weight"][key]

    def test_state_follows_the_parameters_dtype(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        half = make_model().to(torch.bfloat16)
        optimizer = AdamW(half.parameters())
        OptimizerState(optimizer, half.named_parameters()).load_state_dict(state)
        assert optimizer.state[half.first.weight]["exp_avg"].dtype == torch.bfloat16
        assert optimizer.state[half.first.weight]["step"].dtype == torch.float32
        train(half, optimizer, range(1))

    def test_state_in_a_dtype_of_its_own_keeps_it(self) -> None:
        model = make_model().to(torch.bfloat16)
        moment, counts = torch.rand(4, 3), torch.arange(4)

        def restored(parameter_record: bool) -> dict[str, Any]:
            optimizer = SGD(model.parameters(), lr=0.1)
            wrapper = OptimizerState(optimizer, model.named_parameters())
            optimizer.state[model.first.weight] = {"moment": moment, "nested": {"counts": [counts]}}
            state = through_file(wrapper.state_dict())
            if not parameter_record:
                del state["parameters"]
            optimizer.state.clear()
            wrapper.load_state_dict(state)
            return optimizer.state[model.first.weight]

        assert torch.equal(restored(parameter_record=True)["moment"], moment)
        assert torch.equal(restored(parameter_record=True)["nested"]["counts"][0], counts)
        assert restored(parameter_record=False)["moment"].dtype == torch.bfloat16

    def test_implementation_flags_stay_those_of_this_machine(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters(), fused=True), model)
        optimizer = AdamW(model.parameters(), foreach=True)
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        group = optimizer.param_groups[0]
        assert (group["fused"], group["foreach"], group["capturable"]) == (None, True, False)
        train(model, optimizer, range(1))

    def test_step_is_float32_for_fused_and_untouched_otherwise(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        for entry in state["state"].values():
            entry["step"] = entry["step"].double()
        for fused, dtype in ((True, torch.float32), (False, torch.float64)):
            optimizer = AdamW(model.parameters(), fused=fused)
            OptimizerState(optimizer, model.named_parameters()).load_state_dict(copy.deepcopy(state))
            assert optimizer.state[model.first.weight]["step"].dtype == dtype

    def test_parameters_the_checkpoint_lacks_start_fresh_with_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_model()
        state = saved_state(AdamW(model.first.parameters()), model)
        optimizer = AdamW(model.parameters())
        wrapper = OptimizerState(optimizer, model.named_parameters())
        train(model, optimizer, range(1))
        wrapper.load_state_dict(state)
        assert set(optimizer.state) == {model.first.weight, model.first.bias}
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert warnings[0].endswith("second.weight, second.bias, third.weight, third.bias")
        train(model, optimizer, range(1, 2))

    def test_the_warning_names_at_most_twenty(self, caplog: pytest.LogCaptureFixture) -> None:
        parameters = [(f"p{i}", nn.Parameter(torch.zeros(1))) for i in range(30)]
        first = OptimizerState(SGD([parameters[0][1]], lr=0.1), parameters[:1])
        OptimizerState(SGD([p for _, p in parameters], lr=0.1), parameters).load_state_dict(first.state_dict())
        assert caplog.messages[-1].endswith("p19, p20 and 9 more")

    def test_parameter_that_had_no_gradient_is_not_reported_missing(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        unused = nn.Parameter(torch.zeros(2))
        named = [*model.named_parameters(), ("unused", unused)]
        optimizer = AdamW([p for _, p in named])
        wrapper = OptimizerState(optimizer, named)
        train(model, optimizer, range(1))
        state = through_file(wrapper.state_dict())
        assert "unused" not in state["state"]
        OptimizerState(AdamW([p for _, p in named]), named).load_state_dict(state)
        assert not caplog.records

    def test_names_of_other_stages_are_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        optimizer = AdamW(model.third.parameters())
        OptimizerState(optimizer, model.third.named_parameters(prefix="third")).load_state_dict(state)
        assert torch.equal(optimizer.state[model.third.bias]["exp_avg"], state["state"]["third.bias"]["exp_avg"])
        assert not caplog.records

    def test_nothing_in_common_is_an_error(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        wrapper = OptimizerState(AdamW(model.parameters()), model.named_parameters(prefix="module"))
        with pytest.raises(CheckpointLoadError, match=r"none of this optimizer's.*module\.first.*first\.bias"):
            wrapper.load_state_dict(state)
        with pytest.raises(CheckpointLoadError, match="none of this optimizer's"):
            wrapper.load_state_dict(AdamW(model.parameters()).state_dict())
        with pytest.raises(CheckpointLoadError, match="Not an optimizer state"):
            wrapper.load_state_dict({"weights": 1})

    @pytest.mark.parametrize("with_record", [True, False])
    def test_other_shape_is_an_error_and_changes_nothing(self, with_record: bool) -> None:
        model, wider = make_model(), make_model(width=5)
        state = saved_state(AdamW(model.parameters(), lr=0.5), model)
        if not with_record:
            del state["parameters"]
        optimizer = AdamW(wider.parameters())
        train(wider, optimizer, range(1))
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(CheckpointLoadError, match=r"'first.weight' .*shape \(4, 3\).*\(5, 3\) now"):
            OptimizerState(optimizer, wider.named_parameters()).load_state_dict(state)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(torch.equal(after["state"][i]["exp_avg"], before["state"][i]["exp_avg"]) for i in before["state"])

    def test_factored_state_of_another_shape_is_an_error(self) -> None:
        model, wider = make_model(), make_model(width=5)
        state = saved_state(Adafactor(model.parameters()), model)
        with pytest.raises(CheckpointLoadError, match=r"'first.weight' .*shape \(4, 3\).*\(5, 3\) now"):
            OptimizerState(Adafactor(wider.parameters()), wider.named_parameters()).load_state_dict(state)

    def test_state_of_another_algorithm_is_an_error(self) -> None:
        model = make_model()
        state = saved_state(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        with pytest.raises(CheckpointLoadError, match="written by SGD, and AdamW has other options"):
            OptimizerState(AdamW(model.parameters()), model.named_parameters()).load_state_dict(state)
        compatible = saved_state(Adam(model.parameters()), model)
        OptimizerState(AdamW(model.parameters()), model.named_parameters()).load_state_dict(compatible)


class TestOptions:
    def resumed_group(self, saved: Optimizer, current: Optimizer, model: nn.Module) -> dict[str, Any]:
        state = saved_state(saved, model)
        OptimizerState(current, model.named_parameters()).load_state_dict(state)
        return current.param_groups[0]

    def test_scheduled_learning_rate_is_restored(self) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        train(model, optimizer, range(3), scheduler)
        state = through_file(wrapper.state_dict())
        assert state["initial_options"][0]["lr"] == 0.1

        before_scheduler = AdamW(model.parameters(), lr=0.1)
        OptimizerState(before_scheduler, model.named_parameters()).load_state_dict(state)
        assert before_scheduler.param_groups[0]["lr"] == 0.1 * 0.5**3
        assert before_scheduler.param_groups[0]["initial_lr"] == 0.1

        with_warmup = AdamW(model.parameters(), lr=0.1)
        LambdaLR(with_warmup, lambda step: 0.0)
        OptimizerState(with_warmup, model.named_parameters()).load_state_dict(state)
        assert with_warmup.param_groups[0]["lr"] == 0.1 * 0.5**3

    def test_option_the_user_changed_stays_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        train(model, optimizer, range(3), LambdaLR(optimizer, lambda step: 0.5**step))
        state = through_file(wrapper.state_dict())

        changed = AdamW(model.parameters(), lr=0.2, weight_decay=0.3)
        LambdaLR(changed, lambda step: 1.0)
        with caplog.at_level(logging.INFO):
            OptimizerState(changed, model.named_parameters()).load_state_dict(state)
        group = changed.param_groups[0]
        assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.2, 0.2, 0.3)
        assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
        assert "'lr' of the group of first.weight, first.bias and 4 more" in caplog.messages[0]
        assert "configured as 0.1 for the checkpoint and as 0.2 now" in caplog.messages[0]
        assert "'weight_decay'" in caplog.messages[1]

    def test_options_follow_the_parameters_and_not_the_position(self) -> None:
        model = make_model()
        groups = by_decay(model)
        state = saved_state(AdamW(groups, lr=0.1), model)
        for group in state["param_groups"]:
            group["lr"] = 0.01 if group["weight_decay"] else 0.02
        swapped = AdamW(list(reversed(by_decay(model))), lr=0.1)
        OptimizerState(swapped, model.named_parameters()).load_state_dict(state)
        assert [(group["weight_decay"], group["lr"]) for group in swapped.param_groups] == [(0.0, 0.02), (0.1, 0.01)]

    def test_saved_groups_that_disagree_leave_the_current_value(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        state = saved_state(AdamW(by_decay(model), lr=0.1), model)
        for group in state["param_groups"]:
            group["lr"] = 0.05
        joined = AdamW(model.parameters(), lr=0.1, weight_decay=0.7)
        OptimizerState(joined, model.named_parameters()).load_state_dict(state)
        assert joined.param_groups[0]["weight_decay"] == 0.7
        assert joined.param_groups[0]["lr"] == 0.05
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "'weight_decay'" in caplog.text and "stays 0.7" in caplog.text and "2 groups" in caplog.text

    def test_options_of_one_side_only_stay_as_they_are(self) -> None:
        model = make_model()
        saved = AdamW([{"params": list(model.parameters()), "old_tag": "x"}])
        current = AdamW([{"params": list(model.parameters()), "new_tag": "y"}])
        group = self.resumed_group(saved, current, model)
        assert group["new_tag"] == "y" and "old_tag" not in group

    def test_option_that_came_up_while_training_is_restored(self) -> None:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        optimizer.param_groups[0]["num_updates"] = 7
        resumed = SGD(model.parameters(), lr=0.1)
        OptimizerState(resumed, model.named_parameters()).load_state_dict(through_file(wrapper.state_dict()))
        assert resumed.param_groups[0]["num_updates"] == 7

    def test_tensor_learning_rate_is_restored_in_place(self) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        optimizer.param_groups[0]["lr"].fill_(0.25)
        state = through_file(wrapper.state_dict())
        assert state["initial_options"][0]["lr"].item() == 0.5
        rate = torch.tensor(0.5)
        resumed = AdamW(model.parameters(), lr=rate, foreach=False)
        OptimizerState(resumed, model.named_parameters()).load_state_dict(state)
        assert resumed.param_groups[0]["lr"] is rate and rate.item() == 0.25
        as_number = AdamW(model.parameters(), lr=0.5)
        OptimizerState(as_number, model.named_parameters()).load_state_dict(state)
        assert as_number.param_groups[0]["lr"] == 0.25

    def test_lists_and_tuples_are_the_same_setting(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters(), betas=(0.8, 0.9)), model)
        state["param_groups"][0]["betas"] = [0.7, 0.9]
        state["initial_options"][0]["betas"] = [0.8, 0.9]
        optimizer = AdamW(model.parameters(), betas=(0.8, 0.9))
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert optimizer.param_groups[0]["betas"] == (0.7, 0.9)

    def test_group_added_later_is_stored_too(self) -> None:
        model = make_model()
        optimizer = AdamW(model.first.parameters(), lr=0.1)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
        assert [options["lr"] for options in wrapper.state_dict()["initial_options"]] == [0.1, 0.2]


class TestMerging:
    def stage_states(self, model: Model) -> tuple[Optimizer, list[dict[str, Any]]]:
        """The states of one optimizer per stage, and the optimizer of the whole that they should add up to."""
        whole = copy.deepcopy(model)
        optimizer = AdamW(whole.parameters(), lr=0.1)
        state = saved_state(optimizer, whole)
        parts = []
        for stage in ("first", "second", "third"):
            named = list(model.get_submodule(stage).named_parameters(prefix=stage))
            wrapper = OptimizerState(AdamW([p for _, p in named], lr=0.1), named)
            wrapper.load_state_dict(copy.deepcopy(state))
            parts.append(wrapper.state_dict())
        return optimizer, parts

    def test_stages_add_up_to_the_whole(self) -> None:
        model = make_model()
        optimizer, parts = self.stage_states(model)
        merged = OptimizerState.merge_state_dicts(parts)
        assert len(merged["param_groups"]) == len(merged["initial_options"]) == 1
        assert merged["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
        resumed = AdamW(model.parameters(), lr=0.1)
        OptimizerState(resumed, model.named_parameters()).load_state_dict(through_file(merged))
        for mine, theirs in zip(resumed.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)

    def test_first_replica_wins_and_parts_are_left_alone(self) -> None:
        _, parts = self.stage_states(make_model())
        replica = copy.deepcopy(parts[0])
        replica["state"]["first.bias"]["exp_avg"].fill_(9)
        untouched = copy.deepcopy(parts[0]["param_groups"])
        merged = OptimizerState.merge_state_dicts([*parts, replica])
        assert merged["state"]["first.bias"]["exp_avg"] is parts[0]["state"]["first.bias"]["exp_avg"]
        assert merged["param_groups"][0]["params"].count("first.bias") == 1
        assert list(merged["state"])[:2] == ["first.weight", "first.bias"]
        assert parts[0]["param_groups"] == untouched

    def test_groups_with_other_options_stay_apart(self) -> None:
        model = make_model()
        parts = []
        for stage in ("first", "second"):
            module = model.get_submodule(stage)
            groups = by_decay(module, weight_decay=0.1)
            parts.append(OptimizerState(AdamW(groups), module.named_parameters(prefix=stage)).state_dict())
        merged = OptimizerState.merge_state_dicts(parts)
        assert [group["params"] for group in merged["param_groups"]] == [
            ["first.weight", "second.weight"],
            ["first.bias", "second.bias"],
        ]
        assert [options["weight_decay"] for options in merged["initial_options"]] == [0.1, 0.0]


class Combined:
    """Several optimizers behind one face."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> ChainMap[Any, Any]:
        return ChainMap(*(optimizer.state for optimizer in self.optimizers))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class TestSeveralOptimizers:
    def make(self, model: Model) -> Combined:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        return Combined(SGD(matrices, lr=0.1, momentum=0.9), AdamW(vectors, lr=0.01))

    def test_each_gets_its_own_state_back(self) -> None:
        model = make_model()
        combined = self.make(model)
        wrapper = OptimizerState(combined, model.named_parameters())
        for optimizer in combined.optimizers:
            train(model, optimizer, range(2))
        resumed = self.make(model)
        OptimizerState(resumed, model.named_parameters()).load_state_dict(through_file(wrapper.state_dict()))
        for before, after in zip(combined.optimizers, resumed.optimizers, strict=True):
            assert set(after.state) == set(before.state)
            for parameter, state in before.state.items():
                assert all(torch.equal(after.state[parameter][key], value) for key, value in state.items())

    def test_a_view_that_cannot_be_written_is_refused(self) -> None:
        model = make_model()
        combined = self.make(model)

        class View:
            state = combined.state
            param_groups = combined.param_groups

        with pytest.raises(ValueError, match="is a view of several optimizers"):
            OptimizerState(View(), model.named_parameters())

    def test_parameter_in_two_optimizers_is_refused(self) -> None:
        model = make_model()
        both = Combined(SGD(model.parameters(), lr=0.1), AdamW(model.third.parameters()))
        with pytest.raises(ValueError, match=r"several optimizers.*third.weight, third.bias"):
            OptimizerState(both, model.named_parameters())


# --- states that no save of ours writes

TORCH_OPTIMIZERS: dict[str, MakeOptimizer] = {
    **OPTIMIZERS,
    "sgd_fused": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "sgd_plain": lambda params: SGD(params, lr=0.1),
    "adam": Adam,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "adagrad_fused": lambda params: optim.Adagrad(params, fused=True),
    "asgd": optim.ASGD,
    "rmsprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "muon": lambda params: optim.Muon([p for p in params if p.ndim == 2]),
}

FUSED: dict[str, MakeOptimizer] = {name: make for name, make in TORCH_OPTIMIZERS.items() if "fused" in name}


def spoiled(make: MakeOptimizer, name: str, key: str, value: Any) -> tuple[Model, Optimizer, dict[str, Any]]:
    """A fresh model and optimizer, and a saved state for them of which one entry was replaced."""
    model = make_model()
    state = saved_state(make(model.parameters()), model)
    state["state"][name][key] = value(state) if callable(value) else value
    fresh = make_model()
    return fresh, make(fresh.parameters()), state


def assert_refused(model: nn.Module, optimizer: Optimizer, state: Any, message: str) -> None:
    """Loading raises, and leaves the optimizer as it was."""
    train(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    wrapper = OptimizerState(optimizer, model.named_parameters())
    for load in (wrapper.check_state_dict, wrapper.load_state_dict):
        with pytest.raises(CheckpointLoadError, match=message):
            load(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entries in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in entries.items())


class TestHostileMoments:
    @pytest.mark.parametrize("make", TORCH_OPTIMIZERS.values(), ids=TORCH_OPTIMIZERS.keys())
    def test_states_that_torch_makes_pass(self, make: MakeOptimizer) -> None:
        model = make_model()
        optimizer = make(model.parameters())
        state = saved_state(optimizer, model)
        resumed = copy.deepcopy(model)
        other = make(resumed.parameters())
        OptimizerState(other, resumed.named_parameters()).load_state_dict(state)
        train(model, optimizer, range(2, 4))
        train(resumed, other, range(2, 4))
        assert_same_parameters(model, resumed)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.zeros(3), r"optimizer state of 'first.weight': exp_avg has shape \(3,\), expected \(4, 3\)"),
            (torch.zeros(40, 30), r"exp_avg has shape \(40, 30\), expected \(4, 3\)"),
            (torch.zeros(3, 4), r"exp_avg has shape \(3, 4\)"),
            (torch.zeros(1).expand(4, 3), r"exp_avg has strides \(0, 0\)"),
            (torch.zeros(3, 4).t(), r"exp_avg has strides \(1, 4\)"),
            (torch.zeros(4, 3, dtype=torch.int64), r"exp_avg has dtype torch.int64, expected a floating one"),
            (torch.zeros(4, 3, dtype=torch.complex64), r"exp_avg has dtype torch.complex64"),
            (torch.zeros(4, 3).to_sparse(), "exp_avg is a tensor of layout"),
            (0.5, "exp_avg is 0.5, expected a plain tensor"),
            (None, "exp_avg is None, expected a plain tensor"),
            (lambda state: state["state"]["second.weight"]["exp_avg"], r"exp_avg has shape \(4, 4\)"),
            (
                lambda state: state["state"]["first.weight"]["exp_avg_sq"],
                r"exp_avg_sq shares its memory with .*exp_avg",
            ),
        ],
    )
    @pytest.mark.parametrize("name", ["adamw_fused", "adamw", "adamw_foreach"])
    def test_a_moment_that_does_not_fit_is_refused(self, name: str, value: Any, message: str) -> None:
        assert_refused(*spoiled(OPTIMIZERS[name], "first.weight", "exp_avg", value), message)

    def test_moments_of_another_parameter_of_the_same_shape_are_refused(self) -> None:
        def of_another(state: dict[str, Any]) -> Tensor:
            return state["state"]["second.bias"]["exp_avg"]

        assert_refused(*spoiled(OPTIMIZERS["adamw"], "first.bias", "exp_avg", of_another), "shares its memory with")

    @pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_fused_kernels_get_moments_in_the_parameters_dtype(self, make: MakeOptimizer, dtype: torch.dtype) -> None:
        model = make_model()
        state = saved_state(make(model.parameters()), model)
        for entries in state["state"].values():
            entries.update({key: value.to(dtype) for key, value in entries.items()})
        optimizer = make(model.parameters())
        optimizer.state.clear()
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert {value.dtype for entries in optimizer.state.values() for value in entries.values()} == {torch.float32}
        train(model, optimizer, range(1))

    def test_fused_kernels_get_moments_in_the_parameters_order(self) -> None:
        def resumed(fused: bool, moments: dict[str, Any]) -> Tensor:
            weight = nn.Parameter(start.clone().contiguous(memory_format=torch.channels_last))
            optimizer = AdamW([weight], fused=fused)
            wrapper = OptimizerState(optimizer, [("weight", weight)])
            wrapper.load_state_dict({**wrapper.state_dict(), "state": {"weight": copy.deepcopy(moments)}})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            return weight.detach()

        start = torch.rand(2, 3, 4, 5)
        moments = {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3, 4, 5), "exp_avg_sq": torch.rand(2, 3, 4, 5)}
        torch.testing.assert_close(resumed(True, moments), resumed(False, moments))

    def test_a_transposed_parameter_has_transposed_moments(self) -> None:
        weight = nn.Parameter(torch.rand(3, 4).t())
        optimizer = AdamW([weight], fused=True)
        wrapper = OptimizerState(optimizer, [("weight", weight)])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = through_file(wrapper.state_dict())
        assert not state["state"]["weight"]["exp_avg"].is_contiguous()
        optimizer.state.clear()
        wrapper.load_state_dict(state)
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()

    def test_views_of_one_buffer_get_storage_of_their_own(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        flat = torch.rand(24)
        entries = state["state"]["first.weight"]
        entries["exp_avg"], entries["exp_avg_sq"] = flat[:12].view(4, 3), flat[12:].view(4, 3)
        optimizer = AdamW(model.parameters())
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(through_file(state))
        for key, expected in (("exp_avg", flat[:12]), ("exp_avg_sq", flat[12:])):
            moment = optimizer.state[model.first.weight][key]
            assert torch.equal(moment.flatten(), expected)
            assert moment.untyped_storage().nbytes() == moment.nbytes

    @pytest.mark.parametrize(
        ("name", "key", "value", "message"),
        [
            ("adamw", "step", torch.tensor(float("nan")), "step is nan, expected a finite number of at least 0"),
            ("adamw", "step", torch.tensor(-1.0), "step is -1.0"),
            ("adamw_fused", "step", torch.zeros(3), r"step has shape \(3,\), expected one number"),
            ("adamw_fused", "step", torch.zeros((), dtype=torch.complex64), "step has dtype torch.complex64"),
            ("adamw", "step", "1", "step is '1', expected a number"),
            ("nadam", "mu_product", torch.tensor(float("inf")), "mu_product is inf"),
            ("asgd", "eta", None, "eta is None"),
            ("adafactor", "row_var", torch.zeros(4), r"row_var has shape \(4,\), expected \(4, 1\)"),
            ("adafactor", "col_var", torch.zeros(4, 1), r"col_var has shape \(4, 1\), expected \(1, 3\)"),
            ("sgd_fused", "momentum_buffer", torch.zeros(1), r"momentum_buffer has shape \(1,\), expected \(4, 3\)"),
            ("adagrad_fused", "sum", torch.zeros(2, 3), r"sum has shape \(2, 3\)"),
            ("muon", "momentum_buffer", torch.zeros(3), r"momentum_buffer has shape \(3,\)"),
            ("rmsprop", "grad_avg", torch.zeros(3), r"grad_avg has shape \(3,\)"),
            ("rprop", "step_size", torch.zeros(()), r"step_size has shape \(\), expected \(4, 3\)"),
        ],
    )
    def test_each_key_of_torch_has_its_shape(self, name: str, key: str, value: Any, message: str) -> None:
        assert_refused(*spoiled(TORCH_OPTIMIZERS[name], "first.weight", key, value), message)

    def test_a_moment_that_is_missing_is_named(self) -> None:
        model, optimizer, state = spoiled(OPTIMIZERS["adamw"], "first.weight", "step", torch.tensor(1.0))
        del state["state"]["first.weight"]["exp_avg_sq"]
        assert_refused(model, optimizer, state, "'first.weight' has .*expected exp_avg_sq as well")

    def test_a_momentum_of_none_and_a_step_that_is_a_number_are_loaded(self) -> None:
        model, optimizer, state = spoiled(OPTIMIZERS["sgd"], "first.weight", "momentum_buffer", None)
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        train(model, optimizer, range(1))
        for name in ("adamw", "adamw_fused"):
            model, optimizer, state = spoiled(OPTIMIZERS[name], "first.weight", "step", 2)
            OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
            train(model, optimizer, range(1))
            assert optimizer.state[model.first.weight]["step"].item() == 3

    def test_complex_parameters_have_complex_moments(self) -> None:
        weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = AdamW([weight])
        wrapper = OptimizerState(optimizer, [("weight", weight)])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = through_file(wrapper.state_dict())
        wrapper.load_state_dict(copy.deepcopy(state))
        state["state"]["weight"]["exp_avg"] = torch.zeros(3)
        with pytest.raises(CheckpointLoadError, match=r"exp_avg has dtype torch.float32, expected a complex one"):
            wrapper.load_state_dict(state)

    def test_a_wrapped_or_derived_optimizer_of_torch_is_checked_like_it(self) -> None:
        class Derived(AdamW):
            pass

        class Wrapper(Optimizer):
            def __init__(self, optim: Optimizer) -> None:
                self.optim = optim
                self.state, self.param_groups = optim.state, optim.param_groups

        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["state"]["first.weight"]["exp_avg"] = torch.zeros(3)
        for optimizer in (Derived(model.parameters(), fused=True), Wrapper(AdamW(model.parameters(), fused=True))):
            with pytest.raises(CheckpointLoadError, match=r"exp_avg has shape \(3,\)"):
                OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)


class Foreign(Optimizer):
    """An optimizer of another package, with state of shapes that only it knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 1, "basis": torch.linalg.qr(torch.rand(4, 4))[0], "parts": [torch.zeros(2)]}


class TestForeignOptimizers:
    def test_their_state_comes_back(self) -> None:
        model = make_model()
        optimizer = Foreign(model.parameters())
        state = saved_state(optimizer, model)
        resumed = Foreign(model.parameters())
        OptimizerState(resumed, model.named_parameters()).load_state_dict(copy.deepcopy(state))
        for parameter, entries in optimizer.state.items():
            assert torch.equal(resumed.state[parameter]["basis"], entries["basis"])

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("basis", torch.zeros(1).expand(4, 4), "basis has strides"),
            ("basis", torch.zeros(4, 4, device="meta"), "basis is a tensor that is without data"),
            ("parts", lambda state: [state["state"]["second.weight"]["basis"]], "shares its memory"),
            ("parts", [torch.zeros(4, 4).to_sparse()], r"parts.0 is a tensor of layout"),
            ("step", float("nan"), "step is nan"),
            ("basis", torch.zeros(4, 5), r"basis has shape \(4, 5\), expected \(4, 4\)"),
        ],
    )
    def test_memory_and_what_is_there_already_are_checked(self, key: str, value: Any, message: str) -> None:
        model, optimizer, state = spoiled(Foreign, "first.weight", key, value)
        train(model, optimizer, range(1))
        with pytest.raises(CheckpointLoadError, match=message):
            OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)


MALFORMED: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("a list", lambda s: [s]),
    ("numbered top level", lambda s: {0: s}),
    ("state is a list", lambda s: {**s, "state": [1]}),
    ("state has numbers", lambda s: {**s, "state": {0: {}}}),
    ("state of a tensor", lambda s: {**s, "state": {"first.weight": torch.zeros(2)}}),
    ("state with numbered keys", lambda s: {**s, "state": {"first.weight": {0: torch.zeros(2)}}}),
    ("no groups", lambda s: {**s, "param_groups": None}),
    ("group is a list", lambda s: {**s, "param_groups": [[1]]}),
    ("no params", lambda s: {**s, "param_groups": [{"lr": 0.1}]}),
    ("params is a text", lambda s: {**s, "param_groups": [{"params": "first.weight"}]}),
    ("params of lists", lambda s: {**s, "param_groups": [{"params": [["first.weight"]]}]}),
    ("option is an array", lambda s: {**s, "param_groups": [{**s["param_groups"][0], "lr": np.zeros(3)}]}),
    ("option is sparse", lambda s: {**s, "param_groups": [{**s["param_groups"][0], "lr": torch.zeros(2).to_sparse()}]}),
    ("initial_options is a dict", lambda s: {**s, "initial_options": {"lr": 1}}),
    ("initial_options too long", lambda s: {**s, "initial_options": [None, None]}),
    ("initial_options is a tensor", lambda s: {**s, "initial_options": torch.zeros(3)}),
    ("initial_options of numbers", lambda s: {**s, "initial_options": [3]}),
    ("parameters is None", lambda s: {**s, "parameters": None}),
    ("record is a list", lambda s: {**s, "parameters": {"first.weight": [4, 3]}}),
    ("negative shape", lambda s: {**s, "parameters": {"first.weight": {"shape": [-1], "dtype": "", "optimizer": ""}}}),
    ("shape of text", lambda s: {**s, "parameters": {"first.weight": {"shape": "43", "dtype": "", "optimizer": ""}}}),
    ("no optimizer", lambda s: {**s, "parameters": {"first.weight": {"shape": [4, 3], "dtype": ""}}}),
]


class TestMalformedStates:
    @pytest.mark.parametrize("spoil", [spoil for _, spoil in MALFORMED], ids=[name for name, _ in MALFORMED])
    def test_every_reader_says_so(self, spoil: Callable[[dict[str, Any]], Any]) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters())
        state = saved_state(optimizer, model)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        readers: list[Callable[[Any], Any]] = [
            wrapper.check_state_dict,
            wrapper.load_state_dict,
            wrapper.missing_names,
            lambda bad: wrapper.add_tied_names(bad, []),
            lambda bad: OptimizerState.merge_state_dicts([state, bad]),
        ]
        for read in readers:
            with pytest.raises(CheckpointLoadError):
                read(spoil(copy.deepcopy(state)))

    def test_unknown_parts_are_ignored(self) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters())
        state = saved_state(optimizer, model)
        OptimizerState(optimizer, model.named_parameters()).load_state_dict({**state, "later": object()})

    def test_tied_names_that_are_none_are_refused(self) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters())
        state = saved_state(optimizer, model)
        with pytest.raises(CheckpointLoadError, match="record of tied names"):
            OptimizerState(optimizer, model.named_parameters()).add_tied_names(state, 3)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("lr", "0.1"),
            ("lr", None),
            ("lr", True),
            ("lr", torch.zeros(3)),
            ("lr", [0.1]),
            ("amsgrad", 1),
            ("amsgrad", "yes"),
            ("betas", (0.9,)),
            ("betas", 0.9),
            ("betas", (0.9, "0.99")),
            ("eps", torch.tensor(1j)),
        ],
    )
    def test_an_option_of_another_type_is_refused(self, option: str, value: Any) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["param_groups"][0][option] = value
        assert_refused(model, AdamW(model.parameters()), state, f"optimizer option of the group of .*: {option}")

    def test_a_start_rate_of_another_type_is_refused(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["param_groups"][0]["initial_lr"] = "fast"
        assert_refused(model, AdamW(model.parameters()), state, "initial_lr is 'fast', expected a number")

    def test_an_option_that_the_user_changed_may_have_another_type(self) -> None:
        model = make_model()
        state = saved_state(Adafactor(model.parameters(), eps=(None, 1e-3)), model)
        optimizer = Adafactor(model.parameters(), eps=(1e-30, 1e-3))  # type: ignore[arg-type]
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert optimizer.param_groups[0]["eps"] == (1e-30, 1e-3)

    def test_options_that_are_tensors_become_numbers_again(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["initial_options"] = None
        state["param_groups"][0] |= {"lr": torch.tensor([0.5]), "betas": [torch.tensor(0.5), 0.75]}
        optimizer = AdamW(model.parameters())
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.75)) and type(group["lr"]) is float


def test_the_check_of_many_tensors_is_cheap() -> None:
    named = [(f"p{number}", nn.Parameter(torch.zeros(2))) for number in range(2000)]
    optimizer = AdamW([parameter for _, parameter in named])
    for _, parameter in named:
        parameter.grad = torch.ones(2)
    optimizer.step()
    wrapper = OptimizerState(optimizer, named)
    state = wrapper.state_dict()
    start = time.perf_counter()
    wrapper.check_state_dict(state)
    assert time.perf_counter() - start < 5
