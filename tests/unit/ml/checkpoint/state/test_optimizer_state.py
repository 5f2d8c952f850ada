"""Optimizer state by FQN: saving and resuming with real torch optimizers."""

import copy
import logging
from collections import ChainMap
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from tests.support.optimizer_cases import (
    OPTIMIZERS,
    MakeOptimizer,
    Model,
    assert_same_parameters,
    by_decay,
    make_model,
    saved_state,
    through_file,
    train,
)


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


def test_duplicate_parameter_name_is_rejected() -> None:
    model, other = make_model(), make_model(width=5)
    named = [*model.named_parameters(), *other.named_parameters()]
    with pytest.raises(ValueError, match=r"both named 'first.weight', of shapes \(4, 3\) and \(5, 3\)"):
        OptimizerState(SGD(model.parameters(), lr=0.1), named)


def test_parameter_without_a_name_is_rejected() -> None:
    model = make_model()
    optimizer = SGD(by_decay(model), lr=0.1)
    named = [(name, p) for name, p in model.named_parameters() if name != "second.bias"]
    with pytest.raises(ValueError, match=r"Parameter 1 of optimizer group 1, of shape \(4,\), has no name"):
        OptimizerState(optimizer, named)


def test_lbfgs_is_rejected_with_the_reason() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS cannot be stored by parameter name: it keeps one flat history"):
        OptimizerState(LBFGS(model.parameters()), model.named_parameters())


def test_state_without_a_parameter_is_rejected() -> None:
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

    def test_state_dtype_other_than_the_parameter_dtype_is_kept(self) -> None:
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

    def test_fused_and_foreach_flags_are_not_loaded(self) -> None:
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

    def test_warning_names_at_most_twenty_parameters(self, caplog: pytest.LogCaptureFixture) -> None:
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

    def test_state_without_a_common_parameter_is_an_error(self) -> None:
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
    def test_changed_shape_is_an_error_and_changes_nothing(self, with_record: bool) -> None:
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
        with pytest.raises(CheckpointLoadError, match=r"written by SGD\. AdamW has different options"):
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

    def test_option_changed_by_the_user_stays_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
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

    def test_unmatched_options_are_not_transferred(self) -> None:
        model = make_model()
        saved = AdamW([{"params": list(model.parameters()), "old_tag": "x"}])
        current = AdamW([{"params": list(model.parameters()), "new_tag": "y"}])
        group = self.resumed_group(saved, current, model)
        assert group["new_tag"] == "y" and "old_tag" not in group

    def test_option_added_during_training_is_restored(self) -> None:
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

    def test_list_and_tuple_options_are_equal(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters(), betas=(0.8, 0.9)), model)
        state["param_groups"][0]["betas"] = [0.7, 0.9]
        state["initial_options"][0]["betas"] = [0.8, 0.9]
        optimizer = AdamW(model.parameters(), betas=(0.8, 0.9))
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert optimizer.param_groups[0]["betas"] == (0.7, 0.9)

    def test_param_group_added_later_is_stored(self) -> None:
        model = make_model()
        optimizer = AdamW(model.first.parameters(), lr=0.1)
        wrapper = OptimizerState(optimizer, model.named_parameters())
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
        assert [options["lr"] for options in wrapper.state_dict()["initial_options"]] == [0.1, 0.2]


class TestMerging:
    def stage_states(self, model: Model) -> tuple[Optimizer, list[dict[str, Any]]]:
        """Return the full model's optimizer, and the state of one optimizer per stage."""
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

    def test_merged_stage_states_equal_the_full_model_state(self) -> None:
        model = make_model()
        optimizer, parts = self.stage_states(model)
        merged = OptimizerState.merge_state_dicts(parts)
        assert len(merged["param_groups"]) == len(merged["initial_options"]) == 1
        assert merged["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
        resumed = AdamW(model.parameters(), lr=0.1)
        OptimizerState(resumed, model.named_parameters()).load_state_dict(through_file(merged))
        for mine, theirs in zip(resumed.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)

    def test_first_replica_wins_and_inputs_stay_unchanged(self) -> None:
        _, parts = self.stage_states(make_model())
        replica = copy.deepcopy(parts[0])
        replica["state"]["first.bias"]["exp_avg"].fill_(9)
        untouched = copy.deepcopy(parts[0]["param_groups"])
        merged = OptimizerState.merge_state_dicts([*parts, replica])
        assert merged["state"]["first.bias"]["exp_avg"] is parts[0]["state"]["first.bias"]["exp_avg"]
        assert merged["param_groups"][0]["params"].count("first.bias") == 1
        assert list(merged["state"])[:2] == ["first.weight", "first.bias"]
        assert parts[0]["param_groups"] == untouched

    def test_groups_with_different_options_are_not_merged(self) -> None:
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
    """Several optimizers behind one optimizer interface."""

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

    def test_each_optimizer_gets_its_own_state_back(self) -> None:
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

    def test_read_only_view_of_optimizers_is_rejected(self) -> None:
        model = make_model()
        combined = self.make(model)

        class View:
            state = combined.state
            param_groups = combined.param_groups

        with pytest.raises(ValueError, match="is a view of several optimizers"):
            OptimizerState(View(), model.named_parameters())

    def test_parameter_in_two_optimizers_is_rejected(self) -> None:
        model = make_model()
        both = Combined(SGD(model.parameters(), lr=0.1), AdamW(model.third.parameters()))
        with pytest.raises(ValueError, match=r"more than one optimizer.*third.weight, third.bias"):
            OptimizerState(both, model.named_parameters())
