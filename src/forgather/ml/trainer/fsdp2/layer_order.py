"""Order of sharded layers: every rank must gather the same layers, and reduce the gradients of the same parameters.

A layer that one rank skips would match its collectives with another layer of the other ranks: wrong weights, a crash of
gloo, or a hang. `LayerOrder` compares the ranks at the first pass, and whenever a pass differs from the passes so far.
Other passes are compared on the host, without messages. `FSDP2Trainer` watches training and evaluation with it.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from forgather.ml.distributed import Peers

WAIT_SECONDS = 30.0
"""How long a rank waits for the others, if it leaves the common order. They may be waiting for its shards."""
_END = "the end of the pass"
_REMEDY = (
    "Compute every layer on every rank, for example with equal random numbers for layer dropout, or multiply the output by "
    "zero. Or set fsdp2.shard_transformer_layers=False and fsdp2.find_unused_parameters=True, which gathers the whole "
    "model at once."
)
_REMEDY_FOR_PARAMETERS = (
    "Set fsdp2.find_unused_parameters=True: ranks that do not use a parameter then contribute a zero gradient."
)


Place = tuple[str, int, str]
"""Place in a pass: kind of the pass, number of events so far, and the last event."""


class LayerOrder:
    """Events of the sharded layers in each pass, compared between all ranks of `group` (gloo).

    With `finds_unused`, ranks may differ in the parameters without a gradient, and `forget_unused` removes the gradients
    of parameters that no rank has used.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, finds_unused: bool) -> None:
        self._group = group
        self._finds_unused = finds_unused
        # Events that followed a place, on all ranks. Its size is limited, unlike a record of all passes.
        self._known: dict[Place, list[str]] = {}
        self._place: Place | None = None
        self._groups: list[Any] = []
        self._used: set[int] = set()
        names = {module: name for name, module in model.named_modules()}
        for module in (one for one in model.modules() if isinstance(one, FSDPModule)):
            for group_of_layer in module._get_fsdp_state()._fsdp_param_groups:
                self._follow(group_of_layer, names[module] or "the model itself")
            module.set_reduce_scatter_unused_params(finds_unused, recurse=False)

    def _follow(self, group: Any, name: str) -> None:
        """Watch the collectives of a layer: its all-gathers and its reduce-scatter."""
        self._groups.append(group)
        group.pre_forward = self._before(group.pre_forward, lambda: f"the forward pass of {name}")
        group.pre_backward = self._before(group.pre_backward, lambda: f"the backward pass of {name}")
        group.post_backward = self._before(group.post_backward, lambda: self._reduction(group, name))

    def _before(self, method: Callable[..., Any], event: Callable[[], str]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._place is not None:
                self._pass(event())
            return method(*args)

        return call

    def _reduction(self, group: Any, name: str) -> str:
        unused = []
        for one in group.fsdp_params:
            parameter = getattr(one, "_unsharded_param", None)
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is not None or one.unsharded_accumulated_grad is not None:
                self._used.add(id(one))
            else:
                unused.append(one._param_fqn)
        if self._finds_unused or not unused:
            return f"the gradients of {name}"
        return f"the gradients of {name} without {', '.join(map(str, unused))}"

    # --- passes

    @contextlib.contextmanager
    def watched(self, kind: str) -> Iterator[None]:
        """Compare the events of the body, a pass of this kind ("training"), with earlier passes and other ranks."""
        if self._place is not None:
            # An overridden hook that calls `super()` enters the context twice.
            yield
            return
        self._place = (kind, 0, "")
        try:
            yield
            self._pass(_END)
        finally:
            self._place = None

    def _pass(self, event: str) -> None:
        assert self._place is not None
        kind, number, _ = self._place
        known = self._known.setdefault(self._place, [])
        # One known event, and this is it: the other ranks compare it in the same way. With several, ranks could choose
        # different ones, so they compare each time.
        if known != [event]:
            self._compare(kind, event, known[0] if len(known) == 1 else None)
        if event not in known:
            known.append(event)
        self._place = (kind, number + 1, event)

    def _compare(self, kind: str, event: str, expected: str | None) -> None:
        """Raise ValueError if ranks differ; with `expected`, the other ranks may have gone that way, and never answer."""
        digest = int.from_bytes(hashlib.sha256(event.encode()).digest()[:7], "big")
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        if expected is None:
            work.wait()
        else:
            self._wait_briefly(work, kind, event, expected)
        if extremes[0] != -extremes[1]:
            _refuse(kind, Peers(self._group).gather(event))

    def _wait_briefly(self, work: Any, kind: str, event: str, expected: str) -> None:
        try:
            work.wait(timedelta(seconds=WAIT_SECONDS))
        except RuntimeError as lost:
            # The other ranks wait for shards. They raise this error when this rank has closed its connections.
            raise ValueError(
                f"Rank {dist.get_rank()} came to {event} in {kind}, where all ranks came to {expected} in earlier "
                f"passes, and in {WAIT_SECONDS:g} seconds the other ranks did not come to the same. FSDP2 ranks exchange "
                f"shards in one common order. {_remedy(event, expected)}"
            ) from lost

    # --- unused parameters

    def forget_unused(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Set the gradients of parameters that no rank has used to None, as on one device; collective.

        `add_up` sums over ranks by messages between hosts, so no host waits for a device.
        """
        used, self._used = self._used, set()
        if not self._finds_unused:
            return
        parameters = [one for group in self._groups for one in group.fsdp_params]
        # Not in the group of comparisons, where a rank that has left the order may wait.
        flags = torch.tensor([id(one) in used for one in parameters], dtype=torch.int64, device="cpu")
        for one, num_users in zip(parameters, add_up(flags).tolist(), strict=True):
            if not num_users:
                one.sharded_param.grad = None


def _refuse(kind: str, events: list[str]) -> NoReturn:
    """Raise ValueError with the events of the ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, event in enumerate(events):
        ranks.setdefault(event, []).append(str(rank))
    listed = "; ".join(f"rank {', '.join(numbers)}: {event}" for event, numbers in ranks.items())
    raise ValueError(
        f"Ranks came to different parts of the model in {kind}: {listed}. FSDP2 ranks exchange shards in one "
        f"common order. {_remedy(*ranks)}"
    )


def _remedy(*events: str) -> str:
    """Return the remedy: another one if ranks differ only in the parameters without a gradient."""
    differs_in_parameters = len({event.partition(" without ")[0] for event in events}) == 1
    return _REMEDY_FOR_PARAMETERS if differs_in_parameters else _REMEDY
