"""Assignment of stages to ranks, and FQN checks of stages."""

import pytest
import torch
from torch import nn

from forgather.ml.trainer.pipeline.pipeline_utils import (
    assert_no_duplicate_fqns,
    pipeline_stage_indices,
    require_all_fqns,
    tensors_of,
)
from forgather.ml.trainer.setup.model_construction import missing_buffers


class Part(nn.Module):
    """Module with named linear layers, each with a persistent and a non-persistent buffer."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(2, 2, bias=False)
            layer.register_buffer("kept", torch.zeros(1))
            layer.register_buffer("computed", torch.zeros(1), persistent=False)
            self.add_module(name, layer)


# --- the stages of each rank


@pytest.mark.parametrize(
    ("pp_size", "n_stages", "expected"),
    [
        (1, 1, [(0,)]),
        (1, 3, [(0, 1, 2)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (2, 6, [(0, 2, 4), (1, 3, 5)]),
        (4, 8, [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_loop_style_assigns_stages_round_robin(pp_size: int, n_stages: int, expected: list[tuple[int, ...]]) -> None:
    assert pipeline_stage_indices(pp_size, n_stages, "loop") == expected
    assert pipeline_stage_indices(pp_size, n_stages) == expected


@pytest.mark.parametrize(
    ("pp_size", "expected"), [(1, [(0, 1)]), (2, [(0, 3), (1, 2)]), (4, [(0, 7), (1, 6), (2, 5), (3, 4)])]
)
def test_v_style_returns_to_the_first_rank(pp_size: int, expected: list[tuple[int, ...]]) -> None:
    assert pipeline_stage_indices(pp_size, 2 * pp_size, "v") == expected


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5, 8])
def test_every_stage_is_on_one_rank(pp_size: int, style: str) -> None:
    indices = pipeline_stage_indices(pp_size, 2 * pp_size, style)
    assert sorted(index for own in indices for index in own) == list(range(2 * pp_size))
    assert all(list(own) == sorted(own) for own in indices)


@pytest.mark.parametrize(("pp_size", "n_stages"), [(0, 2), (-1, 2), (2, 0), (4, 2), (2, 3), (4, 6)])
@pytest.mark.parametrize("style", ["loop", "v"])
def test_uneven_stages_per_rank_are_rejected(pp_size: int, n_stages: int, style: str) -> None:
    with pytest.raises(ValueError, match=f"{n_stages} stages cannot be divided among {pp_size} ranks.*same number"):
        pipeline_stage_indices(pp_size, n_stages, style)


@pytest.mark.parametrize("n_stages", [2, 6])
def test_v_style_without_two_stages_per_rank_is_rejected(n_stages: int) -> None:
    with pytest.raises(ValueError, match=f"has 4 stages.*but {n_stages} were requested. Set stages_per_rank=2"):
        pipeline_stage_indices(2, n_stages, "v")


def test_unknown_style_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="pp_stage_type='V' is not one of 'loop', 'v'"):
        pipeline_stage_indices(2, 4, "V")


# --- names


def test_stages_with_distinct_fqns_pass() -> None:
    assert_no_duplicate_fqns([Part("a", "b"), Part("c"), Part()])


def test_duplicate_fqn_is_rejected_with_both_stages() -> None:
    with pytest.raises(ValueError, match=r"gave 'b\.weight' to stages 1 and 2, but every name belongs to one"):
        assert_no_duplicate_fqns([Part("a"), Part("b"), Part("c", "b")])


def test_persistent_buffer_in_two_stages_is_rejected() -> None:
    first, second = Part("a"), Part("a")
    del first.a.weight, second.a.weight
    with pytest.raises(ValueError, match=r"gave 'a\.kept' to stages 0 and 1"):
        assert_no_duplicate_fqns([first, second])


def test_non_persistent_buffer_may_be_in_every_stage() -> None:
    """For example rotary frequencies, which every stage needs."""
    stages = [Part("a"), Part("a")]
    for stage in stages:
        del stage.a.weight, stage.a.kept
    assert_no_duplicate_fqns(stages)


def test_stages_that_cover_the_model_pass() -> None:
    require_all_fqns(Part("a", "b", "c"), [Part("a"), Part("c", "b")])


def test_missing_fqn_is_rejected_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"stages of Part together lack 'b\.kept' \(2 names are missing, 0 are unknown\)"
    ):
        require_all_fqns(Part("a", "b", "c"), [Part("a"), Part("c")])


def test_missing_buffer_is_rejected() -> None:
    stage = Part("b")
    del stage.b.kept
    with pytest.raises(ValueError, match=r"lack 'b\.kept' \(1 names are missing.*Pass another model_splitter"):
        require_all_fqns(Part("a", "b"), [Part("a"), stage])


def test_unknown_fqn_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"have 'c\.kept', which the model does not have \(0 names .* 2 are unknown"):
        require_all_fqns(Part("a", "b"), [Part("a"), Part("b", "c")])


def test_one_fqn_of_a_tied_tensor_is_enough() -> None:
    whole = Part("a", "b")
    whole.b.weight = whole.a.weight
    stage = Part("b")
    del stage.b.weight
    sharing = [["a.weight", "b.weight"]]
    require_all_fqns(whole, [Part("a"), stage], sharing)
    with pytest.raises(ValueError, match=r"lack 'b\.weight'"):
        require_all_fqns(whole, [Part("a"), stage])


def test_tied_tensor_without_any_fqn_is_rejected() -> None:
    whole = Part("a", "b")
    whole.b.weight = whole.a.weight
    stages = [Part("a"), Part("b")]
    del stages[0].a.weight, stages[1].b.weight
    with pytest.raises(ValueError, match=r"lack 'a\.weight' \(2 names are missing"):
        require_all_fqns(whole, stages, [["a.weight", "b.weight"]])


# --- tensors


def test_missing_buffers_are_the_non_persistent_ones() -> None:
    assert list(missing_buffers(Part("a", "b"))) == ["a.computed", "b.computed"]
    assert missing_buffers(nn.BatchNorm1d(2)) == {}


def test_missing_buffers_are_listed_under_each_name() -> None:
    """A stage may have only the second name."""
    part = Part("a", "b")
    part.b._buffers["computed"] = part.a.computed
    assert list(missing_buffers(part)) == ["a.computed", "b.computed"]


def test_tensors_of_lists_tied_tensors_under_each_name() -> None:
    part = Part("a", "b")
    part.b.weight = part.a.weight
    part.b._buffers["kept"] = part.a.kept
    tensors = tensors_of(part)
    assert set(tensors) == {f"{layer}.{name}" for layer in "ab" for name in ("weight", "kept", "computed")}
    assert tensors["b.weight"] is tensors["a.weight"] is part.a.weight
    assert tensors["b.kept"] is part.a.kept
