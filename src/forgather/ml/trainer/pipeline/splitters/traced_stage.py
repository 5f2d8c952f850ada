"""TracedStage: a pipeline stage from a trace, as a module; TracedPipelineStage is its stage object for torch.

State keeps the FQNs of the full model. Micro-batches of other shapes than the traced shapes raise ValueError. Built by
the automatic splitter.
"""

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
    """Argument of a stage's graph: the state or keyword of this name, a constant, or the next received value."""

    kind: Literal["state", "keyword", "constant", "received"]
    name: str = ""
    constant: Tensor | None = None


@dataclass
class StageGraph:
    """Operations of one stage in one mode, as a function without state."""

    function: fx.GraphModule
    arguments: list[Argument]

    @property
    def state_names(self) -> set[str]:
        return {argument.name for argument in self.arguments if argument.kind == "state"}


class TracedStage(nn.Module):
    """Stage of a traced model: its operations, with parameters and buffers under the FQNs of the full model.

    Parameters and buffers can be replaced at any time, because each call looks them up. Traces are valid for the shapes
    of one micro-batch. A stage built for training has a separate trace for evaluation, selected by `eval()`.
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
        """Raise ValueError for shapes that were not traced; `received` is None if another stage sends the inputs."""
        shapes = self._received_shapes if received is None else [tuple(tensor.shape) for tensor in received]
        if shapes != self._received_shapes:
            raise self._shape_error("its inputs", self._received_shapes, shapes)
        keyword_shapes = {name: tuple(tensor.shape) for name, tensor in keywords.items()}
        if keyword_shapes != self._keyword_shapes:
            raise self._shape_error("the keyword inputs", self._keyword_shapes, keyword_shapes)

    def run_on(self, device: torch.device) -> None:
        """Replace the meta device of the trace by `device`."""
        for graph in self._graphs.values():
            _replace_meta_device(graph.function, device)
            graph.arguments = [
                argument._replace(constant=argument.constant.to(device)) if argument.constant is not None else argument
                for argument in graph.arguments
            ]

    def dry_run(self, received: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of the stage on the meta device; record the shapes that it accepts from now on."""
        self._received_shapes = [tuple(tensor.shape) for tensor in received]
        self._keyword_shapes = {name: tuple(tensor.shape) for name, tensor in keywords.items()}
        results = []
        for training in self._graphs:
            self.training = training
            outputs = self._run(received, keywords)
            results.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        # Stages allocate their receive buffers once, for both modes.
        self._check_modes_agree(results)
        self.training = next(iter(self._graphs))
        self._sent_dtypes = [tensor.dtype for tensor in results[0]]
        return tuple(tensor.detach().contiguous().requires_grad_(tensor.requires_grad) for tensor in results[0])

    def _run(self, received: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> Any:
        # A stage that was not built for training has only the trace for evaluation.
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
                f"{self._description} returns different tensors in training and evaluation, {metas[0]} and {metas[1]}; "
                "move the split points to where both modes compute the same values"
            )

    def _shape_error(self, what: str, expected: object, got: object) -> ValueError:
        return ValueError(
            f"{self._description} was traced for micro-batches where {what} have the shapes {expected}, but got {got}. "
            "A traced stage accepts no other shapes. Pad sequences to a fixed length, let n_microbatches divide the batch "
            "size, and pass the same keyword tensors every time, or use a splitter that does not trace"
        )


class TracedPipelineStage(PipelineStage):
    """Pipeline stage with shapes known from the trace, so that the first step needs no trial pass."""

    fixed_shapes = True
    """Whether only micro-batches with the shapes of the example are accepted."""

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
        """Shapes of the main inputs of a micro-batch, also on stages that do not receive them."""
        self.keyword_shapes = {name: tuple(tensor.shape) for name, tensor in microbatch[1].items()}

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        # Checked outside of the stage: torch wraps errors of a stage in another error, which would hide the message.
        self._traced.check_shapes(args if self.is_first else None, kwargs or {})
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)


def _ready_to_send(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in the dtype that the next stage expects, even if autocast produced another dtype."""
    tensor = tensor.to(dtype).contiguous()
    # Zero-bubble schedules detach outputs in place, which torch does not allow for views.
    return tensor.clone() if tensor._is_view() else tensor


def _replace_meta_device(function: fx.GraphModule, device: torch.device) -> None:
    """Replace the meta device in operations that create tensors; tracing recorded it in the graph."""

    def replaced(value: object) -> Any:
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    for module in function.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, replaced)
                node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
            module.recompile()
