"""Automatic splitter: divides any model that torch.export can trace into pipeline stages.

The model is traced once for training and once for evaluation, and its operations are cut at the split points. Stages
form a chain: each stage passes on all values that later stages need. Keyword inputs go to every stage directly. Values
that depend only on keywords, such as masks, are computed again in each stage that needs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import SplitPoint, pipe_split

from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter, Split
from forgather.ml.trainer.pipeline.splitters.traced_graph import (
    StageGraphBuilder,
    StateNames,
    Trace,
    choose_outputs,
    share_out_unused,
)
from forgather.ml.trainer.pipeline.splitters.traced_stage import TracedPipelineStage, TracedStage

__all__ = ["create_automatic_splitter"]


def create_automatic_splitter(split_spec: Mapping[str, SplitPoint | str] | None = None) -> ModelSplitter:
    """Return a `ModelSplitter` for models that no other splitter supports.

    `split_spec` maps module names to "beginning" (a stage begins with this module) or "end" (a stage ends with it). Pass
    an empty mapping for models that call `torch.distributed.pipelining.pipe_split` themselves. None divides the model's
    list of layers evenly.
    """
    spec = None if split_spec is None else {name: _as_split_point(name, point) for name, point in split_spec.items()}

    def splitter(
        model: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any],
        stage_indices: Sequence[tuple[int, ...]],
        train: bool,
        *,
        device: torch.device,
        rank: int,
        pp_group: ProcessGroup,
    ) -> Split:
        keywords = dict(example_kwargs)
        num_stages = sum(len(indices) for indices in stage_indices)
        points = _even_split(model, num_stages) if spec is None else spec
        # A trace records the branches of one mode, such as active dropout. So training needs a second trace.
        modes = (True, False) if train else (False,)
        traces = {mode: _trace(model, example_args, keywords, points, num_stages, mode) for mode in modes}
        modules = _build_stages(model, traces, num_stages)
        boundaries = _boundary_tensors(modules, example_args, keywords)
        # After the dry runs for the boundaries, which run on the meta device of the trace.
        for module in modules:
            module.run_on(device)
        own = sorted(stage_indices[rank])
        microbatch = (example_args, keywords)
        stages = [
            TracedPipelineStage(
                modules[i], microbatch, boundaries[i], boundaries[i + 1], i, num_stages, device, pp_group
            )
            for i in own
        ]
        return list(modules), [modules[i] for i in own], stages, None

    return splitter


# --- where to split


def _as_split_point(name: str, point: SplitPoint | str) -> SplitPoint:
    if isinstance(point, SplitPoint):
        return point
    try:
        return SplitPoint[point.upper()]
    except (KeyError, AttributeError):
        raise ValueError(
            f"split_spec[{name!r}] is {point!r}; it must be SplitPoint.BEGINNING or 'beginning' (a stage begins with this "
            "module) or SplitPoint.END or 'end' (a stage ends with it)"
        ) from None


def _even_split(model: nn.Module, num_stages: int) -> dict[str, SplitPoint]:
    """Return split points that divide the model's only list of layers evenly."""
    if num_stages == 1:
        return {}
    name, layers = _layer_list(model, num_stages)
    starts = [stage * len(layers) // num_stages for stage in range(1, num_stages)]
    return {f"{name}.{start}" if name else str(start): SplitPoint.BEGINNING for start in starts}


def _layer_list(model: nn.Module, num_stages: int) -> tuple[str, nn.ModuleList]:
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    # Lists inside the entries of another list are parts of a layer.
    outer = [(name, module) for name, module in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    long_enough = [(name, module) for name, module in outer if len(module) >= num_stages]
    if len(long_enough) == 1:
        return long_enough[0]
    found = ", ".join(f"{name!r} with {len(module)} entries" for name, module in outer) or "none"
    raise ValueError(
        f"cannot choose where to split {type(model).__name__} into {num_stages} stages: this needs exactly one nn.ModuleList "
        f"with at least {num_stages} entries, but the lists are: {found}. Pass create_automatic_splitter a split_spec "
        f"with {num_stages - 1} modules, for example {{'layers.2': SplitPoint.BEGINNING}}"
    )


@contextmanager
def _marked(model: nn.Module, points: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Mark the split points in the model's forward pass, by hooks that call `pipe_split`."""
    with ExitStack() as stack:
        for name, point in points.items():
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise ValueError(
                    f"split_spec names the module {name!r}, which {type(model).__name__} does not have; "
                    "use the names of model.named_modules()"
                ) from error
            # pipe_split adds a marker operation to the trace. The graph is cut at these markers.
            if point is SplitPoint.BEGINNING:
                handle = module.register_forward_pre_hook(lambda module, args: pipe_split())
            else:
                handle = module.register_forward_hook(lambda module, args, output: pipe_split())
            stack.callback(handle.remove)
        yield


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    # Each module is restored separately: some may be in another mode than the model.
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- tracing


def _trace(
    model: nn.Module,
    args: tuple[Tensor, ...],
    keywords: dict[str, Tensor],
    points: Mapping[str, SplitPoint],
    num_stages: int,
    training: bool,
) -> Trace:
    with _in_mode(model, training), _marked(model, points), torch.enable_grad():
        try:
            program = torch.export.export(model, args, keywords)
        except Exception as error:
            raise _tracing_error(model, error) from error
    root = program.module(check_guards=False)
    assert isinstance(root, fx.GraphModule) and program.call_spec.in_spec is not None
    # Placeholders come in the order of the call: positional arguments first, then keywords.
    placeholders = [node for node in root.graph.nodes if node.op == "placeholder"]
    keyword_names = program.call_spec.in_spec.child(1).context
    outputs = choose_outputs(model, root.graph, program.call_spec.out_spec)
    trace = Trace(
        root,
        num_stages,
        StateNames(model),
        placeholders[: len(args)],
        dict(zip(placeholders[len(args) :], keyword_names, strict=True)),
        outputs,
    )
    num_found, idle = trace.analyse()
    if num_found != num_stages or idle:
        raise _count_error(model, points, num_stages, num_found, idle)
    return trace


def _count_error(
    model: nn.Module, points: Mapping[str, SplitPoint], num_stages: int, num_found: int, idle: list[int]
) -> ValueError:
    return ValueError(
        f"{num_stages} stages were requested (over all ranks), but the split points {sorted(points)} cut "
        f"{type(model).__name__} into {num_found}"
        + (f", and stages {idle} have nothing to compute" if idle else "")
        + f". Pass {num_stages - 1} split points with operations between them (a module that is called several times "
        "splits each time), or change stages_per_rank or the number of ranks"
    )


def _tracing_error(model: nn.Module, error: Exception) -> ValueError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return ValueError(
        f"the automatic splitter cannot trace {type(model).__name__}: {type(error).__name__}: {reason}\n"
        "It records the operations of one forward pass with torch.export, on tensors without values. "
        "The model's Python code must not depend on tensor values (no `if tensor.sum() > 0`, no .item(), no .tolist()), "
        "and must return only tensors (config.use_cache = False for models of transformers). "
        "Change that part of forward(), or use a splitter that does not trace: "
        "create_causal_lm_splitter for decoder-only language models, or your own. Split points do not matter here."
    )


def _build_stages(model: nn.Module, traces: Mapping[bool, Trace], num_stages: int) -> list[TracedStage]:
    model_name = type(model).__name__
    names = StateNames(model)
    graphs = [
        {mode: StageGraphBuilder(trace, stage, model_name).build() for mode, trace in traces.items()}
        for stage in range(num_stages)
    ]
    # A stage holds the state that it reads in either mode.
    used = [set().union(*(graph.state_names for graph in by_mode.values())) for by_mode in graphs]
    share_out_unused(used, names)
    stages = []
    for stage, by_mode in enumerate(graphs):
        module = TracedStage(f"stage {stage} of {model_name}", by_mode, is_last=stage == num_stages - 1)
        names.add_to(module, used[stage])
        stages.append(module)
    return stages


def _boundary_tensors(
    modules: Sequence[TracedStage], args: tuple[Tensor, ...], keywords: dict[str, Tensor]
) -> list[tuple[Tensor, ...]]:
    """Return example inputs of each stage and, as the last entry, example outputs of the last stage."""
    boundaries = [args]
    # Gradients are enabled, so that the examples show which tensors need a gradient from the next stage.
    with torch.enable_grad():
        for module in modules:
            boundaries.append(module.dry_run(boundaries[-1], keywords))
    return boundaries
