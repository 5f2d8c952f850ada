"""Optimizer state checks: malformed states are rejected before the optimizer changes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from tests.support.optimizer_cases import (
    OPTIMIZERS,
    MakeOptimizer,
    Model,
    assert_same_parameters,
    make_model,
    saved_state,
    through_file,
    train,
)

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
    """Return a fresh model, its optimizer, and a saved state with one entry replaced."""
    model = make_model()
    state = saved_state(make(model.parameters()), model)
    state["state"][name][key] = value(state) if callable(value) else value
    fresh = make_model()
    return fresh, make(fresh.parameters()), state


def assert_refused(model: nn.Module, optimizer: Optimizer, state: Any, message: str) -> None:
    """Assert that loading raises CheckpointLoadError and leaves the optimizer unchanged."""
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
    def test_states_of_torch_optimizers_are_accepted(self, make: MakeOptimizer) -> None:
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
    def test_moment_that_does_not_fit_is_rejected(self, name: str, value: Any, message: str) -> None:
        assert_refused(*spoiled(OPTIMIZERS[name], "first.weight", "exp_avg", value), message)

    def test_moment_shared_with_another_parameter_is_rejected(self) -> None:
        def of_another(state: dict[str, Any]) -> Tensor:
            return state["state"]["second.bias"]["exp_avg"]

        assert_refused(*spoiled(OPTIMIZERS["adamw"], "first.bias", "exp_avg", of_another), "shares its memory with")

    @pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_fused_optimizer_gets_moments_in_the_parameter_dtype(self, make: MakeOptimizer, dtype: torch.dtype) -> None:
        model = make_model()
        state = saved_state(make(model.parameters()), model)
        for entries in state["state"].values():
            entries.update({key: value.to(dtype) for key, value in entries.items()})
        optimizer = make(model.parameters())
        optimizer.state.clear()
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert {value.dtype for entries in optimizer.state.values() for value in entries.values()} == {torch.float32}
        train(model, optimizer, range(1))

    def test_fused_optimizer_gets_moments_in_the_parameter_memory_format(self) -> None:
        def resumed(fused: bool, moments: dict[str, Any]) -> Tensor:
            weight = nn.Parameter(start.clone().contiguous(memory_format=torch.channels_last))
            optimizer = AdamW([weight], fused=fused)
            wrapper = OptimizerState(optimizer, [("weight", weight)])
            state = {**wrapper.state_dict(), "state": {"weight": copy.deepcopy(moments)}, "parameters": {}}
            wrapper.load_state_dict(state)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            return weight.detach()

        start = torch.rand(2, 3, 4, 5)
        moments = {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3, 4, 5), "exp_avg_sq": torch.rand(2, 3, 4, 5)}
        torch.testing.assert_close(resumed(True, moments), resumed(False, moments))

    def test_transposed_parameter_has_transposed_moments(self) -> None:
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

    def test_moments_that_view_one_buffer_get_separate_storage(self) -> None:
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
    def test_wrong_shape_or_value_of_each_torch_key_is_rejected(
        self, name: str, key: str, value: Any, message: str
    ) -> None:
        assert_refused(*spoiled(TORCH_OPTIMIZERS[name], "first.weight", key, value), message)

    def test_missing_moment_is_named(self) -> None:
        model, optimizer, state = spoiled(OPTIMIZERS["adamw"], "first.weight", "step", torch.tensor(1.0))
        del state["state"]["first.weight"]["exp_avg_sq"]
        assert_refused(model, optimizer, state, "'first.weight' has .*expected .*exp_avg_sq.*as it was saved")
        for record in state["parameters"].values():
            del record["state"]  # Older versions saved no list of state keys.
        assert_refused(model, optimizer, state, "'first.weight' has .*expected exp_avg_sq as well")

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda s: s["state"].pop("first.weight"), r"'first.weight' has \[\], expected .*'step'.* as it was saved"),
            (lambda s: s["state"]["first.weight"].clear(), r"'first.weight' has \[\]"),
            (lambda s: s["state"]["first.weight"].update(later=None), "'first.weight' has .*'later'"),
            (lambda s: s["state"].update(other=s["state"].pop("first.bias")), "state has the entry 'other'"),
            (lambda s: s["param_groups"][0]["params"].remove("first.bias"), "state has the entry 'first.bias'"),
            (lambda s: s["param_groups"][0].pop("lr"), r"param_groups\[0\] lacks 'lr'"),
            (lambda s: s["parameters"].pop("first.bias"), "parameters lacks 'first.bias'"),
            (lambda s: s["parameters"]["first.bias"].update(state=3), "state is 3, expected a list"),
            (lambda s: s["parameters"]["first.bias"].update(state=[3]), "state has the entry 3"),
            (lambda s: s["state"]["first.bias"].update(step=torch.ones(1, 1)), r"step has shape \(1, 1\)"),
        ],
    )
    def test_incomplete_state_is_rejected(self, spoil: Callable[[Any], Any], message: str) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        spoil(state)
        assert_refused(model, AdamW(model.parameters()), state, message)

    def test_parameter_without_gradient_has_no_state(self) -> None:
        model = make_model()
        model.first.requires_grad_(False)
        state = saved_state(AdamW(model.parameters()), model)
        assert "first.weight" not in state["state"]
        optimizer = AdamW(model.parameters())
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert len(optimizer.state) == 4

    def test_momentum_none_and_plain_number_step_are_loaded(self) -> None:
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

    def test_wrapped_and_derived_torch_optimizers_are_checked_too(self) -> None:
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
    """Third-party optimizer with state shapes that Forgather does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 1, "basis": torch.linalg.qr(torch.rand(4, 4))[0], "parts": [torch.zeros(2)]}


class TestForeignOptimizers:
    def test_foreign_optimizer_state_is_restored(self) -> None:
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
    def test_memory_layout_and_existing_shapes_are_checked(self, key: str, value: Any, message: str) -> None:
        model, optimizer, state = spoiled(Foreign, "first.weight", key, value)
        train(model, optimizer, range(1))
        with pytest.raises(CheckpointLoadError, match=message):
            OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)

    def test_two_entries_may_share_one_tensor(self) -> None:
        model = make_model()
        optimizer = Foreign(model.parameters())
        train(model, optimizer, range(1))
        for entries in optimizer.state.values():
            entries["slow"] = entries["basis"]
        wrapper = OptimizerState(optimizer, model.named_parameters())
        wrapper.load_state_dict(through_file(wrapper.state_dict()))


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
    def test_every_reader_rejects_malformed_states(self, spoil: Callable[[dict[str, Any]], Any]) -> None:
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

    def test_unknown_keys_are_ignored(self) -> None:
        model = make_model()
        optimizer = AdamW(model.parameters())
        state = saved_state(optimizer, model)
        OptimizerState(optimizer, model.named_parameters()).load_state_dict({**state, "later": object()})

    def test_malformed_tied_names_are_rejected(self) -> None:
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
    def test_option_of_another_type_is_rejected(self, option: str, value: Any) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["param_groups"][0][option] = value
        assert_refused(model, AdamW(model.parameters()), state, f"optimizer option of the group of .*: {option}")

    def test_initial_lr_of_another_type_is_rejected(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["param_groups"][0]["initial_lr"] = "fast"
        assert_refused(model, AdamW(model.parameters()), state, "initial_lr is 'fast', expected a number")

    def test_option_changed_by_the_user_may_have_another_type(self) -> None:
        model = make_model()
        state = saved_state(Adafactor(model.parameters(), eps=(None, 1e-3)), model)
        optimizer = Adafactor(model.parameters(), eps=(1e-30, 1e-3))  # type: ignore[arg-type]
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        assert optimizer.param_groups[0]["eps"] == (1e-30, 1e-3)

    def test_tensor_options_become_numbers_again(self) -> None:
        model = make_model()
        state = saved_state(AdamW(model.parameters()), model)
        state["initial_options"] = None
        state["param_groups"][0] |= {"lr": torch.tensor([0.5]), "betas": [torch.tensor(0.5), 0.75]}
        optimizer = AdamW(model.parameters())
        OptimizerState(optimizer, model.named_parameters()).load_state_dict(state)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.75)) and type(group["lr"]) is float
