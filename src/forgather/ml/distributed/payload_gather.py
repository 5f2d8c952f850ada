"""All-gather and broadcast of byte strings. An all-gather sends equal payloads once, and a long one does not pad the others.

`torch.distributed.all_gather_object` pads every payload to the longest. At a thousand ranks, one rank with a megabyte
would make each rank allocate a gigabyte. `Peers.gather` uses this function instead.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup

_BROADCAST_BYTES = 2**14
"""Estimated cost of one broadcast: the number of bytes that an all-gather sends in the same time."""

Head = tuple[int, int, int]
"""Length of a payload, and the two halves of its digest."""


def gather_payloads(payload: bytes, group: ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Return the payloads of all ranks of the group, by rank; equal payloads are one object. Collective."""
    # Every rank sees all heads, so all ranks derive the same broadcasts from them.
    heads = _gather_heads(payload, group, device)
    senders = first_ranks(heads)
    width = padded_width([heads[rank][0] for rank in senders], len(heads))
    rows = _gather_rows(payload, width, len(heads), group, device)
    received: dict[Head, bytes] = {}
    for rank in senders:
        length = heads[rank][0]
        start = rows[rank, :length].numpy().tobytes()
        rest = _broadcast(payload[width:], rank, length - width, group, device) if length > width else b""
        received[heads[rank]] = start + rest
    return [received[head] for head in heads]


def first_ranks(heads: Sequence[Head]) -> list[int]:
    """Return the lowest rank of each distinct payload, in rank order."""
    first: dict[Head, int] = {}
    for rank, head in enumerate(heads):
        first.setdefault(head, rank)
    return list(first.values())


def padded_width(lengths: Sequence[int], num_ranks: int) -> int:
    """Return how many bytes of each payload travel in one padded all-gather; broadcasts send the rest.

    `lengths` are the lengths of the distinct payloads. The width minimises the bytes that each rank receives.
    """
    best, least = 0, sum(lengths) + _BROADCAST_BYTES * len(lengths)
    rest = sum(lengths)
    num_left = len(lengths)
    previous = 0
    # Between two lengths the cost is linear in the width, so the best width is 0 or one of the lengths. Payloads that
    # are longer than the width need one broadcast each for their remaining bytes.
    for width in sorted(lengths):
        rest -= (width - previous) * num_left
        num_left -= 1
        previous = width
        cost = num_ranks * width + rest + _BROADCAST_BYTES * num_left
        if cost < least:
            best, least = width, cost
    return best


def _gather_heads(payload: bytes, group: ProcessGroup | None, device: torch.device) -> list[Head]:
    digest = xxhash.xxh3_128_digest(payload)
    # Signed, because torch has no unsigned 64-bit collectives.
    halves = [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]
    own = torch.tensor([len(payload), *halves], dtype=torch.int64, device=device)
    heads = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(heads.unbind()), own, group=group)
    return [(length, high, low) for length, high, low in heads.tolist()]


def _gather_rows(
    payload: bytes, width: int, num_ranks: int, group: ProcessGroup | None, device: torch.device
) -> Tensor:
    """Return the first `width` bytes of every rank as rows on the CPU; shorter payloads are padded."""
    rows = torch.empty(num_ranks, width, dtype=torch.uint8, device=device)
    if width > 0:
        own = as_tensor(payload[:width].ljust(width, b"\0"), device)
        dist.all_gather(list(rows.unbind()), own, group=group)
    return rows.cpu()


def _broadcast(own: bytes, source: int, length: int, group: ProcessGroup | None, device: torch.device) -> bytes:
    is_source = dist.get_rank(group) == source
    message = as_tensor(own, device) if is_source else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(message, group=group, group_src=source)
    return own if is_source else message.cpu().numpy().tobytes()


def broadcast_payload(payload: bytes, source: int, group: ProcessGroup | None, device: torch.device) -> bytes:
    """Return the payload of rank `source` of the group on every rank; collective."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    return _broadcast(payload, source, int(length.item()), group, device)


def as_tensor(data: bytes, device: torch.device) -> Tensor:
    # `frombuffer` needs a writable buffer, or it warns.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
