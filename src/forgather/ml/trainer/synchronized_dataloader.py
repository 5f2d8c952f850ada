"""Every rank reads its own batches, and all of them stop, or fail, together."""

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
"""So often reading is watched for random numbers; all the time would cost as much as the rest."""

NOTHING = object()
"""In place of an item: this rank has run out."""

Notes = Callable[[Any], Sequence[int]]
"""Numbers about an item (or `NOTHING`) that are summed over all ranks in the same message."""


class Round(NamedTuple):
    """An item of this rank, and what is true of the round on all ranks."""

    item: object
    num_items: int
    has_failed: bool
    has_drawn: bool
    """Whether reading it drew random numbers, if that was watched."""
    noted: list[int]


class Rounds:
    """The items of an iterator, fetched in rounds: for each, the ranks tell each other who has one and who failed.

    `fetch` takes the next item and starts that exchange; `finish` completes it. Between the two the exchange goes on in
    the background. All ranks call both in the same order. An error, in fetching or reported by `fail`, is raised on all
    ranks by `finish` as the same `DistributedError`.
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
        """What went wrong on this rank and was not raised yet."""
        self._during = _DURING
        self._under_way: tuple[Any, int] | None = None
        self._result: Round | None = None

    def fail(self, error: Exception, during: str) -> None:
        """Let the next exchange tell the other ranks of an error, after which this rank has no more items."""
        if self.error is None:
            self.error, self._during = error, during

    def fetch(self, *, watched: bool = False) -> None:
        """Take the next item; `watched` finds out whether that draws random numbers on any rank."""
        item: object = NOTHING
        noted: Sequence[int] = ()
        has_drawn = False
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
        """The item and what the ranks told of theirs; the same again until the next `fetch`."""
        result = self.complete()
        if result.has_failed:
            Peers(self._group).agree(self.error, self._during)
        return result

    def complete(self) -> Round:
        """What `finish` gives, whether or not a rank has failed: for who does not need the item."""
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
    """The batches of `dataloader` for as long as every rank of the group has one.

    Before each batch the ranks agree, in one small reduction that was started a batch ahead, whether all have one: the
    first to run out ends the pass for all, and an error on one is an error on all. Lengths need not be known, and may be
    wrong. Alone, without torch.distributed, or with `enabled=False`, batches are passed through. Where reading draws
    random numbers in this process nothing is read ahead, since they must be drawn at the same point in every run.

    `notes` gives numbers about each batch, which are summed over all ranks in the same message; `num_batches` is the
    length that ranks have agreed on, if they have; `exchange` carries the messages, by default the group.
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
        """Whether the loader is further than `_position`, which is behind the last batch that was handed out."""
        self._must_go_back = False
        self.noted: list[int] = []
        """The sums of the notes about the batch that was handed out last."""

    # --- what it knows

    def __len__(self) -> int:
        if not isinstance(self._dataloader, Sized):
            raise TypeError(f"The length of {type(self._dataloader).__name__} is unknown: it has no __len__.")
        return len(self._dataloader)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataloader, name)

    def latest_notes(self) -> list[int]:
        """The sums of the notes that are the newest on all ranks, which may be about the batch to come."""
        return self.noted if self._rounds is None else self._rounds.complete().noted

    # --- position

    def state_dict(self) -> Mapping[str, Any] | None:
        """The loader's position behind the last batch that was handed out."""
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
                f"{type(self._dataloader).__name__} has no state_dict and load_state_dict, so no position can be saved "
                "or restored. Give it both methods, or give the trainer the dataset instead of a loader."
            )
        return self._dataloader

    def set_epoch(self, epoch: int) -> None:
        self._leave()
        # Only a dispatcher has collectives of its own in there, which end alike on all ranks.
        with self._agreement("starting an epoch of the data"):
            if hasattr(self._dataloader, "set_epoch"):
                self._go_back()
                self._dataloader.set_epoch(epoch)
                self._is_ahead = False

    # --- a pass

    def __iter__(self) -> Iterator[Any]:
        if not self._is_enabled:
            for batch in self._dataloader:
                yield moved(batch, self._device)
            return
        self._leave()
        self._rounds = rounds = Rounds(self._batches(), self._group, self._notes, self._exchange)
        draws = False
        self._fetch(rounds, watched=True)
        for number in itertools.count(1):
            batch, num_items, _, has_drawn, self.noted = rounds.finish()
            if num_items < self._size:
                self._rounds, self._is_ahead = None, self._is_ahead and batch is not NOTHING
                return
            # The first batch comes with what a loader draws when a pass begins.
            draws |= has_drawn and number > 1
            reads_ahead = number > 1 and not draws and number % _STEPS_BETWEEN_LOOKS > 0
            self._is_ahead = False
            if reads_ahead:
                self._fetch(rounds)
            yield moved(batch, self._device)
            if not reads_ahead:
                self._fetch(rounds, watched=True)

    def _batches(self) -> Iterator[Any]:
        """Those of the loader, begun where an error is one of all ranks."""
        self._go_back()
        # Not `yield from`, with which leaving early would close an iterator that is the user's.
        for batch in self._dataloader:  # noqa: UP028
            yield batch

    def _fetch(self, rounds: Rounds, watched: bool = False) -> None:
        """Read a batch that is yet to be handed out, if it ever is."""
        if not self._is_ahead and is_stateful(self._dataloader):
            try:
                self._position, self._is_ahead = kept_state(self._dataloader), True
            except Exception as error:  # noqa: BLE001 - raised on every rank
                rounds.fail(error, _DURING)
        rounds.fetch(watched=watched)

    def close(self) -> None:
        """End the pass, on all ranks together."""
        self._leave()
        if hasattr(self._dataloader, "close"):
            self._dataloader.close()

    def abandon(self) -> None:
        """End without the other ranks, of which some may be gone."""
        self._rounds = None
        if self._exchange is not None:
            self._exchange.close()
        end = getattr(self._dataloader, "abandon", None) or getattr(self._dataloader, "close", None)
        if end is not None:
            end()

    def _leave(self) -> None:
        """Finish the exchange of a pass that the loop has left; what it tells is about a batch that nobody asked for."""
        if self._rounds is not None:
            self._rounds.complete()
            self._must_go_back = self._is_ahead
        self._rounds = None

    def _go_back(self) -> None:
        """To where a pass was left, for a loader that goes on from there."""
        if self._must_go_back and goes_on(self._dataloader):
            if hasattr(self._dataloader, "close"):
                self._dataloader.close()
            assert self._position is not None, "a pass was left"
            self._stateful().load_state_dict(self._position)
        self._must_go_back = False

    def _agreement(self, during: str) -> contextlib.AbstractContextManager[None]:
        return Peers(self._group).agreement(during) if self._is_enabled else contextlib.nullcontext()
