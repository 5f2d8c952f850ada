"""Deferred comparison of replicas: a background save compares copies of the state after training has continued.

A rank that writes a component digests the staged copy in the background. The other ranks digest their state before
training continues, which is faster than a copy and takes no memory. The verdict and its message are the same as in a
foreground save. Snapshots create the comparison, `BackgroundSaves` completes it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.components import StateComponent
from forgather.ml.checkpoint.encoding.digest import combine_digests, compute_state_hash, state_digests
from forgather.ml.checkpoint.errors import CheckpointSaveError, ReplicationError
from forgather.ml.checkpoint.replicas import ValidationLevel, compare_replicas, fingerprint_line, format_divergence
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

Verdicts = dict[str, dict[str, object]]
"""Manifest metadata by component key."""

_FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class ComparedState:
    """State of a component on this rank, or its digests, and the sets of ranks that must hold equal copies."""

    key: str
    is_required: bool
    level: ValidationLevel
    owners: Sequence[Sequence[int]]
    state: object = None
    digests: Mapping[str, str] | None = None

    @classmethod
    def of(cls, component: StateComponent, owners: Sequence[Sequence[int]], state: object) -> "ComparedState":
        level = ValidationLevel(component.validation_level)
        return cls(component.key, component.required, level, owners, state)

    def digested(self) -> "ComparedState":
        """Replace the state by its digests, so that it may change afterwards."""
        if self.digests is not None:
            return self
        quick = self.level is ValidationLevel.QUICK
        found = {_FINGERPRINT: compute_state_hash(self.state)} if quick else state_digests(self.state)
        return replace(self, state=None, digests=found)

    @property
    def _fingerprint(self) -> str:
        assert self.digests is not None, "digested was called"
        return combine_digests(self.digests)

    def divergence(self, digests: Sequence[Mapping[str, str]]) -> list[str]:
        """Return one line per difference, from the digests of all ranks."""
        lines: list[str] = []
        for ranks in self.owners:
            found = {rank: digests[rank] for rank in ranks}
            if self.level is ValidationLevel.QUICK:
                texts = {rank: one[_FINGERPRINT] for rank, one in found.items()}
                lines += [fingerprint_line(texts)] if len(set(texts.values())) > 1 else []
            else:
                lines += compare_replicas(found)
        return lines


@dataclass(frozen=True)
class Comparison:
    """States of this rank that a save still has to compare."""

    states: Sequence[ComparedState]

    def verdicts(self, peers: Peers) -> Verdicts:
        """Compare the states of all ranks. Collective. Raise `ReplicationError` if a required component differs."""
        digested: list[ComparedState] = []

        def digest() -> dict[str, str]:
            digested.extend(one.digested() for one in self.states)
            return {one.key: one._fingerprint for one in digested}

        told = on_every_rank(peers, digest, "comparing replicas", CheckpointSaveError)
        verdicts: Verdicts = {}
        # All ranks see the same fingerprints, so they take the same branches.
        for one in digested:
            if all(len({told[rank][one.key] for rank in ranks}) == 1 for ranks in one.owners):
                verdicts[one.key] = {"replication": "verified"}
                continue
            message = format_divergence(one.key, one.divergence(peers.gather(one.digests or {})))
            if one.is_required:
                raise ReplicationError(message)
            logger.error("%s", message)
            verdicts[one.key] = {"replication": "diverged"}
        return verdicts
