"""Replica validation: bitwise comparison, with the same verdict on every rank."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.checkpoint.replicas import (
    ValidationLevel,
    compare_replicas,
    format_divergence,
    validate_replication,
)
from tests.support.ranks import outcomes_on_ranks, run_on_ranks

Verdict = tuple[bool, list[str]]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
PATHS = ["weight", "layer.weight", "state.0.exp_avg"]


def replica(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    def ones() -> torch.Tensor:
        return torch.ones(4, 3).to(dtype)

    return {
        "weight": ones(),
        "layer": {"weight": ones()},
        "state": {0: {"exp_avg": ones(), "step": 5}},
        "betas": (0.9, 0.95),
        "empty": {},
    }


def tensor_at(state: Any, path: str) -> torch.Tensor:
    for part in path.split("."):
        state = state[int(part) if part.isdigit() else part]
    return state


def set_element(tensor: torch.Tensor, value: float) -> None:
    tensor[2:3, 1:2] = torch.tensor([[value]]).to(tensor.dtype)


def validate_with_one_diverged(dtype_name: str, path: str, diverged_rank: int, level: str) -> Verdict:
    state = replica(DTYPES[dtype_name])
    if dist.get_rank() == diverged_rank:
        set_element(tensor_at(state, path), 0.0)
    return validate_replication(state, level)


def validate_all_dtypes_and_depths(diverged_rank: int) -> dict[tuple[str, str], Verdict]:
    cases = [(name, path) for name in DTYPES for path in PATHS]
    return {case: validate_with_one_diverged(*case, diverged_rank, "tensor") for case in cases}


def same_verdict(verdicts: list[Any]) -> Any:
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


def validate_edited(edit: str, level: str) -> Verdict:
    """Validate replicas after the last rank edited its copy."""
    state = replica()
    if dist.get_rank() == dist.get_world_size() - 1:
        EDITS[edit](state)
    return validate_replication(state, level)


def change_many(state: dict[str, Any]) -> None:
    for path in PATHS:
        set_element(tensor_at(state, path), 3.0)
    del state["betas"]


EDITS: dict[str, Any] = {
    "nothing": lambda state: None,
    "leaf": lambda state: state["state"][0].update(step=6),
    "missing": lambda state: state["layer"].pop("weight"),
    "extra": lambda state: state["layer"].update(bias=torch.zeros(2)),
    "shape": lambda state: state.update(weight=torch.ones(3, 4)),
    "dtype": lambda state: state.update(weight=torch.ones(4, 3, dtype=torch.float64)),
    "emptied": lambda state: state.update(betas=()),
    "rounding": lambda state: set_element(state["weight"], 1.0 + 2**-20),
    "half": lambda state: set_element(state["weight"], 0.5),
    "nan": lambda state: set_element(state["weight"], math.nan),
    "layout": lambda state: state.update(weight=torch.ones(3, 4).t()),
    "many": change_many,
}


def validate_equal(level: str) -> Verdict:
    state = replica()
    state["nan"] = torch.tensor([math.nan, math.inf])
    state["words"] = {f"word {n}" for n in range(30)}
    return validate_replication(state, ValidationLevel(level))


def validate_split(num_first: int) -> Verdict:
    """Validate with one value on the first ranks and another on the rest."""
    return validate_replication({"w": torch.tensor(1.0 if dist.get_rank() < num_first else 2.0)})


class Odd:
    def __repr__(self) -> str:
        raise ValueError("this object has no text")


def validate_with_odd_leaf(level: str) -> Verdict:
    return validate_replication({"odd": Odd() if dist.get_rank() == 1 else 0}, level)


def validate_in_subgroups(level: str) -> Verdict:
    """Validate a 2 x 2 layout: ranks (0, 2) and (1, 3) are replicas, and rank 3 has diverged."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = dist.get_rank() % 2
    state = {"stage": {"w": torch.full((3,), float(stage))}}
    if dist.get_rank() == 3:
        state["stage"]["w"][1] = 7.0
    return validate_replication(state, level, group=groups[stage])


def validate_large() -> Verdict:
    """Validate a tensor of two chunks and a remainder; a non-contiguous replica differs in the first and last one."""
    tensor = torch.zeros(3, 3_000_000)
    if dist.get_rank() == 1:
        tensor[0, 5] = 1.0
        tensor[2, -1] = -4.0
        tensor = tensor.t().contiguous().t()
    return validate_replication({"w": tensor}, "full")


def measure_dtypes() -> Verdict:
    is_second = dist.get_rank() == 1
    large = 2**60
    state = {
        "int64": torch.tensor([large + 3 if is_second else large]),
        "extremes": torch.tensor([2**63 - 1 if is_second else -(2**63)]),
        "uint8": torch.tensor([0 if is_second else 255], dtype=torch.uint8),
        "bool": torch.tensor([is_second]),
        "bfloat16": torch.tensor([1.0 if is_second else 3.0], dtype=torch.bfloat16),
        "float8": torch.tensor([1.0 if is_second else 1.5]).to(torch.float8_e5m2),
        "complex": torch.tensor([3 + 4j if is_second else 0j]),
        "zero": torch.tensor([-0.0 if is_second else 0.0]),
        "infinite": torch.tensor([math.inf, 1.0 if is_second else 2.0]),
        "overflow": torch.tensor([math.inf if is_second else 2.0]),
    }
    return validate_replication(state, "full")


@pytest.mark.parametrize("level", ["none", "quick", "tensor", "full"])
def test_equal_replicas_pass(level: str) -> None:
    assert run_on_ranks(validate_equal, 2, level) == [(True, [])] * 2


def test_equal_content_passes_in_any_memory_layout() -> None:
    assert run_on_ranks(validate_edited, 2, "layout", "tensor") == [(True, [])] * 2


@pytest.mark.parametrize(("world_size", "diverged_rank"), [(2, 1), (3, 0), (3, 1)])
def test_one_changed_element_is_found_in_every_dtype_and_depth(world_size: int, diverged_rank: int) -> None:
    verdicts = same_verdict(run_on_ranks(validate_all_dtypes_and_depths, world_size, diverged_rank))
    others = [rank for rank in range(world_size) if rank != diverged_rank]
    majority = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    for (_, path), verdict in verdicts.items():
        assert verdict == (False, [f"{path}: rank {diverged_rank} differs from {majority}"])


def test_ties_are_decided_for_the_lowest_rank() -> None:
    assert same_verdict(run_on_ranks(validate_split, 4, 2))[1] == ["w: ranks 2, 3 differ from ranks 0, 1"]
    assert same_verdict(run_on_ranks(validate_split, 4, 1))[1] == ["w: rank 0 differs from ranks 1, 2, 3"]


@pytest.mark.parametrize("level", ["tensor", "full"])
@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ("leaf", "state.0.step: rank 2 differs from ranks 0, 1 (int 6 instead of int 5)"),
        ("missing", "layer.weight: missing on rank 2, present on ranks 0, 1"),
        ("extra", "layer.bias: present on rank 2, missing on ranks 0, 1"),
        (
            "shape",
            "weight: rank 2 differs from ranks 0, 1 (tensor float32 [3, 4] instead of tensor float32 [4, 3])",
        ),
        (
            "dtype",
            "weight: rank 2 differs from ranks 0, 1 (tensor float64 [4, 3] instead of tensor float32 [4, 3])",
        ),
    ],
)
def test_differences_other_than_content_are_described(level: str, edit: str, line: str) -> None:
    is_valid, lines = same_verdict(run_on_ranks(validate_edited, 3, edit, level))
    assert not is_valid
    assert line in lines
    # A missing tensor leaves an empty container behind, which is a second difference.
    assert len(lines) == (2 if edit == "missing" else 1)


def test_emptied_container_is_found() -> None:
    _, lines = same_verdict(run_on_ranks(validate_edited, 2, "emptied", "tensor"))
    assert "betas.0: missing on rank 1, present on rank 0" in lines
    assert "betas: present on rank 1, missing on rank 0" in lines


def test_every_difference_is_listed() -> None:
    _, lines = same_verdict(run_on_ranks(validate_edited, 3, "many", "tensor"))
    assert {line.split(":")[0] for line in lines} == {*PATHS, "betas.0", "betas.1"}


def test_quick_level_compares_fingerprints() -> None:
    is_valid, lines = same_verdict(run_on_ranks(validate_edited, 3, "half", "quick"))
    assert not is_valid
    assert len(lines) == 1 and "rank 2 differs from ranks 0, 1" in lines[0]


@pytest.mark.parametrize(
    ("edit", "measure"),
    [
        ("half", "largest absolute difference 0.5 (beyond rtol=1e-05, atol=1e-08)"),
        ("rounding", "largest absolute difference 9.53674e-07 (within rtol=1e-05, atol=1e-08)"),
        ("nan", "largest absolute difference nan (beyond rtol=1e-05, atol=1e-08)"),
    ],
)
def test_full_level_measures_the_difference(edit: str, measure: str) -> None:
    verdict = same_verdict(run_on_ranks(validate_edited, 3, edit, "full"))
    assert verdict == (False, [f"weight: rank 2 differs from ranks 0, 1, {measure}"])


def test_full_level_measures_every_dtype() -> None:
    _, lines = same_verdict(run_on_ranks(measure_dtypes, 2))
    measured = {line.split(":")[0]: line.split("difference ")[1].split(" ")[0] for line in lines}
    assert measured == {
        "int64": "3",
        "extremes": "1.84467e+19",
        "uint8": "255",
        "bool": "1",
        "bfloat16": "2",
        "float8": "0.5",
        "complex": "5",
        "zero": "0",
        "infinite": "1",
        "overflow": "inf",
    }
    assert [line.split(":")[0] for line in lines if "within" in line] == ["int64", "zero"]


def test_full_level_compares_large_tensors_in_chunks() -> None:
    _, lines = same_verdict(run_on_ranks(validate_large, 2))
    assert len(lines) == 1 and "largest absolute difference 4 " in lines[0]


@pytest.mark.parametrize("level", ["quick", "tensor", "full"])
def test_only_members_of_a_group_are_compared(level: str) -> None:
    verdicts = run_on_ranks(validate_in_subgroups, 4, level)
    assert verdicts[0] == verdicts[2] == (True, [])
    assert verdicts[1] == verdicts[3]
    is_valid, lines = verdicts[1]
    assert not is_valid and len(lines) == 1
    assert "rank 3 differs from rank 1" in lines[0], "global rank numbers"
    assert level == "quick" or lines[0].startswith("stage.w: ")


@pytest.mark.parametrize("level", ["quick", "tensor", "full"])
def test_digest_failure_on_one_rank_fails_all_ranks(level: str) -> None:
    outcomes = outcomes_on_ranks(validate_with_odd_leaf, 3, level)
    assert {outcome.error_type for outcome in outcomes} == {"DistributedError"}
    for outcome in outcomes:
        assert "rank 1" in str(outcome.error_message)
        assert "this object has no text" in str(outcome.error_message)


def test_single_process_always_passes() -> None:
    assert validate_replication({"a": torch.ones(2)}) == (True, [])
    assert run_on_ranks(validate_equal, 1, "tensor") == [(True, [])]


def test_unknown_level_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="'none', 'quick', 'tensor', 'full'"):
        validate_replication({}, "strict")


def test_compare_replicas_needs_no_process_group() -> None:
    assert compare_replicas({}) == []
    assert compare_replicas({4: {"a": "int 1"}, 9: {"a": "int 1"}}) == []
    lines = compare_replicas({4: {"a": "int 1"}, 9: {"a": "int 2"}, 2: {"a": "int 2"}})
    assert lines == ["a: rank 4 differs from ranks 2, 9 (int 1 instead of int 2)"]


def test_message_lists_twenty_differences_and_counts_the_rest() -> None:
    message = format_divergence("optimizer", [f"line {n}:" for n in range(23)])
    assert "Replication validation failed" in message and "'optimizer'" in message
    assert "line 19:" in message and "line 20:" not in message
    assert "3 more" in message
    assert "more" not in format_divergence("model", ["only"]).splitlines()[1]
