"""DataloaderDispatcher: one rank iterates over the dataloader and sends each batch to the ranks that train on it.

Invariants: all ranks see the same number of rounds and the same end or error, and the saved position is behind the last
batch that the loop received, however far the reader has prefetched. `ParallelLoading` builds the dispatcher.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from forgather.ml.distributed.agreement import DistributedError, Peers
from forgather.ml.distributed.groups import new_group
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.distributed.rank_messages import decode, encode
from forgather.ml.trainer.loading.batch_transport import make_receiver, make_sender
from forgather.ml.trainer.loading.copy_streams import can_pin
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
    """Properties of the dataloader that the reading rank broadcasts."""

    num_batches: int | None
    position: Mapping[str, Any] | None
    goes_on: bool


class DataloaderDispatcher:
    """Dataloader that the first rank of the mesh reads for all. Other ranks may pass None as `dataloader`.

    On a one-dimensional mesh, `dp_mesh_dim=0` sends each rank a different batch, and None sends all ranks the same
    batch. On a two-dimensional mesh, `dp_mesh_dim` is the data-parallel dimension. The ranks along the other dimension
    get the same batch. If fewer batches than data-parallel ranks are left, the other ranks get an `EmptyBatch`. With
    `drop_last` these batches are dropped.

    A background thread prefetches: it reads, packs and sends at most `prefetch` rounds ahead. A round that takes less
    than `slow_seconds` does not pay for a thread: then one round is read ahead in the calling thread. If reading draws
    random numbers in this process, nothing is read ahead, because they must be drawn at the same point of every run.

    Ranks that do not read receive batches in pinned memory if `pin_memory` is True, or if `device` is an accelerator.

    `links` connect the ranks of the mesh. Nothing else may use them during a pass. By default, new links are created.
    Most methods are collectives. The exceptions are `state_dict`, `abandon`, and `load_state_dict` outside a pass.
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
        pin_memory: bool | None = None,
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
        # With use_local_synchronization only the members create the group. Torch names such a group after the number
        # of groups that each member has created, which may differ. It is used only if the mesh is not the full job.
        is_alone = len(ranks) < dist.get_world_size()
        self._links = links or RankLinks.connect(new_group(ranks, backend="gloo", use_local_synchronization=is_alone))
        pins_memory = can_pin(self._device) if pin_memory is None else pin_memory
        self._sender = make_sender(self._links, self._parts) if self._reads else None
        self._receiver = None if self._reads else make_receiver(self._links, self._source, pins_memory)
        self._peers = Peers(self._links.group)
        self._reader: QuickReader | ThreadedReader | None = None
        self._pass_is_open = False
        self._read_ahead = False
        self._loader_is_ahead = False
        self._position: Mapping[str, Any] | None = None
        self._num_batches: int | None = None
        self._goes_on = False
        self._exchange_facts()

    # --- properties

    @property
    def dataloader(self) -> Iterable[Any] | None:
        return self._dataloader

    @property
    def num_batches(self) -> int | None:
        """Number of rounds in a pass; None if unknown."""
        if self._num_batches is None:
            return None
        whole, rest = divmod(self._num_batches, len(self._parts))
        has_rest = rest > 0 and not self._drop_last
        return whole + 1 if has_rest else whole

    @property
    def goes_on(self) -> bool:
        """Whether a second iterator resumes where the first was left."""
        return self._goes_on

    def __bool__(self) -> bool:
        # Without this, `if loader` would call `__len__`, which raises if the length is unknown.
        return True

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(
                f"The length of {type(self._dataloader).__name__} is unknown, so its dispatcher has no length either."
            )
        return self.num_batches

    def __getattr__(self, name: str) -> Any:
        # Private names are not delegated: a look-up of `_dataloader` before `__init__` sets it would recurse without end.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataloader, name)

    # --- position

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the position behind the last batch that the loop received. It is independent of the number of ranks."""
        return self._position

    def check_state_dict(self, state: object) -> None:
        """Raise if the dataloader cannot use the position. Only the reading rank can check it."""
        if self._reads:
            check_position(self._dataloader, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position. Ranks that do not read only store it."""
        self.check_state_dict(state)
        self._leave()
        if self._reads and is_stateful(self._dataloader):
            self._dataloader.load_state_dict(state)
        self._position, self._loader_is_ahead = state, False

    def set_epoch(self, epoch: int) -> None:
        self._leave()
        self._exchange_facts(epoch)

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        self._leave()
        self._pass_is_open, self._read_ahead = True, False
        rounds = self._read() if self._reads else self._receive()
        for message in rounds:
            if message.kind is Kind.ERROR:
                assert isinstance(message.content, tuple), "the fields of an error"
                raise DistributedError(*message.content)
            # Each message carries the position, so that `state_dict` works on every rank without a collective.
            self._position = message.position
            if message.kind is Kind.END:
                return
            yield moved(message.content, self._device)

    def close(self) -> None:
        """End the pass on all ranks, and close the dataloader; collective."""
        self._leave()
        self._close_loader()

    def abandon(self) -> None:
        """Close without the other ranks, after an error. Some of them may have exited."""
        self._pass_is_open = False
        self._links.close()
        if self._reader is None:
            self._close_loader()
        else:
            self._reader.request_end()
            # The reader may be blocked in a read, or in a send to a rank that has exited. Joining it here could hang.
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
        """Finish a pass that the loop has left early. Batches sent ahead are received and discarded; collective."""
        if not self._pass_is_open:
            return
        self._pass_is_open = False
        if not self._reads:
            # Drain up to the final message. Otherwise the next pass would receive batches of this one.
            while self._received().kind is Kind.BATCH:
                pass
            return
        has_ended = self._end_reader()
        assert self._sender is not None
        if not has_ended:
            # The other ranks receive until they see the end of the pass (see above).
            self._sender.send(self._same_for_all(Message(Kind.LEFT, None, None)).packed)
        self._sender.flush()
        self._loader_is_ahead = self._read_ahead

    def _end_reader(self) -> bool:
        """Join the reader, if any, and return whether it has sent the last message of the pass."""
        reader, self._reader = self._reader, None
        return reader is not None and reader.end()

    def _go_back(self) -> None:
        """Rewind a dataloader that resumes where it was left: its prefetched batches were never handed out."""
        if self._loader_is_ahead and self._goes_on:
            # The workers are ahead as well, so they have to be stopped before the position is set.
            self._close_loader()
            assert is_stateful(self._dataloader) and self._position is not None, "it resumes from a state"
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
        kind, content, position = decode(self._receiver.receive())
        message = Message(Kind(kind), content, position)
        if message.kind is Kind.BATCH:
            # Post the next receive now, so that it runs while this rank trains.
            self._receiver.expect_more()
        return message

    def _read(self) -> Iterator[Message]:
        """Yield this rank's message of each round, after sending the round to the other ranks."""
        assert self._sender is not None
        rounds = self._rounds()
        # Reading ahead moves random draws of the dataset before draws of the step, such as dropout. The generators that
        # a checkpoint stores would then be ahead of its data position, and a resumed run would draw other numbers. So
        # prefetch starts only once a round has been read without a draw. The first round cannot show that: a DataLoader
        # draws its base seed when a pass begins. Both rounds are read in this thread, because the first starts the
        # worker processes, which must not happen in a background thread.
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
            # The reader has already sent these rounds.
            for one in self._reader:
                yield self._taken(one)
            return
        for one in rounds:
            self._sender.send(one.packed)
            yield self._taken(one)

    def _taken(self, one: Round) -> Message:
        """Return this rank's message of a round, and close the pass after the last round."""
        if one.is_last:
            assert self._sender is not None
            self._pass_is_open = False
            self._end_reader()
            # An error may have struck after some batches of the round were read.
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
                # Pad the last round: every rank must take part in its collectives, with or without a batch.
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
        """Pack the messages of a round for the ranks that do not read."""
        # All are packed before any is sent. If one fails, the error message can still be sent to every rank instead.
        has_others = [number > 0 or len(ranks) > 1 for number, ranks in enumerate(self._parts)]
        packed = [
            encode((one.kind.value, one.content, one.position)) if needed else None
            for one, needed in zip(messages, has_others, strict=True)
        ]
        return Round(messages[0], packed)

    def _same_for_all(self, message: Message) -> Round:
        return self._packed([message] * len(self._parts))

    # --- dataloader properties

    def _exchange_facts(self, epoch: int | None = None) -> None:
        """Start `epoch`, if given, and broadcast length and position of the dataloader; collective."""
        facts: _Facts | None = None
        with self._peers.agreement("preparing a pass over the data"):
            if epoch is not None and self._dataloader is not None and hasattr(self._dataloader, "set_epoch"):
                self._go_back()
                self._dataloader.set_epoch(epoch)
            if self._reads:
                # After a prefetch, the dataloader's own position is ahead of the last batch handed out.
                position = self._position if self._loader_is_ahead else self._loader_position()
                facts = _Facts(_num_batches_of(self._dataloader), position, goes_on(self._dataloader))
        facts = self._peers.broadcast(facts, dist.get_group_rank(self._links.group, self._source))
        assert facts is not None, "the reading rank has some"
        self._num_batches, self._position, self._goes_on = facts

    def _loader_position(self) -> dict[str, Any] | None:
        return kept_state(self._dataloader) if is_stateful(self._dataloader) else None


def _data_parallel_parts(mesh: DeviceMesh, dp_mesh_dim: int | None) -> list[list[int]]:
    """Return, for each batch of a round, the ranks that receive it. The first group has the first rank of the mesh."""
    allowed = {1: (0, None), 2: (0, 1)}
    if dp_mesh_dim not in allowed.get(mesh.ndim, ()):
        raise ValueError(
            f"A mesh of {mesh.ndim} dimension(s) cannot be used with dp_mesh_dim={dp_mesh_dim!r}. For a 1-D mesh, set "
            "dp_mesh_dim to 0 (a different batch for each rank) or None (the same batch for all ranks). For a 2-D mesh, "
            "set it to the data-parallel dimension, 0 or 1."
        )
    if dp_mesh_dim is None:
        return [mesh.mesh.tolist()]
    return [part.flatten().tolist() for part in mesh.mesh.unbind(dp_mesh_dim)]


def _num_batches_of(dataloader: object) -> int | None:
    if hasattr(dataloader, "num_batches"):
        num_batches: int | None = dataloader.num_batches
        return num_batches
    return length_of(dataloader)
