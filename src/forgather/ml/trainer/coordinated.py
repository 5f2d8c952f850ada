"""What trainers of several ranks have in common, however these divide the work: batches for each, and one will.

One message per batch carries everything that ranks must know of each other before a step: whether all have a batch,
whether one failed, how many targets there are, whether one was asked to stop. It is under way while the step before
computes (`synchronized_dataloader`), so that agreeing costs no waiting.
"""

import contextlib
import dataclasses
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.ml.distributed import DistributedError, Peers
from forgather.ml.distributed.environment import get_requested_timeout
from forgather.ml.distributed.number_exchange import NumberExchange, number_exchange
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.trainer.callbacks.handler import asks_for_something, asks_in_steps
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted, EvaluationSums, first_batches
from forgather.ml.trainer.loop.nonfinite import GradientFinding
from forgather.ml.trainer.loop.signals import STOP_SIGNAL_NAMES
from forgather.ml.trainer.setup.rank_settings import common_settings, require_equal_settings
from forgather.ml.trainer.step_loss.model_loss import Finding, Window
from forgather.ml.trainer.synchronized_dataloader import NOTHING, Rounds, SynchronizedDataLoader
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import BaseDataset, TrainerControl

logger = logging.getLogger(__name__)

_REQUESTS = tuple(TrainerControl.__dataclass_fields__)
_NUM_OWN_NOTES = 3
_THE_SAME = ("scheduler", "trainer")
"""Components that every rank has alike, however the model is divided."""


class CoordinatedTrainer(Trainer):
    """Ranks that train together and do everything at the same step. With one rank it is `Trainer`.

    The ranks form a mesh. Those at the same place of its data-parallel axis train on the same batches; one of them
    speaks for the batches wherever ranks add something up.
    """

    handles_ranks = True
    _control_group: ProcessGroup | None = None
    _exchange: NumberExchange | None = None
    _mesh: DeviceMesh | None = None
    _remedy_for_equal_batches = "Or set dispatch_batches=True: rank 0 then reads for all."

    # --- what strategies decide

    @abstractmethod
    def _make_mesh(self) -> DeviceMesh:
        """The mesh of all ranks of the job."""

    @abstractmethod
    def _dispatches(self, for_training: bool) -> bool:
        """Whether rank 0 reads the batches for all."""

    def _dispatcher_mesh(self, for_training: bool) -> tuple[DeviceMesh, int | None]:
        """The ranks that one of them reads for, and the axis along which they get batches of their own, if any."""
        assert self._mesh is not None
        return self._mesh, 0

    @property
    def _reads_for_others(self) -> bool:
        """Whether batches come through a dispatcher even where each part of the data has a reader of its own."""
        return False

    @property
    def _data_part(self) -> Part:
        """The part of every step's batches that this rank trains on."""
        return Part(self.env.rank, self.env.world_size)

    @property
    def _speaks_for_batches(self) -> bool:
        """Whether this rank is the one, of those that train on the same batches, which counts them."""
        return True

    # --- preparation

    def _init_distributed(self) -> None:
        super()._init_distributed()
        if not self._is_parallel:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{type(self).__name__} was given an environment of {self.env.world_size} ranks, but torch.distributed is not "
                "initialised. Start the job with torchrun (or forgather train --nproc) and leave distributed_env out, or "
                "pass a forgather.ml.distributed.DistributedEnvironment, which initialises it."
            )
        if self._control_group is None:
            # Of its own: its small messages are under way while gradients are.
            self._control_group = dist.new_group(backend="gloo", timeout=get_requested_timeout())
        self._peers = Peers(self._control_group)
        # Before any other collective: settings decide which of them follow.
        require_equal_settings(self._peers, self._common_settings())
        if self._mesh is None:
            self._dispatch_links: dict[bool, RankLinks] = {}
            self._mesh = self._make_mesh()
        if self._exchange is None:
            self._exchange = number_exchange(RankLinks.connect(self._control_group))
        self._agreed_signal: str | None = None
        # When some callback may ask for something; the first time they settle, ranks learn of each other's.
        self._occasions = {"epoch", "log", "step"}
        self._own_counts: deque[int | Tensor] = deque()
        self._noted: deque[list[int]] = deque()

    def _common_settings(self) -> dict[str, str]:
        """What all ranks must have alike, as text: it decides which collectives they reach."""
        return common_settings(self, self._dispatches(for_training=True))

    def _init_device(self) -> None:
        with self._agreement("choosing the device"):
            super()._init_device()

    @property
    def _is_parallel(self) -> bool:
        return self.env.world_size > 1

    def _init_seeds(self) -> None:
        if self._is_parallel and self.args.seed < 0:
            # Drawn anew on each rank, they would shuffle the data in as many ways.
            super()._init_seeds()
            self.args.seed = self._peers.broadcast(self.seed)
        super()._init_seeds()

    def _init_optimizer(self) -> None:
        with self._agreement("making the optimizer"):
            super()._init_optimizer()

    def _init_dataloaders(self) -> None:
        if not self._is_parallel:
            super()._init_dataloaders()
            return
        dispatches = self._dispatches(for_training=True)
        part = WHOLE if dispatches else self._own_part(self.train_dataset)
        with self._agreement("making the loader of the training data"):
            loader: Any = self._build_train_loader(part)
        if dispatches or self._reads_for_others:
            loader = self._dispatcher(loader, for_training=True)
        lengths = self._peers.gather(loader.num_batches)
        self.train_dataloader = SynchronizedDataLoader(
            loader,
            "cpu",
            self._control_group,
            notes=self._notes_about,
            num_batches=_shortest(lengths),
            exchange=self._exchange,
        )
        self._must_compare_batches = not dispatches and kind_of(self.train_dataset) != "map"

    def _init_eval_dataloader(self, dataset: BaseDataset) -> Any:
        if not self._is_parallel:
            return super()._init_eval_dataloader(dataset)
        dispatches = self._dispatches(for_training=False)
        part = WHOLE if dispatches else self._own_part(dataset)
        with self._agreement("making the loader of the evaluation data"):
            loader = self._build_eval_loader(dataset, part)
        if dispatches or self._reads_for_others:
            loader = self._dispatcher(loader, for_training=False)
        return loader

    def _dispatcher(self, loader: Any, for_training: bool) -> DataloaderDispatcher:
        """Evaluations follow one another and share their links, which would otherwise be new ones for each dataset."""
        mesh, axis = self._dispatcher_mesh(for_training)
        if for_training not in self._dispatch_links:
            self._dispatch_links[for_training] = RankLinks.connect(self._reading_group(for_training))
        drops = for_training and self.args.dataloader_drop_last
        links = self._dispatch_links[for_training]
        return DataloaderDispatcher(loader, mesh, "cpu", axis, drop_last=drops, links=links)

    def _reading_group(self, for_training: bool) -> ProcessGroup:
        """A group of the ranks that one of them reads for. Every rank takes part in making all of them: torch names a group
        that is made by its members alone after the groups that each has made before, of which ranks may have other numbers.
        """
        own = None
        for ranks in self._readers(for_training):
            group = dist.new_group(ranks, backend="gloo", timeout=get_requested_timeout())
            own = group if self.env.rank in ranks else own
        assert isinstance(own, ProcessGroup), "every rank has somebody who reads for it"
        return own

    def _readers(self, for_training: bool) -> list[list[int]]:
        """The ranks that one of them reads for, for every one that reads."""
        return [list(range(self.env.world_size))]

    def _own_part(self, dataset: Any) -> Part:
        """This rank's part of a map-style dataset; what else ranks are given is a part of the data already."""
        with self._agreement("asking the dataset for its length"):
            length = len(dataset) if dataset is not None and kind_of(dataset) == "map" else None
        lengths = self._peers.gather(length)
        if None not in lengths and len(set(lengths)) > 1:
            logger.info("The ranks were given datasets of %s samples, which are taken for the parts of one.", lengths)
            return WHOLE
        return self._data_part

    # --- data

    def _windows(self) -> Iterator[Window]:
        if self._is_parallel:
            self._own_counts.clear()
            self._noted.clear()
        return super()._windows()

    def _note_batch(self, batch: Mapping[str, Any]) -> None:
        if not self._is_parallel:
            return
        self._noted.append(self.train_dataloader.noted)
        if self._must_compare_batches:
            self._must_compare_batches = False
            self._warn_of_equal_batches(batch)

    def _notes_about(self, batch: Any) -> list[int]:
        """Targets, whether it is a batch that counts, whether its targets are yet unknown, stop requests, bad gradients."""
        targets = is_batch = is_unknown = 0
        if batch is not NOTHING:
            count: int | Tensor = 0
            if not isinstance(batch, EmptyBatch):
                require_mapping(batch)
                is_batch = 1
                count = self.model_loss.count(batch.get("labels"), batch) if self.model_loss.can_count else -1
            is_unknown = int(isinstance(count, Tensor) or count < 0)
            targets = 0 if is_unknown else int(count)
            self._own_counts.append(count)
        about = [targets, is_batch, is_unknown] if self._speaks_for_batches else [0] * _NUM_OWN_NOTES
        return [*about, *self._own_stop_flags(), int(self._watch.has_news)]

    def _count_targets(self, window: Window) -> None:
        if not self._is_parallel:
            super()._count_targets(window)
            return
        own = [self._own_counts.popleft() for _ in window.batches]
        targets, window.num_shares, num_unknown = (
            sum(column)
            for column in zip(*(self._noted.popleft()[:_NUM_OWN_NOTES] for _ in window.batches), strict=True)
        )
        window.counts, window.total = own, targets
        if num_unknown:
            # The first steps, before the loss is known, and labels that are on a device already.
            num_shares = window.num_shares
            super()._count_targets(window)
            assert window.total is not None
            own_total = int(window.total) if self._speaks_for_batches else 0
            window.total = int(self._sum(torch.tensor([own_total], dtype=torch.int64)))
            window.num_shares = num_shares

    def _agree_on_loss(self, batch: Mapping[str, Any] | None) -> None:
        if not self._is_parallel:
            return
        findings = [one for one in self._peers.gather(self._finding(batch)) if one is not None]
        if findings:
            # The lowest rank of those that have a batch; a loss that is the model's own shows in one batch.
            self.model_loss.adopt(min(findings, key=lambda one: (one.is_stand_in, one.uses_own is not True)))

    def _finding(self, batch: Mapping[str, Any] | None) -> Finding | None:
        """What this rank learns of the loss from its first batch."""
        if batch is None:
            return None
        try:
            inputs, labels = self._prepare_batch(batch)
            with self.amp.autocast():
                return self.model_loss.look(self._evaluated_model(), inputs, labels, isinstance(batch, EmptyBatch))
        except Exception as error:  # noqa: BLE001 - the pass that follows fails in the same way, where all ranks learn of it
            logger.debug("The loss could not be looked at: %s", error)
            return None

    def _warn_of_equal_batches(self, batch: Mapping[str, Any]) -> None:
        digests = self._peers.gather(_digest_of(batch) if self._speaks_for_batches else "")
        for rank, digest in enumerate(digests):
            first = digests.index(digest)
            if digest and first < rank:
                logger.warning(
                    "Ranks %d and %d got the same first batch. An iterable dataset or a ready loader that every rank reads "
                    "for itself is not split by the trainer: every rank must be given data of its own (Hugging Face "
                    "datasets have split_dataset_by_node). %s",
                    first,
                    rank,
                    self._remedy_for_equal_batches,
                )
                return

    # --- numbers of all ranks

    def _count_batch_tokens(self, batch: Mapping[str, Any]) -> int:
        return super()._count_batch_tokens(batch) if self._speaks_for_batches else 0

    def _count_batch_samples(self, batch: Mapping[str, Any]) -> int:
        return super()._count_batch_samples(batch) if self._speaks_for_batches else 0

    def _num_data_parallel_ranks(self) -> int:
        return self._data_part.num_parts

    def _distributed_sums(self, sums: Tensor) -> Tensor:
        return self._sum(sums)

    def _distributed_loss(self, losses: Tensor) -> Tensor:
        return self._sum(losses)

    def _distributed_tokens(self, tokens: Tensor) -> Tensor:
        return self._sum(tokens)

    def _distributed_peak_mem(self) -> list[int] | None:
        own = super()._distributed_peak_mem()
        if own is None or not self._is_parallel:
            return own
        return [peak for peaks in self._peers.gather(own) for peak in peaks]

    def _sum(self, numbers: Tensor) -> Tensor:
        """Each of these numbers, summed over all ranks."""
        if not self._is_parallel:
            return numbers
        assert self._exchange is not None
        with self._contact("adding up numbers of all ranks"):
            sums = self._exchange.finish(self._exchange.start(numbers.flatten().tolist()))
        return torch.tensor(sums, dtype=numbers.dtype, device="cpu").view(numbers.shape)

    # --- agreement

    def _settle_requests(self, occasion: str = "epoch") -> None:
        if not self._is_parallel or occasion not in self._occasions:
            return
        asked = [bool(getattr(self.control, name)) for name in _REQUESTS]
        may_ask = [any(map(asks, self.callbacks)) for asks in (asks_in_steps, asks_for_something)]
        *agreed, asks_at_steps, asks_at_logs = self._sum(torch.tensor([*asked, *may_ask], dtype=torch.int64)).tolist()
        frequent = {"step": asks_at_steps, "log": asks_at_logs}
        self._occasions = {"epoch", *(name for name, number in frequent.items() if number)}
        for name, was_asked, number in zip(_REQUESTS, asked, agreed, strict=True):
            if number and not was_asked:
                logger.info("%s was asked for on another rank", name)
            setattr(self.control, name, number > 0)

    def _gradients_look_bad(self) -> bool:
        if not self._is_parallel:
            return super()._gradients_look_bad()
        return (
            isinstance(self.train_dataloader, SynchronizedDataLoader) and self.train_dataloader.latest_notes()[-1] > 0
        )

    def _findings_of_ranks(self, own: GradientFinding) -> list[GradientFinding]:
        return self._peers.gather(own) if self._is_parallel else [own]

    def _number_of_ranks_with(self, is_so: bool) -> int:
        return int(self._sum(torch.tensor([int(is_so)], dtype=torch.int64)))

    def _own_stop_flags(self) -> list[int]:
        received = None if self._signals is None else self._signals.received
        return [int(name == received) for name in STOP_SIGNAL_NAMES]

    def _stop_requested(self) -> str | None:
        if not self._is_parallel:
            return super()._stop_requested()
        if self._agreed_signal is None and isinstance(self.train_dataloader, SynchronizedDataLoader):
            self._agreed_signal = _signal_of(self.train_dataloader.latest_notes()[_NUM_OWN_NOTES:])
        return self._agreed_signal

    def _agreement(self, during: str) -> contextlib.AbstractContextManager[None]:
        """Errors of one rank become those of all; no collectives in the body."""
        return self._peers.agreement(during) if self._is_parallel else contextlib.nullcontext()

    @contextlib.contextmanager
    def _contact(self, during: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as lost:
            raise DistributedError(during, None, type(lost).__name__, str(lost)) from lost

    def _close_loader(self, loader: Any, in_order: bool) -> None:
        if in_order or not isinstance(loader, SynchronizedDataLoader):
            super()._close_loader(loader, in_order)
        else:
            # Whoever failed is gone, and the others may be waiting for it.
            loader.abandon()
            for links in self._dispatch_links.values():
                links.close()
            self._exchange = None
            self._dispatch_links.clear()

    def _require_supplier_of_best(self) -> None:
        # Callbacks may be on some ranks only.
        with self._agreement("looking for who supplies the best weights"):
            super()._require_supplier_of_best()

    def _load_best_weights(self, checkpoint_path: str) -> None:
        with self._agreement("loading the best model"):
            super()._load_best_weights(checkpoint_path)

    # --- evaluation

    def _prepare_evaluation(self) -> None:
        super()._prepare_evaluation()
        if self._is_parallel and self._exchange is None:
            # It was closed by an error, which the caller has survived.
            self._init_distributed()
            self._dataset_of_loader = None

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return self._peers.broadcast(metrics) if self._is_parallel else metrics

    def _eval_loop(self, dataloader: Any) -> EvaluationSums:
        """Every rank goes through its own batches; all go on, the idle ones too, until nobody has any."""
        if not self._is_parallel:
            return super()._eval_loop(dataloader)
        sums = EvaluationSums()
        # A generator, which begins with the first round: what fails then fails on all ranks.
        batches = (batch for loader in [dataloader] for batch in first_batches(loader, self.args.max_eval_steps))
        rounds = Rounds(batches, self._control_group, lambda _: self._own_stop_flags(), self._exchange)
        rounds.fetch()
        is_first = True
        while True:
            batch, num_items, *_, stop_flags = rounds.finish()
            if num_items == 0:
                break
            if is_first and not self.model_loss.can_count:
                self._agree_on_loss(None if batch is NOTHING else batch)
            is_first = False
            if any(stop_flags):
                self._agreed_signal = _signal_of(stop_flags)
                self._leave_evaluation(dataloader)
                raise EvaluationInterrupted
            rounds.fetch()
            if batch is not NOTHING and not isinstance(batch, EmptyBatch):
                self._evaluate_in_round(batch, sums, rounds)
        self._leave_evaluation(dataloader)
        self._peers.agree(rounds.error, "evaluating a batch")
        return self._summed(sums)

    def _evaluate_in_round(self, batch: Mapping[str, Any], sums: EvaluationSums, rounds: Rounds) -> None:
        try:
            self._evaluate_batch(batch, sums)
        except Exception as error:  # noqa: BLE001 - raised on every rank at the end of a round
            rounds.fail(error, "evaluating a batch")

    def _leave_evaluation(self, dataloader: Any) -> None:
        if isinstance(dataloader, DataloaderDispatcher):
            dataloader.close()

    def _summed(self, sums: EvaluationSums) -> EvaluationSums:
        loss_sum = self._distributed_loss(torch.tensor([sums.loss_sum], dtype=torch.float64))
        counts = torch.tensor([sums.targets, sums.num_batches, sums.num_samples], dtype=torch.int64)
        targets, num_batches, num_samples = self._distributed_tokens(counts).tolist()
        return EvaluationSums.of(float(loss_sum), targets, num_batches, num_samples)

    def _where_evaluated(self) -> str:
        return f" across all {self.env.world_size} ranks" if self._is_parallel else ""

    def _evaluation_settings(self) -> dict[str, Any]:
        return {**super()._evaluation_settings(), "world_size": self.env.world_size}

    # --- state

    def _model_to_save(self) -> dict[str, Any]:
        return {**super()._model_to_save(), "mesh": self._mesh}

    def get_state_components(self) -> list[StateComponent]:
        components = super().get_state_components()
        if not self._is_parallel:
            return components
        return [
            dataclasses.replace(one, sharing_pattern=SharingPattern.REPLICATED) if one.key in _THE_SAME else one
            for one in components
        ]

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        if not self._is_parallel or self._dispatches(for_training=True):
            return SharingPattern.GLOBAL
        return SharingPattern.PER_RANK


def _shortest(lengths: list[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return min(known) if len(known) == len(lengths) else None


def _signal_of(flags: list[int]) -> str | None:
    return next((name for name, flag in zip(STOP_SIGNAL_NAMES, flags, strict=False) if flag), None)


def _digest_of(batch: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}:{tuple(value.shape)}:{tensor_digest(value)}"
        for name, value in sorted(batch.items())
        if isinstance(value, Tensor) and value.numel()
    )
