"""Staged snapshots: a snapshot with copies of its tensors instead of the live ones, so that training may continue.

A tensor is copied with its full storage, so the files have the same bytes as without staging. With less staging memory
than state, the tensors that are written first stay live, and `LiveReads` tells when the save has read them. State that a
forward pass may change, such as running statistics, is copied first. `BackgroundSaves` stages every snapshot on the
training thread.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.checkpoint.background.arena import StagingArena, aligned, copy_on_host
from forgather.ml.checkpoint.background.comparison import ComparedState, Comparison
from forgather.ml.checkpoint.background.live_reads import LiveReads, MemoryRange
from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.encoding.digest import iter_leaves
from forgather.ml.checkpoint.files.planned_file import Content, PlannedFile, StateContent, WeightsContent
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.checkpoint.snapshot import Snapshot
from forgather.ml.checkpoint.weights.safetensors_io import names_in_file

_Key = tuple[object, ...]


class _Piece(NamedTuple):
    """Memory to copy: the bytes of a storage, or a tensor that is a part of one."""

    key: _Key
    source: Tensor

    @property
    def num_bytes(self) -> int:
        return self.source.nbytes

    @property
    def storage(self) -> int:
        return int(self.source.untyped_storage()._cdata)


@dataclass(frozen=True)
class StagedSnapshot:
    """Snapshot that does not depend on live tensors once `reads` is done and `arrive` has returned."""

    snapshot: Snapshot
    reads: LiveReads
    num_live_bytes: int
    """Bytes of the tensors that were not copied."""
    may_continue: bool
    """Whether training may compute gradients before `reads` is done."""
    arrive: Callable[[], None]
    """Wait until copies from an accelerator are complete. Called in the background."""


def needed_bytes(snapshot: Snapshot) -> int:
    """Return the staging memory that a full copy of the tensors of this rank takes."""
    pieces = {piece.key: piece for _, piece in _pieces_of(snapshot)}
    return sum(aligned(piece.num_bytes) for piece in pieces.values())


def stage(
    snapshot: Snapshot,
    arena: StagingArena,
    limit: int,
    updated: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
) -> StagedSnapshot:
    """Copy the tensors of a snapshot into the arena, at most `limit` bytes of them, and return the staged snapshot.

    `updated` are the storages that only an optimizer step changes. `check` raises if one has changed; see `LiveReads`.
    """
    pieces = list(_pieces_of(snapshot))
    chosen = _chosen(pieces, limit, updated)
    arena.reserve(sum(aligned(piece.num_bytes) for piece in chosen))
    storages: dict[_Key, torch.UntypedStorage] = {}
    offset = 0
    for piece in chosen:
        storages[piece.key] = arena.region(offset, piece.num_bytes)
        offset += aligned(piece.num_bytes)
    arrive = _copy([(_bytes_in(storages[piece.key]), piece.source) for piece in chosen])
    live = {piece.key: piece for _, piece in pieces if piece.key not in storages}
    reads = _live_reads(snapshot, pieces, storages, check)
    return StagedSnapshot(
        _staged(snapshot, storages, reads),
        reads,
        num_live_bytes=sum(piece.num_bytes for piece in live.values()),
        may_continue=all(piece.storage in updated for piece in live.values()),
        arrive=arrive,
    )


def _chosen(pieces: Sequence[tuple[int | None, _Piece]], limit: int, updated: Collection[int]) -> list[_Piece]:
    """Return the pieces to copy: state that training changes early, then from the end of the save.

    The pieces that stay live are read in the order of the save, so they are the first ones.
    """
    chosen: dict[_Key, _Piece] = {}
    by_key = {piece.key: piece for _, piece in reversed(pieces)}
    early = [piece for piece in by_key.values() if piece.storage not in updated]
    if sum(aligned(piece.num_bytes) for piece in early) > limit:
        # Training has to wait in any case, and the wait is the shortest if the copies are at the end of the save.
        early = []
    left = limit
    for piece in (*early, *by_key.values()):
        if piece.key in chosen:
            continue
        left -= aligned(piece.num_bytes)
        if left < 0:
            break
        chosen[piece.key] = piece
    return list(chosen.values())


def _pieces_of(snapshot: Snapshot) -> Iterator[tuple[int | None, _Piece]]:
    """Yield the memory that the save reads, in its order, with the index of the file; None for shards."""
    if snapshot.exchange is not None:
        for key, source in snapshot.exchange.sources_by_round():
            if source.nbytes:
                yield None, _Piece(("shard", key), source)
    for number, file in enumerate(snapshot.files):
        for tensor in _tensors_in(file.content):
            piece = _piece_of(tensor, isinstance(file.content, WeightsContent))
            if piece is not None:
                yield number, piece


def _tensors_in(content: Content) -> list[Tensor]:
    """Return the tensors that a file contains in full, in the order of the file."""
    if isinstance(content, WeightsContent):
        return [content.tensors[name] for name in names_in_file(content.tensors)]
    if isinstance(content, StateContent):
        return [leaf for _, leaf in iter_leaves(content.encoded) if isinstance(leaf, Tensor)]
    return []


def _piece_of(tensor: Tensor, is_weight: bool) -> _Piece | None:
    """Return the memory behind a tensor; None if it has none, is sharded, or is copied by `_clone`."""
    if is_special(tensor) or not tensor.nbytes:
        return None
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
    if is_weight and not is_whole:
        # Weight files contain tensors, not storages. The rest of a large storage needs no copy.
        return _Piece(_view_key(tensor), tensor.detach())
    return _Piece(("storage", storage._cdata), _bytes_in(storage))


def _view_key(tensor: Tensor) -> _Key:
    return "view", tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def is_special(tensor: Tensor) -> bool:
    """Return whether a tensor is not plain memory: sharded, sparse, nested, lazily conjugated, without values."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return True
    return tensor.is_conj() or tensor.is_neg()


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Copy (target bytes, source) pairs; return a function that waits for the copies from accelerators."""
    plain: list[tuple[Tensor, Tensor]] = []
    on_devices: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for target, source in copies:
        if source.device.type != "cpu":
            on_devices.setdefault(source.device, []).append((target, source))
        elif source.dtype is torch.uint8 and source.is_contiguous():
            plain.append((target, source.view(-1)))
        else:
            target.view(source.dtype).view(source.shape).copy_(source)
    # Devices first: they copy while the host copies its own tensors.
    events = [_copy_from(device, pairs) for device, pairs in on_devices.items()]
    copy_on_host(plain)

    def arrive() -> None:
        for event in events:
            if event is not None:
                event.synchronize()
        # The sources must live until here: the allocator could give their memory to training.
        on_devices.clear()

    return arrive


def _copy_from(device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.Event | None:
    """Queue copies from a device, without a wait of the host; later kernels of training wait for them."""
    if device.type == "mps":
        for target, source in pairs:
            target.view(source.dtype).view(source.shape).copy_(source)
        return None
    stream, training = torch.Stream(device), torch.accelerator.current_stream(device)
    stream.wait_stream(training)
    with stream:
        for target, source in pairs:
            target.view(source.dtype).view(source.shape).copy_(source.contiguous(), non_blocking=True)
        event: torch.Event = stream.record_event()
    training.wait_event(event)
    return event


def _live_reads(
    snapshot: Snapshot,
    pieces: Sequence[tuple[int | None, _Piece]],
    storages: Mapping[_Key, torch.UntypedStorage],
    check: Callable[[], None],
) -> LiveReads:
    files: dict[int, list[MemoryRange]] = {}
    inexact: set[int] = set()
    shards = {piece.key[1] for _, piece in pieces if piece.key[0] == "shard" and piece.key not in storages}
    for number, piece in pieces:
        if number is None or piece.key in storages:
            continue
        files.setdefault(number, []).append(_range_of(piece.source))
        if piece.source.device.type != "cpu" or not piece.source.is_contiguous():
            inexact.add(number)
    num_rounds = 0 if snapshot.exchange is None else snapshot.exchange.rounds_with(shards)
    return LiveReads({number: [] if number in inexact else found for number, found in files.items()}, num_rounds, check)


def _range_of(source: Tensor) -> MemoryRange:
    return MemoryRange(source.data_ptr(), source.data_ptr() + source.nbytes)


def _staged(snapshot: Snapshot, storages: Mapping[_Key, torch.UntypedStorage], reads: LiveReads) -> Snapshot:
    files = [replace(file, content=_staged_content(file, storages)) for file in snapshot.files]
    if snapshot.exchange is not None:
        shards = {str(key[1]): _bytes_in(one) for key, one in storages.items() if key[0] == "shard"}
        snapshot.exchange.stage(shards, reads.note_round)
    comparison = snapshot.comparison
    if comparison is not None:
        comparison = Comparison([_staged_or_digested(one, storages) for one in comparison.states])
    return replace(snapshot, files=files, reads=reads, comparison=comparison)


def _staged_or_digested(compared: ComparedState, storages: Mapping[_Key, torch.UntypedStorage]) -> ComparedState:
    """Return the copies of a compared state, or its digests if this rank does not copy all of it."""
    is_weights = compared.key == MODEL_KEY
    leaves = [leaf for _, leaf in iter_leaves(compared.state) if isinstance(leaf, Tensor)]
    pieces = [_piece_of(leaf, is_weights) for leaf in leaves if leaf.numel()]
    if any(piece is None or piece.key not in storages for piece in pieces):
        return compared.digested()
    return replace(compared, state=with_copies(compared.state, lambda one: _replaced(one, storages, is_weights)))


def _staged_content(file: PlannedFile, storages: Mapping[_Key, torch.UntypedStorage]) -> Content:
    content = file.content
    if isinstance(content, WeightsContent):
        return replace(content, tensors={name: _replaced(one, storages, True) for name, one in content.tensors.items()})
    if isinstance(content, StateContent):
        # Equal objects stay equal, because pickle writes a repeated object as a reference.
        copies: dict[int, Tensor] = {}

        def copy_of(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _replaced(tensor, storages, False)
            return copies[id(tensor)]

        return StateContent(with_copies(content.encoded, copy_of), is_staged=True)
    return content


def with_copies(node: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """Return an encoded state (plain dicts, lists and tuples) with other tensors."""
    if isinstance(node, dict):
        return {name: with_copies(part, copy_of) for name, part in node.items()}
    if type(node) in (list, tuple):
        return type(node)(with_copies(part, copy_of) for part in node)
    return copy_of(node) if isinstance(node, Tensor) else node


def _replaced(tensor: Tensor, storages: Mapping[_Key, torch.UntypedStorage], is_weight: bool) -> Tensor:
    """Return the copy of a tensor; the tensor itself if it stays live or its content comes from the exchange."""
    if is_sharded(tensor) or tensor.is_meta:
        return tensor
    if is_special(tensor):
        return tensor.detach().clone()
    piece = _piece_of(tensor, is_weight)
    if piece is None or piece.key not in storages:
        return tensor
    copy = torch.empty(0, dtype=tensor.dtype)
    if piece.key[0] == "view":
        return copy.set_(storages[piece.key]).view(tensor.shape)
    return copy.set_(storages[piece.key], tensor.storage_offset(), tensor.shape, tensor.stride())
