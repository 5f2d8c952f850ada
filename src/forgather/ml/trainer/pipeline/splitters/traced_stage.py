"""A pipeline stage that was traced: a module with the names of the whole model, and the stage that torch runs."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

Shape = tuple[int, ...]


class Argument(NamedTuple):
    """What a stage's graph is called with: the state or keyword of this name, a constant, or the next value received."""

    kind: Literal["state", "keyword", "constant", "received"]
    name: str = ""
    constant: Tensor | None = None


@dataclass
class StageGraph:
    """The operations of one stage in one mode, as a function without state of its own."""

    function: fx.GraphModule
    arguments: list[Argument]

    @property
    def state_names(self) -> set[str]:
        return {argument.name for argument in self.arguments if argument.kind == "state"}


class TracedStage(nn.Module):
    """One stage of a traced model: the operations, and the parameters and buffers under the names of the whole model.

    Parameters and buffers may be replaced at any time; each call looks them up. The traces are for the shapes of one
    micro-batch. A stage that was made for training has a trace of its own for evaluation, taken by `eval()`.
    """

    def __init__(self, description: str, graphs: dict[bool, StageGraph], is_last: bool) -> None:
        super().__init__()
        self._description = description
        self._graphs = graphs
        self._is_last = is_last
        self._received_shapes: list[Shape] = []
        self._keyword_shapes: dict[str, Shape] = {}
        self._sent_dtypes: list[torch.dtype] = []

    def forward(self, *received: Tensor, **keywords: Tensor) -> Any:
        self.check_shapes(received, keywords)
        outputs = self._run(received, keywords)
        if self._is_last:
            return outputs
        return tuple(_ready_to_send(out, dtype) for out, dtype in zip(outputs, self._sent_dtypes, strict=True))

    def check_shapes(self, received: Sequence[Tensor] | None, keywords: Mapping[str, Tensor]) -> None:
        """Refuse inputs for which the stage was not traced; `received` is None where another stage sends it."""
        shapes = self._received_shapes if received is None else [tuple(tensor.shape) for tensor in received]
        if shapes != self._received_shapes:
            raise self._shape_error("its inputs", self._received_shapes, shapes)
        keyword_shapes = {name: tuple(tensor.shape) for name, tensor in keywords.items()}
        if keyword_shapes != self._keyword_shapes:
            raise self._shape_error("the keyword inputs", self._keyword_shapes, keyword_shapes)

    def run_on(self, device: torch.device) -> None:
        """Replace the device of tracing by this one."""
        for graph in self._graphs.values():
            _replace_meta_device(graph.function, device)
            graph.arguments = [
                argument._replace(constant=argument.constant.to(device)) if argument.constant is not None else argument
                for argument in graph.arguments
            ]

    def dry_run(self, received: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the stage returns on meta; fixes the shapes that it accepts from now on."""
        self._received_shapes = [tuple(tensor.shape) for tensor in received]
        self._keyword_shapes = {name: tuple(tensor.shape) for name, tensor in keywords.items()}
        results = []
        for training in self._graphs:
            self.training = training
            outputs = self._run(received, keywords)
            results.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        self._check_modes_agree(results)
        self.training = next(iter(self._graphs))
        self._sent_dtypes = [tensor.dtype for tensor in results[0]]
        return tuple(tensor.detach().contiguous().requires_grad_(tensor.requires_grad) for tensor in results[0])

    def _run(self, received: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> Any:
        graph = self._graphs.get(self.training) or self._graphs[False]
        values = iter(received)
        return graph.function(*(self._look_up(argument, values, keywords) for argument in graph.arguments))

    def _look_up(self, argument: Argument, received: Iterator[Tensor], keywords: Mapping[str, Tensor]) -> Tensor:
        if argument.kind == "state":
            tensor: Tensor = operator.attrgetter(argument.name)(self)
            return tensor
        if argument.kind == "keyword":
            return keywords[argument.name]
        if argument.kind == "received":
            return next(received)
        assert argument.constant is not None
        return argument.constant

    def _check_modes_agree(self, results: list[tuple[Tensor, ...]]) -> None:
        metas = [[(tensor.shape, tensor.dtype) for tensor in result] for result in results]
        if any(meta != metas[0] for meta in metas):
            raise ValueError(
                f"{self._description} returns other tensors in training than in evaluation, {metas[0]} and {metas[1]}; "
                "move the split points to where both modes compute the same values"
            )

    def _shape_error(self, what: str, expected: object, got: object) -> ValueError:
        return ValueError(
            f"{self._description} was traced for micro-batches in which {what} have the shapes {expected}, and got {got}; "
            "a traced stage works for these alone. Give all batches the same size and length (pad sequences to a fixed "
            "length, let n_microbatches divide the batch size, pass the same keyword tensors every time), or use a "
            "splitter that does not trace"
        )


class TracedPipelineStage(PipelineStage):
    """A pipeline stage whose shapes are known from tracing, so that no trial pass is needed before the first step."""

    fixed_shapes = True
    """Whether only micro-batches of the shapes of the example can be run."""

    def __init__(
        self,
        module: TracedStage,
        microbatch: tuple[tuple[Tensor, ...], Mapping[str, Tensor]],
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(module, stage_index, num_stages, device, inputs, outputs, group=group)
        self._traced = module
        self.input_shapes = [tuple(tensor.shape) for tensor in microbatch[0]]
        """Shapes of the main inputs of a micro-batch, known to the stages that do not see them as well."""
        self.keyword_shapes = {name: tuple(tensor.shape) for name, tensor in microbatch[1].items()}

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        # Torch wraps what a stage raises in an error of its own, which would hide the explanation.
        self._traced.check_shapes(args if self.is_first else None, kwargs or {})
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)


def _ready_to_send(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as the next stage expects it, also if autocast made another dtype."""
    tensor = tensor.to(dtype).contiguous()
    # Zero-bubble schedules detach what a stage returned, which torch refuses for views.
    return tensor.clone() if tensor._is_view() else tensor


def _replace_meta_device(function: fx.GraphModule, device: torch.device) -> None:
    """Let tensors that the code creates be created where it runs; tracing wrote its own device into the graph."""

    def replaced(value: object) -> Any:
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    for module in function.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, replaced)
                node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
            module.recompile()
