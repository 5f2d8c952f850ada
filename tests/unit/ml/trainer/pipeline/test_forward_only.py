"""Forward-only pipeline: micro-batches through stages on ranks equal the stages in sequence."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.trainer.pipeline.forward_only import ForwardOnly, Meta
from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_parallel import raised

WIDTH = 4
CPU = torch.device("cpu")

# Outputs of the last stage: one dict per call, from micro-batch number to output.
Results = list[dict[int, Tensor]]
Shape = tuple[int, ...]


class OneOutput(nn.Module):
    """Module with one output in non-contiguous memory."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None) -> Tensor:
        values = torch.tanh(self.linear(hidden))
        return (values if mask is None else values * mask).transpose(0, 1).contiguous().transpose(0, 1)


class TwoOutputs(nn.Module):
    """Module with hidden states and a list of integers that grows with every stage; the last stage joins them."""

    def __init__(self, index: int, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index, self.is_last = index, is_last

    def forward(self, hidden: Tensor, notes: Tensor | None = None, *, mask: Tensor | None = None) -> Any:
        values = torch.tanh(self.linear(hidden))
        values = values if mask is None else values * mask
        own = (values > 0).sum().view(1) + self.index
        notes = own if notes is None else torch.cat([notes, own])
        return (
            torch.cat([values.double().flatten(), notes.double()]) if self.is_last else (values.double().float(), notes)
        )


def make_stages(kind: str, num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    if kind == "one":
        return [OneOutput(index) for index in range(num_stages)]
    return [TwoOutputs(index, index == num_stages - 1) for index in range(num_stages)]


def boundary(inputs: Tensor) -> Meta:
    return Meta(inputs.shape, inputs.dtype)


def forward_only(
    modules: Sequence[nn.Module], style: str, known: Callable[[Tensor], Meta | None] | None = None
) -> ForwardOnly:
    """Return the part of this rank in a pipeline over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    indices = pipeline_stage_indices(dist.get_world_size(), len(modules), style)
    ranks = {index: rank for rank, own in enumerate(indices) for index in own}
    own = {index: modules[index] for index in indices[dist.get_rank()]}
    back = dist.new_group()
    assert isinstance(back, dist.ProcessGroup)
    return ForwardOnly(own, [ranks[index] for index in range(len(modules))], (group, back), CPU, known)


def micro_batch(shape: Shape, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


MIXED_SHAPES: list[Shape] = [(1, 5, WIDTH), (2, 3, WIDTH), (1, 5, WIDTH), (4, 1, WIDTH)]
CALLS: list[list[Shape]] = [
    [(2, 3, WIDTH)] * 3,
    [(2, 3, WIDTH)] * 3,
    MIXED_SHAPES,
    MIXED_SHAPES,
    [(2, 7, WIDTH)],
    [],
    [(2, 3, WIDTH)] * 9,
]
"""Shapes of the micro-batches of several calls: new ones and old ones, in one call and in several."""


def in_a_row(modules: Sequence[nn.Module], inputs: Tensor, **keywords: Any) -> Any:
    outputs: Any = (inputs,)
    for module in modules:
        outputs = module(*(outputs if isinstance(outputs, tuple) else (outputs,)), **keywords)
    return outputs


def keywords_of(call: int, number: int, shape: Shape) -> dict[str, Tensor]:
    """Return masks that differ between micro-batches, for every other call."""
    return {"mask": (torch.arange(shape[1]) != number % shape[1]).view(1, -1, 1)} if call % 2 else {}


def _run_calls(kind: str, num_stages: int, style: str, has_boundary: bool) -> Results:
    pipeline = forward_only(make_stages(kind, num_stages), style, boundary if has_boundary else None)
    results: Results = []
    for call, shapes in enumerate(CALLS):
        outputs: dict[int, Tensor] = {}
        inputs = [micro_batch(shape, number) for number, shape in enumerate(shapes)]
        words = [keywords_of(call, number, shape) for number, shape in enumerate(shapes)]
        with torch.no_grad():
            pipeline.run(inputs, words, outputs.__setitem__)
        results.append(outputs)
    return results


def expected_calls(kind: str, num_stages: int) -> Results:
    modules = make_stages(kind, num_stages)
    with torch.no_grad():
        return [
            {
                number: in_a_row(modules, micro_batch(shape, number), **keywords_of(call, number, shape))
                for number, shape in enumerate(shapes)
            }
            for call, shapes in enumerate(CALLS)
        ]


LAYOUTS = [(2, 2, "loop"), (2, 4, "loop"), (2, 6, "loop"), (2, 4, "v"), (4, 4, "loop"), (4, 8, "loop"), (4, 8, "v")]


@pytest.mark.parametrize(
    ("kind", "has_boundary"), [("one", False), ("one", True), ("two", False)], ids=["one", "one-known", "two"]
)
@pytest.mark.parametrize(("world_size", "num_stages", "style"), LAYOUTS)
def test_stages_on_ranks_equal_stages_in_sequence(
    world_size: int, num_stages: int, style: str, kind: str, has_boundary: bool
) -> None:
    results = run_on_ranks(_run_calls, world_size, kind, num_stages, style, has_boundary)
    expected = expected_calls(kind, num_stages)
    last_rank = 0 if style == "v" else world_size - 1
    for rank, calls in enumerate(results):
        assert len(calls) == len(CALLS)
        for outputs, wanted in zip(calls, expected, strict=True):
            assert list(outputs) == (list(wanted) if rank == last_rank else []), "outputs are on the last rank"
            for number, output in outputs.items():
                assert torch.equal(output, wanted[number])


class ToType(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.float32]


def _pass_types() -> list[tuple[torch.dtype, list[float]]]:
    found: list[tuple[torch.dtype, list[float]]] = []
    for dtype in DTYPES:
        modules: list[nn.Module] = [ToType(dtype), nn.Identity()]
        forward_only(modules, "loop").run(
            [torch.tensor([0.0, 1.0, 3.0])], [{}], lambda _, output: found.append((output.dtype, output.tolist()))
        )
    return found


def test_tensors_of_any_dtype_pass() -> None:
    results = run_on_ranks(_pass_types, 2)
    assert results == [[], [(dtype, torch.tensor([0.0, 1.0, 3.0]).to(dtype).tolist()) for dtype in DTYPES]]


class Scaled(nn.Module):
    def forward(self, values: Tensor, factor: float = 1.0, offset: float = 0.0) -> Tensor:
        return values * factor + offset


def _run_with_stage_keywords() -> list[list[float]]:
    found: list[list[float]] = []
    pipeline = forward_only([Scaled() for _ in range(4)], "v")
    inputs, keywords = [torch.ones(1), torch.full((1,), 2.0)], [{"factor": 3.0}, {"factor": 2.0}]
    # Keywords for stages on other ranks are optional and ignored.
    own = {index: {"offset": 10.0**index} for index in (0, 3)} if dist.get_rank() == 0 else {2: {"offset": 5.0}}
    pipeline.run(inputs, keywords, lambda _, output: found.append(output.tolist()), own)
    pipeline.run(inputs, keywords, lambda _, output: found.append(output.tolist()))
    return found


def test_stage_keywords_reach_only_their_stage() -> None:
    first = ((1.0 * 3 + 1) * 3 * 3 + 5) * 3 + 1000
    second = ((2.0 * 2 + 1) * 2 * 2 + 5) * 2 + 1000
    assert run_on_ranks(_run_with_stage_keywords, 2) == [[[first], [second], [81.0], [32.0]], []]


def _find_metas(style: str, has_boundary: bool) -> list[dict[int, Any]]:
    modules = make_stages("one" if has_boundary else "two", 4)
    pipeline = forward_only(modules, style, boundary if has_boundary else None)
    with torch.no_grad():
        return [dict(pipeline.metas_between(micro_batch(shape, 0), {})) for shape in [(2, 3, WIDTH), (1, 5, WIDTH)] * 2]


@pytest.mark.parametrize("style", ["loop", "v"])
def test_every_rank_learns_input_and_output_shapes_of_its_stages(style: str) -> None:
    results = run_on_ranks(_find_metas, 2, style, False)
    for rank, own in enumerate(pipeline_stage_indices(2, 4, style)):
        for place, shape in enumerate([(2, 3, WIDTH), (1, 5, WIDTH)] * 2):
            for index in {index + step for index in own for step in (-1, 0)} & {0, 1, 2}:
                hidden, notes = results[rank][place][index]
                assert hidden == (torch.Size(shape), torch.float32)
                assert notes == (torch.Size([index + 1]), torch.int64)


def test_known_boundary_shapes_are_not_exchanged() -> None:
    for metas in run_on_ranks(_find_metas, 2, "loop", True):
        assert [sorted(one) for one in metas] == [[0, 1, 2]] * 4
        assert metas[1][2] == ((torch.Size((1, 5, WIDTH)), torch.float32),)


# --- outputs that cannot pass


class Positive(nn.Module):
    """Module with an output shape that depends on values: one row per positive value."""

    def forward(self, values: Tensor) -> Tensor:
        return values[values > 0]


class Many(nn.Module):
    def __init__(self, outputs: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, values: Tensor) -> Any:
        return self.outputs(values)


def _run_shapes_of_values() -> None:
    inputs = [torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, -2.0, -1.0])]
    forward_only([Positive(), nn.Identity()], "loop").run(inputs, [{}, {}], lambda *_: None)


def test_value_dependent_output_shapes_are_rejected() -> None:
    """The rank of the stage raises; the waiting rank fails too."""
    outcomes = outcomes_on_ranks(_run_shapes_of_values, 2)
    assert outcomes[0].error_type == "RuntimeError", outcomes[0].traceback
    assert re.search(
        r"Stage 0 returned .*\[1\].* but .*\[2\].* was expected: .* depend only on the shapes and dtypes of the batch",
        str(outcomes[0].error_message),
    )
    assert outcomes[1].failed


def _refusal_before_anything_is_sent(kind: str) -> tuple[str, str]:
    known: Callable[[Tensor], Meta] | None = None
    module: nn.Module = nn.Identity()
    if kind == "type":
        known = _as_bfloat16
    else:
        module = Many(lambda values: (values,) * 9 if kind == "tensors" else values.view(*[1] * 9))
    pipeline = forward_only([module, nn.Identity()], "loop", known)
    # The other rank does not wait for anything.
    return raised(lambda: pipeline.run([torch.ones(1)], [{}], print)) if dist.get_rank() == 0 else ("", "")


def _as_bfloat16(inputs: Tensor) -> Meta:
    return Meta(inputs.shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "error_type", "message"),
    [
        ("type", "RuntimeError", r"Stage 0 returned .*torch\.float32.* but .*torch\.bfloat16.* was expected"),
        ("tensors", "ValueError", r"9 tensors of up to 1 dimensions; at most 8 of 8 can be sent"),
        ("dimensions", "ValueError", r"1 tensors of up to 9 dimensions; at most 8 of 8 can be sent"),
    ],
)
def test_outputs_that_cannot_be_or_were_not_announced_are_rejected(kind: str, error_type: str, message: str) -> None:
    found_type, found = run_on_ranks(_refusal_before_anything_is_sent, 2, kind)[0]
    assert found_type == error_type
    assert re.search(message, found), found
