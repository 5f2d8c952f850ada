"""SynchronizedDataLoader: each rank reads its own batches, and all ranks stop or fail in the same round.

Invariant: every rank hands out the same number of batches, even if lengths are unknown or unequal. One small all-reduce
per batch carries this agreement and the batch metadata. It overlaps with the previous step. `RankTeam` wraps training
loaders in it and evaluates in `Rounds`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather.ml.distributed.agreement import DistributedError, Peers
from forgather.ml.distributed.groups import get_global_process_group
from forgather.ml.distributed.number_exchange import GroupExchange, NumberExchange
from forgather.ml.trainer.loading.data_order import (
    check_position,
    goes_on,
    is_stateful,
    kept_state,
)
from forgather.ml.trainer.loading.data_types import HasState
from forgather.ml.trainer.loading.random_numbers import draws_random_numbers
from forgather.ml.trainer.setup.devices import moved

_DURING = "loading a batch"
_STEPS_BETWEEN_LOOKS = 64
"""Batches between two checks whether reading draws random numbers. A check per batch would double the loader's cost."""

NOTHING = object()
"""Placeholder item of a rank that has no more data."""

Notes = Callable[[Any], Sequence[int]]
"""Function that returns the metadata of an item (or `NOTHING`): integers to sum over all ranks in the same message."""


class Round(NamedTuple):
    """Item of this rank, with the result of the exchange, which is equal on all ranks."""

    item: object
    num_items: int
    has_failed: bool
    has_drawn: bool
    """Whether reading drew random numbers on any rank. False if the fetch was not watched."""
    noted: list[int]


class Rounds:
    """Items of an iterator, fetched in rounds. In each round the ranks count items and failures by an all-reduce.

    `fetch` takes the next item and starts the all-reduce. `finish` completes it. In between, it runs in the background.
    All ranks call both in the same order. An error in `fetch`, or reported by `fail`, is raised by `finish` on all
    ranks as the same `DistributedError`.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        group: ProcessGroup | None,
        notes: Notes | None = None,
        exchange: NumberExchange | None = None,
    ) -> None:
        self._iterator = iterator
        self._group = group
        self._exchange = GroupExchange(group) if exchange is None else exchange
        self._notes = notes
        self.error: Exception | None = None
        """Error of this rank that `finish` has not raised yet."""
        self._during = _DURING
        self._under_way: tuple[Any, int] | None = None
        self._result: Round | None = None

    def fail(self, error: Exception, during: str) -> None:
        """Report an error to the other ranks in the next exchange. This rank then has no more items."""
        if self.error is None:
            self.error, self._during = error, during

    def fetch(self, *, watched: bool = False) -> None:
        """Take the next item and start the exchange. `watched` also checks for draws of random numbers on any rank."""
        item: object = NOTHING
        noted: Sequence[int] = ()
        has_drawn = False
        # An error is sent as a flag and not raised here: the other ranks would wait for this rank's message.
        try:
            if self.error is None:
                item, has_drawn = self._next_watched() if watched else (next(self._iterator, NOTHING), False)
            noted = self._note(item)
        except Exception as error:  # noqa: BLE001 - raised on every rank by `finish`
            self.error, item = error, NOTHING
            noted = self._note(item)
        numbers = [int(item is not NOTHING), int(self.error is not None), int(has_drawn), *noted]
        try:
            ticket = self._exchange.start(numbers)
        except (RuntimeError, OSError) as lost:
            raise self._lost(lost) from (self.error or lost)
        self._under_way, self._result = (item, ticket), None

    def finish(self) -> Round:
        """Complete the exchange and return the round. Return the same round until the next `fetch`."""
        result = self.complete()
        if result.has_failed:
            # The error text is exchanged only now, in a second collective. All ranks have seen the flag and get here.
            Peers(self._group).agree(self.error, self._during)
        return result

    def complete(self) -> Round:
        """Complete the exchange like `finish`, but do not raise if a rank has failed."""
        if self._result is None:
            assert self._under_way is not None, "fetch comes first"
            item, ticket = self._under_way
            try:
                num_items, num_failures, num_drawing, *noted = map(int, self._exchange.finish(ticket))
            except (RuntimeError, OSError) as lost:
                raise self._lost(lost) from (self.error or lost)
            self._under_way, self._result = None, Round(item, num_items, num_failures > 0, num_drawing > 0, noted)
        return self._result

    def _next_watched(self) -> tuple[Any, bool]:
        with draws_random_numbers() as has_drawn:
            item = next(self._iterator, NOTHING)
        return item, has_drawn()

    def _note(self, item: object) -> Sequence[int]:
        return () if self._notes is None else self._notes(item)

    def _lost(self, lost: Exception) -> DistributedError:
        return DistributedError(self._during, None, type(lost).__name__, str(lost))


class SynchronizedDataLoader:
    """Dataloader wrapper that yields batches as long as every rank of the group has one.

    Before each batch, an all-reduce that was started one batch ahead tells whether all ranks have a batch. The first
    rank without data ends the pass on all ranks. An error on one rank is raised on all. Lengths may be unknown or wrong.
    On a single rank, without torch.distributed, or with `enabled=False`, batches are passed through. If reading draws
    random numbers in this process, nothing is read ahead, because they must be drawn at the same point of every run.

    `notes` returns integers about each batch, which are summed over all ranks in the same message. `num_batches` is the
    length that the ranks agreed on, if any. `exchange` carries the messages; the default is the process group.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        device: torch.device | str,
        process_group: ProcessGroup | None = None,
        enabled: bool = True,
        *,
        notes: Notes | None = None,
        num_batches: int | None = None,
        exchange: NumberExchange | None = None,
    ) -> None:
        self._dataloader = dataloader
        self._exchange = exchange
        self.num_batches = num_batches
        self._device = torch.device(device)
        self._group = get_global_process_group() if process_group is None else process_group
        self._is_enabled = enabled and self._group is not None and dist.get_world_size(self._group) > 1
        self._size = dist.get_world_size(self._group) if self._is_enabled else 1
        self._notes = notes
        self._rounds: Rounds | None = None
        self._position: Mapping[str, Any] | None = None
        self._is_ahead = False
        """Whether the dataloader is ahead of `_position`, the position behind the last batch handed out."""
        self._must_go_back = False
        self.noted: list[int] = []
        """Summed metadata of the last batch handed out."""

    # --- properties

    def __len__(self) -> int:
        if not isinstance(self._dataloader, Sized):
            raise TypeError(f"The length of {type(self._dataloader).__name__} is unknown: it has no __len__.")
        return len(self._dataloader)

    def __bool__(self) -> bool:
        # Without this, `if loader` would call `__len__`, which raises if the length is unknown.
        return True

    def __getattr__(self, name: str) -> Any:
        # Attributes of the wrapped loader are available here. Private names are not, because a look-up of `_dataloader`
        # before `__init__` has set it would recurse without end.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataloader, name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that exchange metadata."""
        return self._size

    def latest_notes(self) -> list[int]:
        """Return the newest summed metadata, which may belong to the next batch. Equal on all ranks."""
        return self.noted if self._rounds is None else self._rounds.complete().noted

    # --- position

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the dataloader's position behind the last batch handed out."""
        return self._position if self._is_ahead else self._stateful().state_dict()

    def check_state_dict(self, state: object) -> None:
        check_position(self._dataloader, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self._leave()
        self._stateful().load_state_dict(state)
        self._is_ahead = self._must_go_back = False

    def _stateful(self) -> HasState:
        if not is_stateful(self._dataloader):
            raise AttributeError(
                f"{type(self._dataloader).__name__} has no state_dict and load_state_dict, so its position cannot be saved "
                "or restored. Add both methods, or pass the dataset to the trainer instead of a loader."
            )
        return self._dataloader

    def set_epoch(self, epoch: int) -> None:
        self._leave()
        # An agreement must not contain collectives that can fail on one rank. Only a dispatcher has collectives in
        # `set_epoch`, and these raise on all ranks or on none.
        with self._agreement("starting an epoch of the data"):
            if hasattr(self._dataloader, "set_epoch"):
                self._go_back()
                self._dataloader.set_epoch(epoch)
                self._is_ahead = False

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        if not self._is_enabled:
            for batch in self._dataloader:
                yield moved(batch, self._device)
            return
        self._leave()
        self._rounds = rounds = Rounds(self._batches(), self._group, self._notes, self._exchange)
        # Reading ahead moves random draws of the dataset before draws of the step, such as dropout. The generators that a
        # checkpoint stores would then be ahead of its data position, and a resumed run would draw other numbers. So a
        # batch is fetched ahead only while watched fetches draw nothing. `has_drawn` is summed over ranks in the
        # exchange, so all ranks change the order of their collectives at the same batch.
        draws = False
        self._fetch(rounds, watched=True)
        for number in itertools.count(1):
            batch, num_items, _, has_drawn, self.noted = rounds.finish()
            if num_items < self._size:
                # A rank that still has a batch has read one too many. Its saved position stays before that batch.
                self._rounds, self._is_ahead = None, self._is_ahead and batch is not NOTHING
                return
            # The first fetch proves nothing: a DataLoader draws its base seed when a pass begins.
            draws |= has_drawn and number > 1
            reads_ahead = number > 1 and not draws and number % _STEPS_BETWEEN_LOOKS > 0
            # From here on this batch counts as handed out. `_fetch` takes the position before it reads the next one.
            self._is_ahead = False
            if reads_ahead:
                self._fetch(rounds)
            yield moved(batch, self._device)
            if not reads_ahead:
                self._fetch(rounds, watched=True)

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of the dataloader."""
        # Inside the generator, so that an error here is caught by `Rounds.fetch` and raised on all ranks.
        self._go_back()
        # Not `yield from`: closing this generator early would also close the user's iterator.
        for batch in self._dataloader:  # noqa: UP028
            yield batch

    def _fetch(self, rounds: Rounds, watched: bool = False) -> None:
        """Read a batch before it is handed out, and keep the position from before the read for checkpoints."""
        if not self._is_ahead and is_stateful(self._dataloader):
            try:
                self._position, self._is_ahead = kept_state(self._dataloader), True
            except Exception as error:  # noqa: BLE001 - raised on every rank
                rounds.fail(error, _DURING)
        rounds.fetch(watched=watched)

    def close(self) -> None:
        """End the pass and close the dataloader; collective."""
        self._leave()
        if hasattr(self._dataloader, "close"):
            self._dataloader.close()

    def abandon(self) -> None:
        """Close without the other ranks, after an error. Some of them may have exited."""
        self._rounds = None
        if self._exchange is not None:
            self._exchange.close()
        end = getattr(self._dataloader, "abandon", None) or getattr(self._dataloader, "close", None)
        if end is not None:
            end()

    def _leave(self) -> None:
        """Finish the pending exchange of a pass that the loop has left, and ignore its result; collective."""
        if self._rounds is not None:
            # Every started all-reduce has to be finished, or its numbers would be read as the answer to the next one.
            self._rounds.complete()
            self._must_go_back = self._is_ahead
        self._rounds = None

    def _go_back(self) -> None:
        """Rewind a dataloader that resumes where it was left, if a batch was read but never handed out."""
        if self._must_go_back and goes_on(self._dataloader):
            # Workers have prefetched even further. Stop them before the position is set.
            if hasattr(self._dataloader, "close"):
                self._dataloader.close()
            assert self._position is not None, "a pass was left"
            self._stateful().load_state_dict(self._position)
        self._must_go_back = False

    def _agreement(self, during: str) -> contextlib.AbstractContextManager[None]:
        return Peers(self._group).agreement(during) if self._is_enabled else contextlib.nullcontext()
