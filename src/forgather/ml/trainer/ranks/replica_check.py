"""Replica check (`replica_check_steps`): compares sampled digests of the parameters between the replicas of a model.

The digest of a check travels in the metadata that ranks exchange for each batch (`batch_notes`), so a check adds no
collective and no host wait. All ranks read the same sums, and so all raise the same ReplicationError at the same step.
A second exchange, of digests per tensor, runs only after a difference.
"""

import hashlib
import logging
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.checkpoint.errors import ReplicationError
from forgather.ml.checkpoint.rank_layout import ranks_text
from forgather.ml.trainer.ranks.batch_notes import RankFeed
from forgather.ml.trainer.ranks.parameter_digests import LateDigests, ParameterDigests
from forgather.ml.trainer.setup.declared_state import Shared

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_PRIME = 2**32 - 5
"""Modulus of the weighted digests. Below 2**32, so that the sum over any number of ranks fits into 64 bits."""
_NUM_WORDS = 2
_MOST_PENDING = 16
"""Checks whose digests are on their way. Beyond it, a check is left out: the device is far behind the host."""
_MOST_NAMED = 5

ReplicaNotes = tuple[int, ...]
"""Number of the newest check whose digest this rank has sent, and the weighted words of that digest."""


class _Pending(NamedTuple):
    step: int
    digests: LateDigests


@dataclass(frozen=True)
class ReplicaReport:
    """Digests of one rank about a check, for the second exchange."""

    host: str
    replicas: tuple[int, ...]
    """Ranks with copies of the same parameters."""
    digests: Mapping[str, int]


class ReplicaCheck:
    """Comparison of parameters between replicas, every `every` steps by the global step.

    `replicas` are the ranks with copies of this rank's parameters. All ranks of the job take part, in one or more such
    sets. `gather` and `total` are collectives over all of them.
    """

    def __init__(
        self,
        every: int,
        digests: ParameterDigests,
        rank: int,
        num_ranks: int,
        replicas: Sequence[int],
        gather: Callable[[ReplicaReport], list[ReplicaReport]],
        total: Callable[[torch.Tensor], torch.Tensor],
        output_dir: str,
    ) -> None:
        self._every = every
        self._digests = digests
        self._num_ranks = num_ranks
        self._replicas = tuple(replicas)
        self._weights = zero_sum_weights(self._replicas, rank)
        self._gather = gather
        self._total = total
        self._output_dir = output_dir
        self._pending: deque[_Pending] = deque()
        self._num_settled = 0
        self._equal_step: int | None = None
        """Step of the last check without a difference, in this process."""
        self._different: _Pending | None = None
        self.latest: Callable[[], ReplicaNotes] = tuple
        """Returns the newest sums over all ranks; set by the feed."""

    @property
    def steps_under_way(self) -> list[int]:
        """Steps of the checks that are not complete yet."""
        return [check.step for check in self._pending]

    # --- exchange

    def notes(self, sums: ReplicaNotes) -> ReplicaNotes:
        """Return the numbers of this rank for the next message, after the sums of the last one were read."""
        self._read(sums)
        if not self._pending or not self._pending[0].digests.have_arrived:
            return self._num_settled, *(0,) * _NUM_WORDS
        # The oldest open check. A rank repeats it until all ranks have sent theirs: devices may be late by some steps.
        return self._num_settled + 1, *self._words(self._pending[0])

    def _read(self, sums: ReplicaNotes) -> None:
        # Cumulative numbers and not flags: the sums of an older message cannot settle a later check.
        if self._pending and sums and sums[0] == self._num_ranks * (self._num_settled + 1):
            self._settle_oldest(sums[1:])

    def _settle_oldest(self, words: Sequence[int]) -> None:
        check = self._pending.popleft()
        self._num_settled += 1
        # Each rank's weights are zero in sum over its replicas, so equal digests cancel.
        if all(word % _PRIME == 0 for word in words):
            self._equal_step = check.step
        elif self._different is None:
            self._different = check

    def _words(self, check: _Pending) -> list[int]:
        digest = hashlib.blake2b(repr(sorted(check.digests.by_name().items())).encode(), digest_size=4 * _NUM_WORDS)
        numbers = (digest.digest()[4 * place : 4 * place + 4] for place in range(_NUM_WORDS))
        return [
            int.from_bytes(number, "little") * weight % _PRIME
            for number, weight in zip(numbers, self._weights, strict=True)
        ]

    # --- step boundaries

    def look(self, step: int) -> None:
        """Raise for a difference that the last exchange has shown, then start the check of this step, if one is due."""
        if self._pending:
            self._read(self.latest())
        self._raise_if_different()
        if step % self._every == 0 and len(self._pending) < _MOST_PENDING:
            self._pending.append(_Pending(step, self._digests.start(step // self._every)))

    def settle(self) -> None:
        """Complete the checks that are on their way; collective, and waits for the device."""
        if self._pending and self._different is None:
            words = torch.tensor([self._words(check) for check in self._pending], dtype=torch.int64, device="cpu")
            for row in self._total(words).tolist():
                self._settle_oldest(row)
        self._raise_if_different()

    def _raise_if_different(self) -> None:
        if self._different is None:
            return
        # All ranks have read the same sums, so all of them reach this exchange.
        own = ReplicaReport(socket.gethostname(), self._replicas, self._different.digests.by_name())
        reports = self._gather(own)
        raise ReplicationError(self._message(self._different.step, reports))

    def _message(self, step: int, reports: Sequence[ReplicaReport]) -> str:
        every, windows = self._every, self._digests.num_windows
        since = f"the check of step {self._equal_step} found no difference"
        since = "it is the first check of this process" if self._equal_step is None else since
        sampled = (
            ""
            if windows == 1
            else f" A check reads 1/{windows} of the elements in turn, so the difference may be older than one check."
        )
        run = os.path.abspath(self._output_dir)
        return (
            f"The replicas of the model differ after step {step} (replica_check_steps={every}; {since}):\n"
            + "\n".join(f"  {line}" for line in describe_difference(reports))
            + f"\nEvery save compares the replicas, so no checkpoint contains this difference.{sampled} Next: forgather replay "
            f"{run} --step {step} --each-rank --nproc {self._num_ranks} repeats the steps since the last checkpoint on each "
            "rank. If only one rank differs again, its device is faulty: leave out its host. If all ranks agree, the program "
            "changes parameters on some ranks only. Then resume from the last checkpoint."
        )


def zero_sum_weights(replicas: Sequence[int], rank: int) -> list[int]:
    """Return the weights of a rank for the words of its digest; over all replicas, each sums to 0 modulo `_PRIME`.

    A difference of two or more digests is missed with a probability of about 2**-64.
    """
    weights = []
    for word in range(_NUM_WORDS):
        generator = random.Random(f"{sorted(replicas)} {word}")
        drawn = {one: generator.randrange(1, _PRIME) for one in sorted(replicas)[:-1]}
        last = -sum(drawn.values()) % _PRIME
        weights.append(drawn.get(rank, last))
    return weights


def describe_difference(reports: Sequence[ReplicaReport]) -> list[str]:
    """Return one line per set of replicas that differ: the ranks, their hosts and the first tensors."""
    lines = []
    for replicas in dict.fromkeys(report.replicas for report in reports):
        by_digests: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in replicas:
            by_digests.setdefault(tuple(reports[rank].digests.items()), []).append(rank)
        if len(by_digests) > 1:
            lines.append(_line(sorted(by_digests.values(), key=len, reverse=True), reports))
    return lines


def _line(parties: Sequence[Sequence[int]], reports: Sequence[ReplicaReport]) -> str:
    first, *others = parties
    names = [name for name in reports[first[0]].digests if _differs(name, [party[0] for party in parties], reports)]
    more = f" and {len(names) - _MOST_NAMED} more tensors" if len(names) > _MOST_NAMED else ""
    tensors = f"in {', '.join(names[:_MOST_NAMED])}{more}"
    if len(first) == len(others[0]):
        every = " and ".join(_placed(party, reports) for party in parties)
        return f"{every} differ from each other (there is no majority) {tensors}"
    verb = "differs" if sum(map(len, others)) == 1 else "differ"
    return f"{' and '.join(_placed(party, reports) for party in others)} {verb} from {ranks_text(first)} {tensors}"


def _differs(name: str, ranks: Sequence[int], reports: Sequence[ReplicaReport]) -> bool:
    return len({reports[rank].digests.get(name) for rank in ranks}) > 1


def _placed(ranks: Sequence[int], reports: Sequence[ReplicaReport]) -> str:
    hosts = ", ".join(dict.fromkeys(reports[rank].host for rank in ranks))
    return f"{ranks_text(ranks)} (host {hosts})"


def has_replicas(shared: Shared | None) -> bool:
    """Return whether several ranks hold copies of a component with this sharing."""
    return shared is not None and shared.pattern in (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


def make_replica_check(trainer: "Trainer[Any]") -> ReplicaCheck | None:
    """Return the check of `replica_check_steps` for the replicas of this rank; None without other replicas."""
    args, team, shared = trainer.args, trainer.team, trainer._sharing_table().get("model")
    if not args.replica_check_steps or shared is None:
        return None
    replicas = list(range(team.size))
    if shared.pattern is SharingPattern.PER_GROUP and team.size > 1:
        assert shared.group is not None
        replicas = dist.get_process_group_ranks(trainer.get_process_groups()[shared.group])
    if len(replicas) == 1:
        if team.rank == 0:
            logger.warning(
                "replica_check_steps=%d has no effect in this job: each part of the model has one copy.",
                args.replica_check_steps,
            )
        return None
    digests = ParameterDigests(trainer._named_parameters())
    check = ReplicaCheck(
        args.replica_check_steps, digests, team.rank, team.size, replicas, team.gather, team.sum, args.output_dir
    )
    assert isinstance(trainer.feed, RankFeed), "several ranks exchange metadata"
    trainer.feed.follow_replicas(check)
    return check
