"""Automatic splitter (tracing): stages compute the same values, under the same names, as the full model."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipe_split,
)
from torch.nn import functional

from forgather.ml.trainer.pipeline.splitters.automatic import create_automatic_splitter
from tests.support.ranks import RankFailure, run_on_ranks

VOCABULARY, WIDTH, LENGTH, ROWS, MICROBATCHES = 11, 8, 5, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        update = self.dropout(self.second(torch.relu_(self.first(x)))) * self.scale
        return x + (update if allowed is None else update.masked_fill(~allowed, 0.0))


class Blocks(nn.Module):
    """Model with an embedding, four blocks, and a head that also uses the embedding, passed through all stages."""

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Linear(2, 2)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        embedded = self.embed(ids) + torch.arange(LENGTH, device=ids.device)[:, None] * torch.tensor(0.1)
        allowed = None if mask is None else (mask > 0)[..., None]
        x = embedded
        for layer in self.layers:
            x = layer(x, allowed)
        return {"hidden": x, "logits": self.head(x + 0.1 * embedded + ids[..., None])}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def batch(with_mask: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.randint(0, 2, (ROWS, LENGTH), generator=generator)
    return ids, {"mask": mask} if with_mask else {}, targets


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * LENGTH)


def split(
    build: Callable[[], nn.Module],
    stage_indices: tuple[tuple[int, ...], ...],
    spec: Mapping[str, Any] | None = None,
    keywords: tuple[str, ...] = ("mask",),
    train: bool = True,
    rows: int = ROWS // MICROBATCHES,
) -> tuple[list[nn.Module], list[nn.Module], list[Any], Any]:
    with torch.device("meta"):
        model = build()
        ids = torch.zeros(rows, LENGTH, dtype=torch.long)
        example = {name: torch.ones(rows, LENGTH, dtype=torch.long) for name in keywords}
    assert dist.group.WORLD is not None
    return create_automatic_splitter(spec)(
        model,
        (ids,),
        example,
        stage_indices,
        train,
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        pp_group=dist.group.WORLD,
    )


def fill(module: nn.Module, source: nn.Module) -> None:
    """Replace meta tensors by real ones and load their values, as the trainer does."""
    values = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers(remove_duplicate=False))
    for path, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                assert tensor is not None and tensor.is_meta
                empty = torch.empty_like(tensor, device="cpu")
                table[name] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                empty.copy_(values[f"{path}.{name}" if path else name].detach())


def run_chain(modules: list[nn.Module], ids: Tensor, **keywords: Tensor) -> Tensor:
    values: Any = (ids,)
    for module in modules:
        values = module(*values, **keywords)
    assert isinstance(values, Tensor)
    return values


# --- names and values of stages


def _filled_stages_match_the_whole_model() -> None:
    modules, own, stages, mask_creator = split(lambda: Blocks(dropout=0.3), ((0, 1),))
    assert own == modules and mask_creator is None and all(stage.fixed_shapes for stage in stages)
    whole = seeded(lambda: Blocks(dropout=0.3))
    names = {name for module in modules for name, _ in module.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}
    buffers = {name for module in modules for name, _ in module.named_buffers()}
    assert buffers == {name for name, _ in whole.named_buffers()}
    assert {name for module in modules for name in module.state_dict()} == set(whole.state_dict())
    for module in modules:
        fill(module, whole)
    ids, keywords, _ = batch(with_mask=True)
    for training in (True, False):
        for module in (whole, *modules):
            module.train(training)
        torch.manual_seed(1)
        expected = whole(ids[:2], mask=keywords["mask"][:2])["logits"]
        torch.manual_seed(1)
        torch.testing.assert_close(run_chain(modules, ids[:2], mask=keywords["mask"][:2]), expected)


def test_filled_stages_equal_the_full_model_in_training_and_evaluation() -> None:
    run_on_ranks(_filled_stages_match_the_whole_model, 1)


def _split_points_are_heeded(spec: Mapping[str, Any]) -> list[set[str]]:
    modules = split(Blocks, ((0, 1),), spec)[0]
    return [{name.split(".")[1] for name, _ in m.named_parameters() if name.startswith("layers")} for m in modules]


@pytest.mark.parametrize("spec", [{"layers.0": "end"}, {"layers.1": SplitPoint.BEGINNING}])
def test_split_points_set_the_start_of_stages(spec: Mapping[str, Any]) -> None:
    assert run_on_ranks(_split_points_are_heeded, 1, spec) == [[{"0"}, {"1", "2", "3"}]]


def _tied_names() -> tuple[list[set[str]], bool]:
    modules = split(lambda: Blocks(tied=True), ((0, 1),))[0]
    first, second = (dict(module.named_parameters()) for module in modules)
    names = [set(stage) & {"embed.weight", "head.weight"} for stage in (first, second)]
    return names, first["embed.weight"] is second["head.weight"]


def test_tied_weight_is_named_after_the_module_that_uses_it_in_each_stage() -> None:
    assert run_on_ranks(_tied_names, 1) == [([{"embed.weight"}, {"head.weight"}], True)]


# --- training


SCHEDULES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "gpipe": (ScheduleGPipe, ((0,), (1,))),
    "1f1b": (Schedule1F1B, ((0,), (1,))),
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "zero bubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
}


def _train_step(name: str, with_mask: bool, tied: bool, num_steps: int) -> tuple[float | None, dict[str, Tensor]]:
    schedule_class, stage_indices = SCHEDULES[name]
    ids, keywords, targets = batch(with_mask)
    _, own, stages, _ = split(lambda: Blocks(tied=tied), stage_indices, keywords=tuple(keywords))
    whole = seeded(lambda: Blocks(tied=tied))
    for module in own:
        fill(module, whole)
    is_multistage = len(stages) > 1
    schedule = schedule_class(
        stages if is_multistage else stages[0], MICROBATCHES, loss_fn=summed_loss, scale_grads=False
    )
    for _ in range(num_steps):
        for module in own:
            module.zero_grad()
        losses: list[Tensor] = []
        inputs = (ids,) if dist.get_rank() == 0 else ()
        is_last = dist.get_rank() == 1
        schedule.step(*inputs, **keywords, target=targets if is_last else None, losses=losses if is_last else None)
    gradients = {n: p.grad for module in own for n, p in module.named_parameters() if p.grad is not None}
    return float(sum(loss.detach() for loss in losses)) if losses else None, gradients


def expected_step(with_mask: bool, tied: bool) -> tuple[float, dict[str, Tensor]]:
    whole = seeded(lambda: Blocks(tied=tied))
    ids, keywords, targets = batch(with_mask)
    loss = summed_loss(whole(ids, **keywords)["logits"], targets)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_loss_and_gradients_equal_the_full_model(name: str, with_mask: bool) -> None:
    loss, expected = expected_step(with_mask, tied=False)
    (_, first), (last_loss, second) = run_on_ranks(_train_step, 2, name, with_mask, False, 2)
    assert last_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(first | second, expected, atol=1e-6, rtol=1e-6)


def test_gradients_of_tied_weights_sum_over_the_stages() -> None:
    _, expected = expected_step(True, tied=True)
    (_, first), (_, second) = run_on_ranks(_train_step, 2, "1f1b", True, True, 1)
    total = first["embed.weight"] + second["head.weight"]
    torch.testing.assert_close(total, expected["embed.weight"], atol=1e-6, rtol=1e-6)


# --- what is refused


def _refusal(spec: Mapping[str, Any] | None, stage_indices: tuple[tuple[int, ...], ...]) -> str:
    with pytest.raises(ValueError) as caught:
        split(Blocks, stage_indices, spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layers.1": "beginning", "layers.2": "end"}, "2 stages were requested.*into 3"),
        ({"layers.9": "beginning"}, "names the module 'layers.9'"),
        ({"layers.1": "middle"}, "'middle'"),
        ({"embed": "beginning"}, r"stages \[0\] have nothing to compute"),
    ],
)
def test_invalid_split_points_are_explained(spec: Mapping[str, Any], message: str) -> None:
    (text,) = run_on_ranks(_refusal, 1, spec, ((0, 1),))
    assert re.search(message, text), text


def test_missing_split_points_need_a_list_with_enough_layers() -> None:
    (text,) = run_on_ranks(_refusal, 1, None, ((0, 1, 2, 3, 4),))
    assert "'layers' with 4 entries" in text and "split_spec" in text


def _trace_branching() -> tuple[str, bool]:
    with torch.device("meta"):
        model, example = Branching(), torch.zeros(2, 4)
    assert dist.group.WORLD is not None
    splitter = create_automatic_splitter()
    with pytest.raises(ValueError) as caught:
        splitter(model, (example,), {}, ((0, 1),), True, device=torch.device("cpu"), rank=0, pp_group=dist.group.WORLD)
    return str(caught.value), caught.value.__cause__ is not None


def test_untraceable_model_is_explained_with_its_cause() -> None:
    ((text, has_cause),) = run_on_ranks(_trace_branching, 1)
    assert "cannot trace Branching" in text and "must not depend on tensor values" in text and has_cause


def _other_shapes() -> None:
    _, own, stages, _ = split(Blocks, ((0,), (1,)), rows=3)
    for module in own:
        fill(module, seeded(Blocks))
    ids, keywords, _ = batch(with_mask=True)
    schedule: Any = ScheduleGPipe(stages[0], MICROBATCHES)
    schedule.step(*((ids,) if dist.get_rank() == 0 else ()), **keywords)


def test_batches_of_other_shapes_are_rejected() -> None:
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(_other_shapes, 2)
    kind, message, _ = caught.value.errors[0]
    assert kind == "ValueError" and "was traced for micro-batches" in message and "(3, 5)" in message


# --- details of models


class Awkward(nn.Module):
    """Model with in-place operations around its explicit split, running statistics and no_grad code."""

    def __init__(self, plain_tensor: bool = False, views: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(LENGTH, LENGTH)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.second = nn.Linear(LENGTH, LENGTH)
        self.plain = torch.full((LENGTH,), 2.0) if plain_tensor else 1.0
        self.views = views

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(ids.float() * self.plain).mul_(2.0))
        with torch.no_grad():
            offset = torch.ones(LENGTH, device=ids.device).cumsum(0)
        turned = x.t()
        pipe_split()
        x.add_(offset)
        x = self.second(x + turned.t() if self.views else x)
        return x, offset


def _awkward_step() -> None:
    modules = split(Awkward, ((0, 1),), {}, keywords=(), rows=ROWS)[0]
    whole = seeded(Awkward)
    for module in modules:
        fill(module, whole)
    ids = batch(with_mask=False)[0]
    expected = whole(ids)
    values: Any = (ids,)
    for module in modules:
        values = module(*values)
    torch.testing.assert_close(values, expected)
    values[0].sum().backward()
    expected[0].sum().backward()
    state = {name: tensor for module in modules for name, tensor in module.state_dict().items()}
    torch.testing.assert_close(state, dict(whole.state_dict()))
    gradients = {name: p.grad for module in modules for name, p in module.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in whole.named_parameters()})


def test_in_place_operations_and_running_statistics_survive_the_split() -> None:
    run_on_ranks(_awkward_step, 1)


def _awkward_refusal(plain_tensor: bool, views: bool) -> str:
    with pytest.raises(ValueError) as caught:
        split(lambda: Awkward(plain_tensor, views), ((0, 1),), {}, keywords=(), rows=ROWS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plain_tensor", "views", "message"), [(True, False, "register_buffer"), (False, True, "in place")]
)
def test_split_that_would_compute_wrong_values_is_rejected(plain_tensor: bool, views: bool, message: str) -> None:
    (text,) = run_on_ranks(_awkward_refusal, 1, plain_tensor, views)
    assert message in text
