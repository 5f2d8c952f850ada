"""One rank reads for all: every batch goes to the rank, or the group of ranks, that trains on it."""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from forgather.ml.distributed.agreement import DistributedError, Peers
from forgather.ml.distributed.environment import get_requested_timeout
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.trainer.loading.batch_messages import decode, encode
from forgather.ml.trainer.loading.batch_transport import make_receiver, make_sender
from forgather.ml.trainer.loading.data_order import (
    check_position,
    goes_on,
    is_stateful,
    kept_state,
)
from forgather.ml.trainer.loading.empty_batch import emptied
from forgather.ml.trainer.loading.epoch_loader import length_of
from forgather.ml.trainer.loading.random_numbers import draws_random_numbers
from forgather.ml.trainer.loading.round_readers import Kind, Message, QuickReader, Round, ThreadedReader
from forgather.ml.trainer.setup.devices import moved

_DURING = "loading a batch"


class _Facts(NamedTuple):
    """What every rank knows of the loader."""

    num_batches: int | None
    position: Mapping[str, Any] | None
    goes_on: bool


class DataloaderDispatcher:
    """The first rank of the mesh iterates over `dataloader`; the others receive from it and need none.

    A mesh of one dimension with `dp_mesh_dim=0` gives each rank a batch of its own, with None all ranks the same. Of two
    dimensions `dp_mesh_dim` is the data-parallel one, and the ranks along the other get the same batch. When fewer
    batches than ranks are left, the ranks without one get an `EmptyBatch`, or, with `drop_last`, the rest is dropped.

    Batches are read, packed and sent ahead in a background thread, `prefetch` rounds at most. If a round is read in less
    than `slow_seconds`, a thread would cost more than it saves, and one round is read ahead without it. If reading draws
    random numbers in this process nothing is: those must be drawn at the same point of training in every run. `links`
    connect the ranks of the mesh, and nothing else uses them meanwhile; without any it makes its own. All methods but
    `state_dict`, `load_state_dict` outside a pass, and `abandon` are for all ranks together.
    """

    def __init__(
        self,
        dataloader: Iterable[Any] | None,
        mesh: DeviceMesh,
        device: torch.device | str,
        dp_mesh_dim: int | None = 0,
        *,
        drop_last: bool = False,
        prefetch: int = 2,
        slow_seconds: float = 0.002,
        links: RankLinks | None = None,
    ) -> None:
        self._dataloader = dataloader
        self._device = torch.device(device)
        self._drop_last = drop_last
        self._prefetch = prefetch
        self._slow_seconds = slow_seconds
        self._parts = _data_parallel_parts(mesh, dp_mesh_dim)
        self._source = int(mesh.mesh.flatten()[0])
        self._reads = dist.get_rank() == self._source
        ranks = mesh.mesh.flatten().tolist()
        # By its members alone only where there are others: such groups need ranks that have made equally many before.
        is_alone = len(ranks) < dist.get_world_size()
        self._links = links or RankLinks.connect(
            dist.new_group(ranks, backend="gloo", timeout=get_requested_timeout(), use_local_synchronization=is_alone)
        )
        self._sender = make_sender(self._links, self._parts) if self._reads else None
        self._receiver = None if self._reads else make_receiver(self._links, self._source, self._device)
        self._peers = Peers(self._links.group)
        self._reader: QuickReader | ThreadedReader | None = None
        self._pass_is_open = False
        self._read_ahead = False
        self._loader_is_ahead = False
        self._position: Mapping[str, Any] | None = None
        self._num_batches: int | None = None
        self._goes_on = False
        self._exchange_facts()

    # --- what it knows

    @property
    def dataloader(self) -> Iterable[Any] | None:
        return self._dataloader

    @property
    def num_batches(self) -> int | None:
        """Steps of a pass; None when unknown."""
        if self._num_batches is None:
            return None
        whole, rest = divmod(self._num_batches, len(self._parts))
        has_rest = rest > 0 and not self._drop_last
        return whole + 1 if has_rest else whole

    @property
    def goes_on(self) -> bool:
        """Whether a second pass goes on where the first was left."""
        return self._goes_on

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(
                f"The length of {type(self._dataloader).__name__} is unknown, and so is that of its dispatcher."
            )
        return self.num_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataloader, name)

    # --- position

    def state_dict(self) -> Mapping[str, Any] | None:
        """The position behind the last batch that the loop got; it does not depend on the number of ranks."""
        return self._position

    def check_state_dict(self, state: object) -> None:
        """Raise for a position that the loader cannot use; the rank that reads knows."""
        if self._reads:
            check_position(self._dataloader, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position; the ranks that do not read remember it only."""
        self.check_state_dict(state)
        self._leave()
        if self._reads and is_stateful(self._dataloader):
            self._dataloader.load_state_dict(state)
        self._position, self._loader_is_ahead = state, False

    def set_epoch(self, epoch: int) -> None:
        self._leave()
        self._exchange_facts(epoch)

    # --- a pass

    def __iter__(self) -> Iterator[Any]:
        self._leave()
        self._pass_is_open, self._read_ahead = True, False
        rounds = self._read() if self._reads else self._receive()
        for message in rounds:
            if message.kind is Kind.ERROR:
                assert isinstance(message.content, tuple), "the fields of an error"
                raise DistributedError(*message.content)
            self._position = message.position
            if message.kind is Kind.END:
                return
            yield moved(message.content, self._device)

    def close(self) -> None:
        """End the pass on all ranks, and the loader."""
        self._leave()
        self._close_loader()

    def abandon(self) -> None:
        """End without the other ranks, of which some may be gone."""
        self._pass_is_open = False
        self._links.close()
        if self._reader is None:
            self._close_loader()
        else:
            self._reader.request_end()
            # It may be reading, or waiting for a rank that is gone.
            threading.Thread(
                target=self._close_after, args=(self._reader,), name="batch-reader-end", daemon=True
            ).start()

    def _close_after(self, reader: "QuickReader | ThreadedReader") -> None:
        reader.end()
        self._close_loader()

    def _close_loader(self) -> None:
        if self._dataloader is not None and hasattr(self._dataloader, "close"):
            self._dataloader.close()

    def _leave(self) -> None:
        """Finish a pass that the loop has left: whatever was sent ahead is received and thrown away."""
        if not self._pass_is_open:
            return
        self._pass_is_open = False
        if not self._reads:
            while self._received().kind is Kind.BATCH:
                pass
            return
        has_ended = self._end_reader()
        assert self._sender is not None
        if not has_ended:
            self._sender.send(self._same_for_all(Message(Kind.LEFT, None, None)).packed)
        self._sender.flush()
        self._loader_is_ahead = self._read_ahead

    def _end_reader(self) -> bool:
        """Wait for the thread, if there is one; returns whether it has sent the last message of the pass."""
        reader, self._reader = self._reader, None
        return reader is not None and reader.end()

    def _go_back(self) -> None:
        """Batches that were read and not handed out are yet to come for a loader that goes on where it was left."""
        if self._loader_is_ahead and self._goes_on:
            self._close_loader()
            assert is_stateful(self._dataloader) and self._position is not None, "it goes on from a state"
            self._dataloader.load_state_dict(self._position)
        self._loader_is_ahead = False

    def _receive(self) -> Iterator[Message]:
        while True:
            message = self._received()
            if message.kind is not Kind.BATCH:
                self._pass_is_open = False
            yield message

    def _received(self) -> Message:
        assert self._receiver is not None
        content, (kind, position) = decode(self._receiver.receive())
        message = Message(Kind(kind), content, position)
        if message.kind is Kind.BATCH:
            self._receiver.expect_more()
        return message

    def _read(self) -> Iterator[Message]:
        """This rank's part of each round, which is sent to the others as soon as it is read."""
        assert self._sender is not None
        rounds = self._rounds()
        # Two of them here and not in the thread, which must not start processes; the first comes with what a loader
        # draws when a pass begins, the second shows whether reading draws random numbers.
        first = next(rounds)
        self._sender.send(first.packed)
        yield self._taken(first)
        started = time.perf_counter()
        with draws_random_numbers() as has_drawn:
            second = next(rounds)
        is_slow = time.perf_counter() - started >= self._slow_seconds
        self._sender.send(second.packed)
        self._read_ahead = self._prefetch > 0 and not second.is_last and not has_drawn()
        if self._read_ahead:
            reader = ThreadedReader(rounds, self._sender, self._prefetch) if is_slow else None
            self._reader = reader or QuickReader(rounds, self._sender)
        yield self._taken(second)
        yield from self._read_rest(rounds)

    def _read_rest(self, rounds: Iterator[Round]) -> Iterator[Message]:
        assert self._sender is not None
        if self._reader is not None:
            # It sends what it reads.
            for one in self._reader:
                yield self._taken(one)
            return
        for one in rounds:
            self._sender.send(one.packed)
            yield self._taken(one)

    def _taken(self, one: Round) -> Message:
        """This rank's part of a round."""
        if one.is_last:
            assert self._sender is not None
            self._pass_is_open = False
            self._end_reader()
            # An error may come after the first batches of a round.
            self._loader_is_ahead = one.own.kind is Kind.ERROR
            self._sender.flush()
        return one.own

    def _rounds(self) -> Iterator[Round]:
        size = len(self._parts)
        try:
            self._go_back()
            assert self._dataloader is not None, "this rank reads"
            iterator = iter(self._dataloader)
            while batches := list(itertools.islice(iterator, size)):
                if len(batches) < size:
                    if self._drop_last:
                        break
                    batches += [emptied(batches[0])] * (size - len(batches))
                position = self._loader_position()
                yield self._packed([Message(Kind.BATCH, batch, position) for batch in batches])
            last = self._same_for_all(Message(Kind.END, None, self._loader_position()))
        except Exception as error:  # noqa: BLE001 - sent to every rank, this one included, and raised there
            report = DistributedError.describing(error, _DURING, dist.get_rank())
            last = self._same_for_all(Message(Kind.ERROR, report.args, None))
        yield last

    def _packed(self, messages: list[Message]) -> Round:
        """All of them before any is sent: what cannot be packed is an error that all ranks can still be told of."""
        has_others = [number > 0 or len(ranks) > 1 for number, ranks in enumerate(self._parts)]
        packed = [
            encode(one.content, (one.kind.value, one.position)) if needed else None
            for one, needed in zip(messages, has_others, strict=True)
        ]
        return Round(messages[0], packed)

    def _same_for_all(self, message: Message) -> Round:
        return self._packed([message] * len(self._parts))

    # --- facts

    def _exchange_facts(self, epoch: int | None = None) -> None:
        """Start an epoch, if given, and tell all ranks what has become of the loader."""
        facts: _Facts | None = None
        with self._peers.agreement("preparing a pass over the data"):
            if epoch is not None and self._dataloader is not None and hasattr(self._dataloader, "set_epoch"):
                self._go_back()
                self._dataloader.set_epoch(epoch)
            if self._reads:
                position = self._position if self._loader_is_ahead else self._loader_position()
                facts = _Facts(_num_batches_of(self._dataloader), position, goes_on(self._dataloader))
        facts = self._peers.broadcast(facts, dist.get_group_rank(self._links.group, self._source))
        assert facts is not None, "the reading rank has some"
        self._num_batches, self._position, self._goes_on = facts

    def _loader_position(self) -> dict[str, Any] | None:
        return kept_state(self._dataloader) if is_stateful(self._dataloader) else None


def _data_parallel_parts(mesh: DeviceMesh, dp_mesh_dim: int | None) -> list[list[int]]:
    """The ranks that get the same batch, for each batch of a round; the first rank of the mesh is in the first."""
    allowed = {1: (0, None), 2: (0, 1)}
    if dp_mesh_dim not in allowed.get(mesh.ndim, ()):
        raise ValueError(
            f"A mesh of {mesh.ndim} dimension(s) with dp_mesh_dim={dp_mesh_dim!r} cannot be dispatched to: give a mesh of "
            "one dimension with dp_mesh_dim 0 (each rank a batch of its own) or None (all ranks the same batch), or of two "
            "dimensions with dp_mesh_dim 0 or 1, the data-parallel one."
        )
    if dp_mesh_dim is None:
        return [mesh.mesh.tolist()]
    return [part.flatten().tolist() for part in mesh.mesh.unbind(dp_mesh_dim)]


def _num_batches_of(dataloader: object) -> int | None:
    if hasattr(dataloader, "num_batches"):
        num_batches: int | None = dataloader.num_batches
        return num_batches
    return length_of(dataloader)
