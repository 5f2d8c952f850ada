"""Forward-only passes of micro-batches through a pipeline: evaluation, generation and shape discovery.

Every rank has the full batch, so all ranks agree on which shapes are new. For a new shape, each stage sends a header
with the shapes and dtypes of its outputs ahead of the first micro-batch. Used by `StageRunner`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.trainer.pipeline.pipeline_batches import Meta, Metas, Signature

Outputs = tuple[Tensor, ...]
Consume = Callable[[int, Any], None]

# Headers contain an index into this table, so its order must be equal on all ranks.
_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_DIMENSIONS = 8
_MOST_TENSORS = 8
# Bounds the table of shapes for data with ever new sequence lengths.
_SHAPES_KNOWN = 4096
# The header has a fixed length, because the receiver allocates it before it knows the number of tensors. It contains
# that number, then for each tensor the dtype, the number of dimensions, and the shape padded with zeros.
_HEADER_LENGTH = 1 + _MOST_TENSORS * (2 + _MOST_DIMENSIONS)


class ForwardOnly:
    """Runner of this rank's stages; all ranks of the group call its methods together.

    `stages` are this rank's modules by stage index. `stage_ranks[i]` is the pipeline rank that holds stage i. `groups`
    are two groups of the same ranks: the first for sends to higher ranks, the second (or None) for sends to lower ranks.
    In a single group that runs in order, as NCCL does, both directions could deadlock. `boundary` returns shape and
    dtype of the tensor between stages for a main input, or None if unknown without running a stage.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_ranks: Sequence[int],
        groups: tuple[ProcessGroup, ProcessGroup | None],
        device: torch.device,
        boundary: Callable[[Tensor], Meta | None] | None = None,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._stage_ranks = stage_ranks
        self._groups = groups
        self._device = device
        self._boundary = boundary
        self._known: dict[Signature, dict[int, Metas]] = {}
        self._sends: deque[tuple[Any, Tensor]] = deque()

    @property
    def num_stages(self) -> int:
        return len(self._stage_ranks)

    def run(
        self,
        inputs: Sequence[Tensor],
        keywords: Sequence[Mapping[str, Any]],
        consume: Consume,
        stage_keywords: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Run micro-batches; on the last stage, `consume` gets the index and the output of each.

        `stage_keywords` are additional keywords for single stages of this rank.
        """
        local: dict[tuple[int, int], Outputs] = {}
        # All micro-batches of a stage run before the next stage, on every rank. So sends and receives match in order.
        for index, stage in self._stages.items():
            own = (stage_keywords or {}).get(index, {})
            for number, (first, words) in enumerate(zip(inputs, keywords, strict=True)):
                metas = self._metas(first, words)
                received = (first,) if index == 0 else self._input_of(index, number, metas, local)
                outputs = stage(*received, **words, **own)
                # Without `del`, tensors would stay allocated until the next micro-batch has replaced them.
                del received
                if index == self.num_stages - 1:
                    consume(number, outputs)
                else:
                    self._hand_on(index, number, _as_tuple(outputs), metas, local)
                del outputs
        while self._sends:
            self._sends.popleft()[0].wait()

    def metas_between(self, inputs: Tensor, keywords: Mapping[str, Any]) -> dict[int, Metas]:
        """Return output shapes and dtypes of the stages that this rank holds or receives from.

        If they are unknown, all ranks run the micro-batch once.
        """
        metas = self._metas(inputs, keywords)
        if any(index not in metas for index in self._needed()):
            last: dict[int, Metas] = {}

            def note(_: int, output: object) -> None:
                last[self.num_stages - 1] = tuple(map(Meta.of, _as_tuple(output)))

            self.run([inputs], [keywords], note)
            metas.update(last)
        return metas

    def _needed(self) -> set[int]:
        return {index - 1 for index in self._stages if index > 0} | {
            index for index in self._stages if index < self.num_stages - 1
        }

    def _metas(self, inputs: Tensor, keywords: Mapping[str, Any]) -> dict[int, Metas]:
        """Return the known output shapes and dtypes for such a micro-batch, by stage."""
        signature = Signature.of(inputs, keywords)
        if signature not in self._known:
            if len(self._known) >= _SHAPES_KNOWN:
                # All ranks have seen the same shapes, so they clear their tables at the same micro-batch. A receiver
                # must expect a header exactly when the sender sends it.
                self._known.clear()
            meta = None if self._boundary is None else self._boundary(inputs)
            stages = range(self.num_stages - 1) if meta is not None else ()
            self._known[signature] = {index: (meta,) for index in stages if meta is not None}
        return self._known[signature]

    def _input_of(
        self, index: int, number: int, metas: dict[int, Metas], local: dict[tuple[int, int], Outputs]
    ) -> Outputs:
        if (index - 1, number) in local:
            return local.pop((index - 1, number))
        source = self._stage_ranks[index - 1]
        # The first micro-batch of a new shape: the header arrives ahead of its tensors.
        if index - 1 not in metas:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
            dist.recv(header, group=self._group_into(index), group_src=source)
            metas[index - 1] = _decoded(header.tolist())
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in metas[index - 1])
        for tensor in tensors:
            dist.recv(tensor, group=self._group_into(index), group_src=source)
        return tensors

    def _hand_on(
        self,
        index: int,
        number: int,
        outputs: Outputs,
        metas: dict[int, Metas],
        local: dict[tuple[int, int], Outputs],
    ) -> None:
        # In a "v", the last rank holds two consecutive stages, which need no message.
        if index + 1 in self._stages:
            metas.setdefault(index, tuple(map(Meta.of, outputs)))
            local[index, number] = outputs
            return
        if index not in metas:
            metas[index] = tuple(map(Meta.of, outputs))
            self._send(torch.tensor(_encoded(metas[index]), dtype=torch.int64, device=self._device), index + 1)
        found = tuple(map(Meta.of, outputs))
        # The receiver has allocated tensors by the recorded shapes, and cannot detect a mismatch.
        if found != metas[index]:
            raise RuntimeError(
                f"Stage {index} returned {found}, but {metas[index]} was expected: shapes and dtypes between stages must "
                "depend only on the shapes and dtypes of the batch."
            )
        for tensor in outputs:
            self._send(tensor.contiguous(), index + 1)

    def _send(self, tensor: Tensor, stage: int) -> None:
        # A tensor must stay alive until its send completes. Release those already done, to bound memory.
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()[0].wait()
        work = dist.isend(tensor, group=self._group_into(stage), group_dst=self._stage_ranks[stage])
        self._sends.append((work, tensor))

    def _group_into(self, stage: int) -> ProcessGroup:
        # By ranks, not by stages: a higher stage can be on a lower rank.
        goes_up = self._stage_ranks[stage] > self._stage_ranks[stage - 1]
        group = self._groups[0] if goes_up else self._groups[1]
        assert group is not None, "sends to lower ranks have a group"
        return group


def _as_tuple(outputs: object) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _encoded(metas: Metas) -> list[int]:
    if len(metas) > _MOST_TENSORS or any(len(meta.shape) > _MOST_DIMENSIONS for meta in metas):
        raise ValueError(
            f"A stage returns {len(metas)} tensors of up to {max(len(meta.shape) for meta in metas)} dimensions; at most "
            f"{_MOST_TENSORS} of {_MOST_DIMENSIONS} can be sent to the next stage."
        )
    unknown = next((meta.dtype for meta in metas if meta.dtype not in _DTYPES), None)
    if unknown is not None:
        raise ValueError(f"A stage returns a tensor of type {unknown}, which cannot be sent to the next stage.")
    numbers = [len(metas)]
    for shape, dtype in metas:
        numbers += [_DTYPES.index(dtype), len(shape), *shape, *[0] * (_MOST_DIMENSIONS - len(shape))]
    return numbers + [0] * (_HEADER_LENGTH - len(numbers))


def _decoded(numbers: Sequence[int]) -> Metas:
    width = 2 + _MOST_DIMENSIONS
    entries = [numbers[1 + place * width : 1 + (place + 1) * width] for place in range(numbers[0])]
    return tuple(Meta(torch.Size(entry[2 : 2 + entry[1]]), _DTYPES[entry[0]]) for entry in entries)
