"""Checks that state which is declared identical across ranks is identical, and says where it is not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
import torch.distributed as dist

from forgather.ml.checkpoint.encoding.digest import (
    combine_digests,
    compute_state_hash,
    dense_components,
    iter_chunks,
    leaves_by_path,
    state_digests,
)
from forgather.ml.distributed import Peers


class ValidationLevel(Enum):
    """How closely replicas are compared."""

    NONE = "none"
    """Not at all."""

    QUICK = "quick"
    """One fingerprint per rank: structure, dtypes, a sample of the values."""

    TENSOR = "tensor"
    """The whole content of every tensor, and every other leaf."""

    FULL = "full"
    """Like TENSOR, and measures the largest absolute difference of the tensors that differ."""


@dataclass(frozen=True)
class Divergence:
    """A path at which the ranks do not all hold the same.

    `texts` has the digest text of every rank, None where the path is missing. `majority` are the ranks of the largest
    group that agrees; among equally large ones, of the group with the lowest rank.
    """

    path: str
    texts: Mapping[int, str | None]
    majority: Sequence[int]

    @property
    def reference(self) -> str | None:
        return self.texts[self.majority[0]]

    @property
    def comparable_ranks(self) -> list[int]:
        """The ranks whose tensor differs from the majority's in content only."""
        if self.reference is None or not self.reference.startswith("tensor "):
            return []
        kind = _array_kind(self.reference)
        return [rank for rank, text in self.texts.items() if text != self.reference and _array_kind(text) == kind]

    def __str__(self) -> str:
        ranks_by_remark: dict[str, list[int]] = defaultdict(list)
        for rank, text in self.texts.items():
            if text != self.reference:
                ranks_by_remark[_remark(text, self.reference)].append(rank)
        remarks = [_sentence(ranks, self.majority, remark) for remark, ranks in ranks_by_remark.items()]
        return f"{self.path or 'state'}: {'; '.join(remarks)}"


def validate_replication(
    state_dict: object,
    validation_level: ValidationLevel | str = ValidationLevel.TENSOR,
    group: dist.ProcessGroup | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> tuple[bool, list[str]]:
    """Returns whether all ranks of the group hold the same state, and a line for each path at which they do not.

    Collective over the group; every rank gets the same answer. Any differing bit is a difference: `rtol` and `atol`
    only say, at level FULL, whether it is within tolerance. A rank that cannot digest its state makes every rank raise.
    """
    level = as_validation_level(validation_level)
    peers = Peers(group)
    if level is ValidationLevel.NONE or peers.size == 1:
        return True, []
    digests: dict[str, str] = {}
    fingerprint = ""
    with peers.agreement("computing the digests of replicated state"):
        if level is ValidationLevel.QUICK:
            fingerprint = compute_state_hash(state_dict)
        else:
            digests = state_digests(state_dict)
            fingerprint = combine_digests(digests)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    fingerprints = dict(zip(ranks, peers.gather(fingerprint), strict=True))
    if len(set(fingerprints.values())) == 1:
        return True, []
    if level is ValidationLevel.QUICK:
        return False, [_fingerprint_line(fingerprints)]
    # Everybody saw the same fingerprints, so that everybody takes part in this second exchange or nobody does.
    divergences = find_divergences(dict(zip(ranks, peers.gather(digests), strict=True)))
    if level is ValidationLevel.TENSOR:
        return False, [str(divergence) for divergence in divergences]
    sources = {d.path: ranks.index(d.majority[0]) for d in divergences if d.comparable_ranks}
    tolerance = Tolerance(rtol, atol)
    measured = dict(zip(ranks, _measure_differences(state_dict, sources, peers, tolerance), strict=True))
    return False, [f"{divergence}{_measured_text(divergence, measured, tolerance)}" for divergence in divergences]


def as_validation_level(level: ValidationLevel | str) -> ValidationLevel:
    """Returns the level that a member or its name stands for."""
    try:
        return ValidationLevel(level)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in ValidationLevel)
        raise ValueError(f"validation_level is {level!r}, but must be one of {choices}") from None


def compare_replicas(digests_by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns a line for each path at which the digests (of `state_digests`, by global rank) are not all equal."""
    return [str(divergence) for divergence in find_divergences(digests_by_rank)]


def find_divergences(digests_by_rank: Mapping[int, Mapping[str, str]]) -> list[Divergence]:
    """Returns the paths at which the ranks differ, in the order of the state."""
    paths = dict.fromkeys(path for digests in digests_by_rank.values() for path in digests)
    divergences = []
    for path in paths:
        texts = {rank: digests_by_rank[rank].get(path) for rank in sorted(digests_by_rank)}
        if len(set(texts.values())) > 1:
            divergences.append(Divergence(path, texts, _majority(texts)))
    return divergences


def format_divergence(key: str, lines: Sequence[str], limit: int = 20) -> str:
    """Returns the message of a failed validation of the component `key`, with at most `limit` of its lines."""
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  ... and {len(lines) - limit} more")
    places = "1 place" if len(lines) == 1 else f"{len(lines)} places"
    headline = f"Replication validation failed: the copies of component {key!r} differ between ranks in {places}:"
    advice = (
        "Its ranks no longer train the same state, so a checkpoint of one copy would lose the others. Find what "
        "updates it on some ranks only, or declare the component PER_RANK if its copies are meant to differ."
    )
    return "\n".join([headline, *shown, advice])


def _majority(texts: Mapping[int, str | None]) -> list[int]:
    ranks_by_text: dict[str | None, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        ranks_by_text[text].append(rank)
    return max(ranks_by_text.values(), key=lambda ranks: (len(ranks), -ranks[0]))


def _fingerprint_line(fingerprints: Mapping[int, str]) -> str:
    majority = _majority(fingerprints)
    others = [rank for rank in fingerprints if rank not in majority]
    return f"fingerprint: {_sentence(others, majority, '')}; validation level 'tensor' names the tensors"


def _array_kind(text: str | None) -> str | None:
    """The dtype and shape in the digest text of a tensor or array; None for any other leaf."""
    if text is None or not text.startswith(("tensor ", "ndarray ")):
        return None
    return f"{text.rpartition(']')[0]}]"


_MISSING = "missing"
_EXTRA = "extra"


def _remark(text: str | None, reference: str | None) -> str:
    """What to say about a rank's digest text beyond that it is not the majority's."""
    if text is None:
        return _MISSING
    if reference is None:
        return _EXTRA
    kind, reference_kind = _array_kind(text), _array_kind(reference)
    if kind is not None and kind == reference_kind:
        return ""
    return f"{kind or text} instead of {reference_kind or reference}"


def _sentence(ranks: Sequence[int], majority: Sequence[int], remark: str) -> str:
    if remark == _MISSING:
        return f"missing on {_name(ranks)}, present on {_name(majority)}"
    if remark == _EXTRA:
        return f"present on {_name(ranks)}, missing on {_name(majority)}"
    verb = "differs" if len(ranks) == 1 else "differ"
    return f"{_name(ranks)} {verb} from {_name(majority)}" + (f" ({remark})" if remark else "")


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class Tolerance:
    """How far floating-point values may be apart: by `atol` + `rtol` times the reference."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"rtol={self.rtol:g}, atol={self.atol:g}"


@dataclass
class Difference:
    """How far one rank's tensor is from the reference."""

    largest: float = 0.0
    is_within_tolerance: bool = True

    def include(self, largest: float, is_within_tolerance: bool) -> None:
        # `max` would drop a NaN that comes second
        self.largest = largest if largest != largest else max(largest, self.largest)
        self.is_within_tolerance &= is_within_tolerance


def _measured_text(
    divergence: Divergence, measured: Mapping[int, Mapping[str, Difference]], tolerance: Tolerance
) -> str:
    total = Difference()
    found = [measured[rank].get(divergence.path) for rank in divergence.comparable_ranks]
    if not found or None in found:
        return ""
    for difference in found:
        assert difference is not None
        total.include(difference.largest, difference.is_within_tolerance)
    verdict = "within" if total.is_within_tolerance else "beyond"
    return f", largest absolute difference {total.largest:g} ({verdict} {tolerance})"


def _measure_differences(
    state_dict: object, sources: Mapping[str, int], peers: Peers, tolerance: Tolerance
) -> list[dict[str, Difference]]:
    """Returns, for each rank, how far its tensors are from those of the source (a rank in the group) of each path."""
    leaves = leaves_by_path(state_dict)
    measured: dict[str, Difference] = {}
    for path, source in sources.items():
        difference = _difference_from(source, leaves.get(path), peers, tolerance)
        if difference is not None:
            measured[path] = difference
    return peers.gather(measured)


def _difference_from(source: int, leaf: object, peers: Peers, tolerance: Tolerance) -> Difference | None:
    """Compares this rank's tensor with the source's, chunk by chunk; None where they cannot be compared.

    Every rank takes part in every broadcast, also one that has no such tensor or cannot read it.
    """
    chunks = _readable_chunks(leaf)
    kind, num_chunks = peers.broadcast((_kind_of(leaf), len(chunks)), source)
    is_comparable = _kind_of(leaf) == kind and len(chunks) == num_chunks > 0
    difference = Difference() if is_comparable else None
    for index in range(num_chunks):
        content = peers.broadcast(_content(chunks[index]) if peers.rank == source else b"", source)
        if difference is not None:
            difference = _include_chunk(difference, chunks[index], content, tolerance)
    return difference


def _readable_chunks(leaf: object) -> list[torch.Tensor]:
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.is_quantized or dense_components(leaf) is not None:
        return []
    return list(iter_chunks(leaf.detach()))


def _kind_of(leaf: object) -> tuple[str, tuple[int, ...]] | None:
    return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else None


def _flat(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def _content(chunk: torch.Tensor) -> bytes:
    # Bytes, because a pickled view would take its whole storage along.
    return _flat(chunk).view(torch.uint8).numpy().tobytes()


def _include_chunk(
    difference: Difference, chunk: torch.Tensor, content: bytes, tolerance: Tolerance
) -> Difference | None:
    own = _flat(chunk)
    if not content:
        return difference
    reference = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(own.dtype)
    try:
        difference.include(*_compare(own, reference, tolerance))
    except (NotImplementedError, RuntimeError, TypeError):
        # A dtype that torch cannot convert: the divergence is reported all the same, only without its size.
        return None
    return difference


def _compare(own: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> tuple[float, bool]:
    """The largest absolute difference of two flat tensors of one dtype, and whether all are within tolerance."""
    if own.is_floating_point() or own.is_complex():
        wide = torch.complex128 if own.is_complex() else torch.float64
        magnitude = reference.to(wide).abs()
        distance = (own.to(wide) - reference.to(wide)).abs()
        # Infinities and NaNs of the same bits are equal, though their difference is NaN.
        distance[_same_bits(own, reference)] = 0.0
    else:
        magnitude = reference.to(torch.float64).abs()
        distance = _integer_distance(own.numpy(), reference.numpy())
    is_within = distance.isfinite() & (distance <= tolerance.atol + tolerance.rtol * magnitude)
    return float(distance.max()), bool(is_within.all())


def _same_bits(own: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    size = own.itemsize
    return (own.view(torch.uint8).view(-1, size) == reference.view(torch.uint8).view(-1, size)).all(dim=1)


def _integer_distance(own: np.ndarray, reference: np.ndarray) -> torch.Tensor:
    # Subtracted as unsigned integers: as floats, large neighbours would come out equal.
    wide = np.int64 if own.dtype.kind == "i" else np.uint64
    first, second = own.astype(wide), reference.astype(wide)
    high, low = np.maximum(first, second), np.minimum(first, second)
    return torch.from_numpy((high.view(np.uint64) - low.view(np.uint64)).astype(np.float64))
