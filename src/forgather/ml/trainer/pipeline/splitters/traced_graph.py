"""Graph of a traced model: assignment of its operations to pipeline stages, and one graph per stage.

Each value is computed in one stage and carried through the chain to its last use. Writes in place that other stages
would miss raise ValueError. Called by the automatic splitter.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from forgather.ml.trainer.pipeline.splitters.traced_stage import Argument, StageGraph

_aten = torch.ops.aten
_SPLIT_MARK = torch.ops.pippy._pipe_split.default
# Metadata assertions contain the device and dtype of the trace, which differ in training.
_NOT_COPIED = (_SPLIT_MARK, _aten._assert_tensor_metadata.default)


class StateNames:
    """FQNs of the parameters and buffers in the full model; a tied tensor has several."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self._aliases.setdefault(id(tensor), []).append(name)
        self.not_saved = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }

    def name_for(self, target: str, user: fx.Node) -> str:
        """Return the FQN of a tensor; for a tied tensor, the FQN in the module that contains the operation `user`."""
        names = self._aliases[id(self.tensors[target])]
        # A module that is called again is traced as "name@1".
        paths = {path.split("@")[0] for path, _ in user.meta.get("nn_module_stack", {}).values()}
        in_use = [name for name in names if name.rpartition(".")[0] in paths - {""}]
        return (in_use or names)[0]

    def add_to(self, stage: nn.Module, used: set[str]) -> None:
        # In the order of the full model, which decides the order of parameters in optimizers.
        for name, tensor in self.tensors.items():
            if name in used:
                path, _, last = name.rpartition(".")
                owner = _submodule_at(stage, path)
                if isinstance(tensor, nn.Parameter):
                    owner.register_parameter(last, tensor)
                else:
                    owner.register_buffer(last, tensor, persistent=name not in self.not_saved)


def _submodule_at(module: nn.Module, path: str) -> nn.Module:
    for atom in filter(None, path.split(".")):
        if atom not in module._modules:
            module.add_module(atom, nn.Module())
        module = module.get_submodule(atom)
    return module


def share_out_unused(used: list[set[str]], names: StateNames) -> None:
    """Assign state that no operation reads to a stage, so that checkpoints are complete.

    Another name of a used tensor goes to the stage of that tensor. Other state goes to the stage with the most similar
    names.
    """
    for name in names.tensors:
        if not any(name in taken for taken in used):
            nearness = [max((_similarity(name, other, names) for other in taken), default=0) for taken in used]
            used[nearness.index(max(nearness))].add(name)


def _similarity(name: str, other: str, names: StateNames) -> int:
    # Larger than the number of common path components of any two names, so that the stage of the tensor wins.
    if names.tensors[name] is names.tensors[other]:
        return len(name)
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), other.split("."), strict=False))
    )


@dataclass
class _Family:
    """Values that share memory, and the stages that write to it."""

    members: list[fx.Node]
    writers: set[int] = field(default_factory=set)


@dataclass
class Trace:
    """Operations of a traced model, and the stage of each operation."""

    root: fx.GraphModule
    num_stages: int
    names: StateNames
    inputs: list[fx.Node]
    keywords: dict[fx.Node, str]
    outputs: fx.Node | tuple[fx.Node, ...]
    stages: dict[fx.Node, int] = field(default_factory=dict)
    families: dict[fx.Node, _Family] = field(default_factory=dict)
    portable: set[fx.Node] = field(default_factory=set)
    """Values that depend only on keyword inputs; any stage can compute them."""
    last_uses: dict[fx.Node, int] = field(default_factory=dict)

    def analyse(self) -> tuple[int, list[int]]:
        """Assign operations to stages; return the number of stages, and the indices of stages without operations."""
        _assign_stages(self)
        _find_shared_memory(self)
        _find_portable(self)
        _find_last_uses(self)
        nodes = [node for node in self.root.graph.nodes if node.op == "call_function"]
        num_found = 1 + sum(node.target is _SPLIT_MARK for node in nodes)
        busy = {self.stages[node] for node in nodes if self.is_work_of(self.stages[node], node)}
        return num_found, sorted(set(range(num_found)) - busy)

    def is_work_of(self, stage: int, node: fx.Node) -> bool:
        return self.stages[node] == stage and node.target not in _NOT_COPIED and node not in self.portable

    def carried_into(self, stage: int) -> list[fx.Node]:
        """Return the values that the stage receives from the previous stage."""
        if stage == 0:
            return self.inputs
        # Stages only send to their successor, so a value also travels through stages that do not use it.
        return [node for node, last in self.last_uses.items() if self.stages[node] < stage <= last]


def choose_outputs(model: nn.Module, graph: fx.Graph, spec: pytree.TreeSpec) -> fx.Node | tuple[fx.Node, ...]:
    """Return the logits if the model returns any, else all output tensors; remove the rest of the graph."""
    output = graph.output_node()
    leaves = list(output.args[0]) if isinstance(output.args[0], Sequence) else [output.args[0]]
    whole = pytree.tree_unflatten(leaves, spec)
    logits = whole.get("logits") if isinstance(whole, Mapping) else None
    if not isinstance(logits, fx.Node):
        logits = None if isinstance(whole, fx.Node) else getattr(whole, "logits", None)
    nodes = (logits,) if isinstance(logits, fx.Node) else tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))
    if not nodes:
        raise ValueError(f"{type(model).__name__} returns no tensor, so there is nothing to compute a loss from")
    output.args = (nodes,)
    # Other outputs would be carried through all stages to the end.
    graph.eliminate_dead_code()
    return nodes[0] if len(nodes) == 1 else nodes


def _assign_stages(trace: Trace) -> None:
    stage = 0
    for node in trace.root.graph.nodes:
        stage += node.target is _SPLIT_MARK
        # A list of tensors cannot be sent, but its entries can. So entries belong to the stage of their list.
        trace.stages[node] = trace.stages[node.args[0]] if node.target is operator.getitem else stage


def _aliased(node: fx.Node, only_written: bool = False) -> list[fx.Node]:
    """Return the inputs that share memory with the node's result; with `only_written`, the inputs that it writes to."""
    if node.target is operator.getitem:
        return [] if only_written else [node.args[0]]  # type: ignore[list-item]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    values = [*zip(arguments, node.args, strict=False), *((a, node.kwargs.get(a.name)) for a in arguments)]
    shared = [v for a, v in values if a.alias_info is not None and (a.alias_info.is_write or not only_written)]
    return [value for value in pytree.tree_leaves(shared) if isinstance(value, fx.Node)]


def _find_shared_memory(trace: Trace) -> None:
    # Aliases are merged into families first, so that a write through any view counts for all members.
    for node in trace.root.graph.nodes:
        trace.families[node] = _Family([node])
        for other in _aliased(node):
            joined, old = trace.families[other], trace.families[node]
            if joined is not old:
                joined.members += old.members
                trace.families.update(dict.fromkeys(old.members, joined))
    for node in trace.root.graph.nodes:
        for other in _aliased(node, only_written=True):
            trace.families[other].writers.add(trace.stages[node])


def _find_portable(trace: Trace) -> None:
    for node in trace.root.graph.nodes:
        # A value that is written in place differs before and after the write, so it cannot be recomputed elsewhere.
        if trace.families[node].writers:
            continue
        from_keywords = all(other in trace.portable for other in node.all_input_nodes)
        if node in trace.keywords or (node.op == "call_function" and from_keywords and _is_repeatable(node)):
            trace.portable.add(node)


def _is_repeatable(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    # Random operations would draw other numbers in each stage.
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable


def _find_last_uses(trace: Trace) -> None:
    for node in trace.root.graph.nodes:
        if node.op in ("get_attr", "output") or node in trace.portable:
            continue
        uses = [_stage_of_use(trace, user) for user in node.users if user.target not in _NOT_COPIED]
        trace.last_uses[node] = max(uses, default=0)


def _stage_of_use(trace: Trace, user: fx.Node) -> int:
    # Outputs of the model leave from the last stage, so they are carried there.
    return trace.num_stages - 1 if user.op == "output" else trace.stages[user]


class StageGraphBuilder:
    """Builder that copies the operations of one stage out of a trace."""

    def __init__(self, trace: Trace, stage: int, model_name: str) -> None:
        self._trace, self._stage, self._model_name = trace, stage, model_name
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._state: dict[str, fx.Node] = {}
        self._submodules: dict[str, Any] = {}
        self._arguments: list[Argument] = []

    def build(self) -> StageGraph:
        received = self._trace.carried_into(self._stage)
        self._check_writes(received)
        for node in received:
            self._copies[node] = self._own(node, self._placeholder(Argument("received")))
        for node in self._trace.root.graph.nodes:
            if node.op == "call_function" and self._trace.is_work_of(self._stage, node):
                self._copy(node)
        self._graph.output(self._outputs(received))
        return StageGraph(fx.GraphModule(self._submodules, self._graph), self._arguments)

    def _outputs(self, received: list[fx.Node]) -> Any:
        outputs = self._trace.outputs
        end = self._trace.root.graph.output_node()
        if self._stage == self._trace.num_stages - 1:
            return fx.node.map_arg(outputs, lambda node: self._value(node, end))
        sent = self._trace.carried_into(self._stage + 1)
        # Values that only pass through are cloned, so that outputs are never the receive buffers themselves.
        return tuple(
            self._graph.call_function(_aten.clone.default, (self._copies[node],))
            if node in received
            else self._value(node, end)
            for node in sent
        )

    def _placeholder(self, argument: Argument) -> fx.Node:
        self._arguments.append(argument)
        return self._graph.placeholder(f"argument_{len(self._arguments)}")

    def _copy(self, node: fx.Node) -> fx.Node:
        self._copies[node] = self._graph.node_copy(node, lambda other: self._value(other, node))
        return self._copies[node]

    def _value(self, node: fx.Node, user: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._attribute(node, user)
        if node in self._copies:
            return self._copies[node]
        if node in self._trace.keywords:
            argument = Argument("keyword", self._trace.keywords[node])
            self._copies[node] = self._own(node, self._placeholder(argument))
            return self._copies[node]
        assert node in self._trace.portable, f"{node} is neither received nor computed in stage {self._stage}"
        return self._copy(node)

    def _own(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Return the value, or a clone if this stage writes to it."""
        # Received tensors and keyword inputs belong to the caller and must not change.
        is_written = self._stage in self._trace.families[node].writers
        return self._graph.call_function(_aten.clone.default, (value,)) if is_written else value

    def _attribute(self, node: fx.Node, user: fx.Node) -> fx.Node:
        target = str(node.target)
        # State is an argument of the graph, since the stage looks it up in each call: it may be allocated or replaced.
        if target in self._trace.names.tensors:
            name = self._trace.names.name_for(target, user)
            if name not in self._state:
                self._state[name] = self._placeholder(Argument("state", name))
            return self._state[name]
        if node not in self._copies:
            self._copies[node] = self._constant(node, operator.attrgetter(target)(self._trace.root))
        return self._copies[node]

    def _constant(self, node: fx.Node, value: object) -> fx.Node:
        if not isinstance(value, Tensor):
            self._submodules[str(node.target)] = value
            return self._graph.get_attr(str(node.target))
        if value.is_meta:
            raise ValueError(
                f"{self._model_name} uses the tensor {node.target!r}, which is neither a parameter nor a buffer. The model "
                "is built without values, so this tensor would stay empty. Make it a buffer with "
                "register_buffer(name, tensor, persistent=False)"
            )
        return self._placeholder(Argument("constant", str(node.target), value))

    def _check_writes(self, received: list[fx.Node]) -> None:
        """Raise ValueError if this stage writes in place to memory that other stages or several received values share."""
        for family in {id(family): family for family in self._trace.families.values()}.values():
            if self._stage not in family.writers:
                continue
            state = [node for node in family.members if str(node.target) in self._trace.names.tensors]
            holders = {self._trace.stages[user] for node in state for user in node.users}
            if len(holders) > 1 or len([node for node in received if node in family.members]) > 1:
                raise ValueError(
                    f"stage {self._stage} of {self._model_name} changes a tensor in place ({family.members[0].name}), which "
                    "other stages also use, or which has a second name; move the split point, or avoid the in-place operation"
                )
