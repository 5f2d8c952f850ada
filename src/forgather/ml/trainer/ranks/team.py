"""Team of ranks: sums, gathers and agreements between the processes of a trainer.

`RankTeam` uses a separate gloo group. `SoloTeam` is the null object for a single process, so trainers never have to ask
whether they are parallel. Invariant: each method is called by all ranks or by none.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.distributed import DistributedEnvInterface, DistributedError, Peers
from forgather.ml.distributed.failure_reports import report_of
from forgather.ml.distributed.groups import new_group, new_mesh
from forgather.ml.distributed.number_exchange import NumberExchange, number_exchange
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.distributed.watch import EVALUATION, note
from forgather.ml.trainer.callbacks.handler import asks_for_something, asks_in_steps
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import ResumableLoader, kind_of
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted, first_batches
from forgather.ml.trainer.loop.nonfinite import GradientWatch
from forgather.ml.trainer.ranks.batch_notes import Feed, RankFeed, SoloFeed, signal_of, stop_flags
from forgather.ml.trainer.ranks.parallel_loading import DataLayout, ParallelLoading
from forgather.ml.trainer.setup.rank_settings import ranks_text, require_equal_settings
from forgather.ml.trainer.synchronized_dataloader import NOTHING, Round, Rounds, SynchronizedDataLoader
from forgather.ml.trainer.trainer_types import TrainerControl

logger = logging.getLogger(__name__)

T = TypeVar("T")
Received = Callable[[], str | None]
TrainLoader = ResumableLoader | SynchronizedDataLoader
BuildTrainLoader = Callable[[Part], ResumableLoader]
BuildEvalLoader = Callable[[Part], Iterable[Any]]

_SECONDS_TO_MEET = 10.0
_POLL_SECONDS = 0.01
_REQUESTS = tuple(TrainerControl.__dataclass_fields__)


class SoloTeam:
    """Null object for a single process: sums are the values themselves, and agreements do nothing."""

    rank = 0
    size = 1
    is_open = True
    where = ""
    """Suffix of messages that report totals."""
    settings: Mapping[str, object] = {}
    """Additional settings for messages that list settings."""
    occasions: Collection[str] = ()
    """Events with possible requests of callbacks, which ranks must synchronise: "epoch", "log", "step"."""
    settles_loss_first = False
    """Whether ranks must choose the loss before their first forward pass."""
    pins_memory = False
    """Whether this rank receives batches in pinned memory, for asynchronous copies to its device."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the element-wise sum over all ranks, on the CPU."""
        return numbers

    def count(self, is_so: bool) -> int:
        """Return the number of ranks that passed True."""
        return int(is_so)

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def broadcast_from(self, source: int, value: T) -> T:
        """Return the value of rank `source`."""
        return value

    def share_buffer(self, source: int, buffer: Tensor) -> None:
        """Fill a CPU tensor with the values of rank `source`; shape and dtype are equal on all ranks."""

    def agreement(self, during: str) -> AbstractContextManager[None]:
        """Return a context that raises an error of one rank on all ranks; its body must not contain collectives."""
        return contextlib.nullcontext()

    def final_agreement(self, during: str) -> AbstractContextManager[None]:
        """Return an agreement for callbacks that no collective follows; its body may contain collectives of theirs."""
        return contextlib.nullcontext()

    def turns(self, one_at_a_time: bool) -> Iterator[bool]:
        """Yield in each turn whether it is this rank's; with `one_at_a_time`, the ranks of a node take turns.

        All ranks yield the same number of times, so that the caller may use collectives in every turn.
        """
        yield True

    def require_equal_settings(self, settings: Callable[[], Mapping[str, str]]) -> None:
        """Raise an error on all ranks if their settings differ."""

    def mesh(self, device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh | None:
        return None

    def settle(self, control: TrainerControl, callbacks: Iterable[object], occasion: str = "epoch") -> None:
        """Synchronise the requests of callbacks, so that `control` is equal on all ranks.

        The occasions "step" and "log" (a log, an evaluation, a save) are skipped unless a callback of some rank may make
        a request then: they are frequent.
        """

    def feed(self, watch: GradientWatch, received: Received, layout: DataLayout, counts_early: bool) -> Feed:
        return SoloFeed(watch, received)

    def train_loader(
        self, build: BuildTrainLoader, dataset: object, layout: DataLayout, drop_last: bool, feed: Feed
    ) -> TrainLoader:
        return build(WHOLE)

    def eval_loader(self, build: BuildEvalLoader, dataset: object, layout: DataLayout) -> Iterable[Any]:
        return build(WHOLE)

    def evaluate_rounds(
        self,
        loader: Iterable[Any],
        limit: int,
        first: Callable[[Any], None],
        work: Callable[[Any], None],
        received: Received,
        interrupted: Callable[[str], None],
        waits_for_errors: bool = True,
        join: Callable[[Any], None] | None = None,
        end_round: Callable[[], None] | None = None,
    ) -> None:
        """Call `work` on at most `limit` batches; call `first` on the first batch before that.

        A stop request raises `EvaluationInterrupted`, after a call of `interrupted` with the name of the signal. With
        `waits_for_errors=False` an error of `work` is raised immediately, because the ranks of a pipeline wait for each
        other inside `work`. Ranks without a batch call `join` with some batch, if it is given. Every rank calls `end_round`
        after each round, if it is given. Its errors reach all ranks in the next round.
        """
        is_first = True
        for batch in first_batches(loader, limit):
            signal_name = received()
            if signal_name is not None:
                interrupted(signal_name)
                raise EvaluationInterrupted
            if is_first:
                first(batch)
            is_first = False
            work(batch)
            if end_round is not None:
                end_round()

    def compares_batches(self, dataset: object, layout: DataLayout) -> bool:
        """Return whether ranks should compare their first batches, because they might read the same stream."""
        return False

    def open(self) -> None:
        """Connect the ranks, or reconnect them after an error has closed their links."""

    def close_loader(self, loader: TrainLoader, in_order: bool) -> None:
        """Close a training loader; `in_order` is False after an error that other ranks may not have seen."""
        loader.close()


class RankTeam(SoloTeam):
    """Team of several ranks, which take all decisions at the same step."""

    settles_loss_first = True

    def __init__(self, env: DistributedEnvInterface, group: ProcessGroup) -> None:
        self.rank, self.size = env.rank, env.world_size
        self._local_rank = env.local_rank
        self.where = f" across all {env.world_size} ranks"
        self.settings = {"world_size": env.world_size}
        self._group = group
        self.peers = Peers(group)
        self._exchange: NumberExchange | None = None
        # All occasions at first. The first `settle` exchanges which of them the callbacks of all ranks can use.
        self.occasions = {"epoch", "log", "step"}
        self._loading = ParallelLoading(self.peers, self.agreement)

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        return self._exchange is not None

    def open(self) -> None:
        if self._exchange is None:
            self._exchange = number_exchange(RankLinks.connect(self._group))
        # Callbacks may have changed since the last run.
        self.occasions = {"epoch", "log", "step"}

    def sum(self, numbers: Tensor) -> Tensor:
        assert self._exchange is not None
        with _contact("adding up numbers of all ranks"):
            sums = self._exchange.finish(self._exchange.start(numbers.flatten().tolist()))
        return torch.tensor(sums, dtype=numbers.dtype, device="cpu").view(numbers.shape)

    def count(self, is_so: bool) -> int:
        return int(self.sum(torch.tensor([int(is_so)], dtype=torch.int64)))

    def gather(self, value: T) -> list[T]:
        return self.peers.gather(value)

    def broadcast(self, value: T) -> T:
        return self.peers.broadcast(value)

    def broadcast_from(self, source: int, value: T) -> T:
        return self.peers.broadcast(value, source)

    def share_buffer(self, source: int, buffer: Tensor) -> None:
        with _contact("sharing predictions with all ranks"):
            dist.broadcast(buffer, group=self._group, group_src=source)

    def agreement(self, during: str) -> AbstractContextManager[None]:
        return self.peers.agreement(during)

    @contextlib.contextmanager
    def final_agreement(self, during: str) -> Iterator[None]:
        failure: BaseException | None = None
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again below
            failure = error
        if failure is None:
            with _contact(during):
                dist.barrier(self._group)
            self.peers.agree(None, during)
        elif not self._meets_others():
            raise failure
        elif isinstance(failure, Exception):
            self.peers.agree(failure, during)
        else:
            with contextlib.suppress(DistributedError):
                self.peers.agree(report_of(failure, during, self.rank), during)
            raise failure

    def _meets_others(self) -> bool:
        """Return whether all ranks reach this barrier soon. They may wait for this rank in a collective of a callback."""
        deadline = time.monotonic() + _SECONDS_TO_MEET
        try:
            meeting = dist.barrier(self._group, async_op=True)
            assert meeting is not None, "this rank is a member of the group"
            while not meeting.is_completed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
            meeting.wait()
        except RuntimeError:
            # Another rank has left. The error of this rank matters more.
            return False
        return True

    def turns(self, one_at_a_time: bool) -> Iterator[bool]:
        # Nodes may have different numbers of ranks. The caller's agreements need the same number of turns everywhere.
        place = self._local_rank if one_at_a_time else 0
        for turn in range(max(self.gather(place)) + 1):
            yield turn == place

    def require_equal_settings(self, settings: Callable[[], Mapping[str, str]]) -> None:
        require_equal_settings(self.peers, settings())

    def mesh(self, device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh | None:
        return new_mesh(device_type, shape, names)

    def settle(self, control: TrainerControl, callbacks: Iterable[object], occasion: str = "epoch") -> None:
        if occasion not in self.occasions:
            return
        asked = [bool(getattr(control, name)) for name in _REQUESTS]
        callbacks = list(callbacks)
        # Requests and capabilities travel in one sum. `occasions` must be equal on all ranks, because it decides whether
        # the next call is a collective.
        may_ask = [any(map(asks, callbacks)) for asks in (asks_in_steps, asks_for_something)]
        *agreed, asks_at_steps, asks_at_logs = self.sum(torch.tensor([*asked, *may_ask], dtype=torch.int64)).tolist()
        frequent = {"step": asks_at_steps, "log": asks_at_logs}
        self.occasions = {"epoch", *(name for name, number in frequent.items() if number)}
        for name, was_asked, number in zip(_REQUESTS, asked, agreed, strict=True):
            # One request on any rank is a request for all.
            if number and not was_asked:
                logger.info("%s was requested on another rank", name)
            setattr(control, name, number > 0)

    # --- batches

    def feed(self, watch: GradientWatch, received: Received, layout: DataLayout, counts_early: bool) -> Feed:
        return RankFeed(watch, received, self.sum, layout.speaks, counts_early)

    def train_loader(
        self, build: BuildTrainLoader, dataset: object, layout: DataLayout, drop_last: bool, feed: Feed
    ) -> TrainLoader:
        assert isinstance(feed, RankFeed)
        loader = self._loading.loader(build, dataset, layout, True, drop_last, self.pins_memory)
        # The shortest rank ends the epoch for all, so the minimum is the number of batches on every rank.
        lengths = self.gather(loader.num_batches)
        known = [length for length in lengths if length is not None]
        if self.rank == 0 and len(set(known)) > 1:
            ranks = {
                length: [rank for rank, one in enumerate(lengths) if one == length] for length in sorted(set(known))
            }
            logger.warning(
                "The ranks have different numbers of training batches: %s. An epoch ends on all ranks after %d, and the other "
                "batches are not trained on. Give every rank as many samples, or pass the full dataset on every rank.",
                *("; ".join(f"{length} on {ranks_text(on)}" for length, on in ranks.items()), min(known)),
            )
        synchronized = SynchronizedDataLoader(
            loader,
            "cpu",
            self._group,
            notes=feed.about,
            num_batches=min(known) if len(known) == len(lengths) else None,
            exchange=self._exchange,
        )
        feed.follow(synchronized)
        return synchronized

    def compares_batches(self, dataset: object, layout: DataLayout) -> bool:
        may_be_equal = dataset is None or kind_of(dataset) != "map" or layout.is_sharded is True
        return not layout.splits_streams and may_be_equal

    def eval_loader(self, build: BuildEvalLoader, dataset: object, layout: DataLayout) -> Iterable[Any]:
        return self._loading.loader(build, dataset, layout, False, False, self.pins_memory)

    def evaluate_rounds(
        self,
        loader: Iterable[Any],
        limit: int,
        first: Callable[[Any], None],
        work: Callable[[Any], None],
        received: Received,
        interrupted: Callable[[str], None],
        waits_for_errors: bool = True,
        join: Callable[[Any], None] | None = None,
        end_round: Callable[[], None] | None = None,
    ) -> None:
        """Evaluate the batches of this rank; ranks that have run out join each round until no rank has a batch."""
        rounds = Rounds(first_batches(loader, limit), self._group, lambda _: stop_flags(received()), self._exchange)
        rounds.fetch()
        is_first = True
        example: Any = None
        while (found := _finished(rounds, loader)).num_items > 0:
            # A rank without batches only waits in each round, and still makes progress.
            note(EVALUATION)
            batch = None if found.item is NOTHING else found.item
            # Every rank calls `first`, also without a batch: it contains a collective.
            if is_first:
                first(batch)
                example = self._shared_example(batch, found.num_items) if join is not None else None
            is_first = False
            signal_name = signal_of(tuple(found.noted))
            if signal_name is not None:
                interrupted(signal_name)
                _leave(loader)
                raise EvaluationInterrupted
            # Fetch the next round before the work, so that its exchange runs in the background meanwhile.
            rounds.fetch()
            if batch is not None and not isinstance(batch, EmptyBatch):
                self._work_in_round(work, batch, rounds, waits_for_errors)
            elif join is not None:
                join(example if batch is None else batch)
            if end_round is not None:
                self._work_in_round(lambda _: end_round(), None, rounds, True)
        _leave(loader)
        self.peers.agree(rounds.error, "evaluating a batch")

    def _shared_example(self, batch: object, num_items: int) -> object:
        """Return the batch of this rank, or one of another rank; collective if some rank has none."""
        if num_items == self.size:
            return batch
        return self.broadcast_from(self.gather(batch is not None).index(True), batch)

    def _work_in_round(
        self, work: Callable[[Any], None], batch: object, rounds: Rounds, waits_for_errors: bool
    ) -> None:
        if not waits_for_errors:
            work(batch)
            return
        try:
            work(batch)
        except Exception as error:  # noqa: BLE001 - `Rounds.finish` raises it on every rank
            rounds.fail(error, "evaluating a batch")

    def close_loader(self, loader: TrainLoader, in_order: bool) -> None:
        if in_order or not isinstance(loader, SynchronizedDataLoader):
            loader.close()
            return
        # The failed rank may be gone, so nothing may wait for other ranks here. `open` reconnects them.
        loader.abandon()
        self._loading.close()
        self._exchange = None


Team = SoloTeam


def make_team(env: DistributedEnvInterface, present: Team | None, owner: str) -> Team:
    """Return the team of this process: the current team if it still fits, otherwise a new one; collective."""
    if env.world_size == 1:
        return present if type(present) is SoloTeam else SoloTeam()
    if isinstance(present, RankTeam) and (present.rank, present.size) == (env.rank, env.world_size):
        return present
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{owner} got an environment of {env.world_size} ranks, but torch.distributed is not initialised. Start the job "
            "with torchrun (or forgather train --nproc) and omit distributed_env, or pass a "
            "forgather.ml.distributed.DistributedEnvironment, which initialises it."
        )
    # A separate group, so that its small messages run concurrently with the gradient all-reduce.
    return RankTeam(env, new_group(backend="gloo"))


def _finished(rounds: Rounds, loader: Iterable[Any]) -> Round:
    """Complete a round; an error of one rank ends the evaluation on all ranks, in a state that allows the next one."""
    try:
        return rounds.finish()
    except DistributedError as error:
        # All ranks raise an agreed error here. If contact was lost, no rank may wait for another.
        if error.rank is not None:
            _leave(loader)
        raise


def _leave(loader: Iterable[Any]) -> None:
    # A dispatcher has a pass open on all ranks, with messages in flight. All ranks must end it together.
    if isinstance(loader, DataloaderDispatcher):
        loader.close()


@contextlib.contextmanager
def _contact(during: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as lost:
        raise DistributedError(during, None, type(lost).__name__, str(lost)) from lost
