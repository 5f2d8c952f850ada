"""Replication validation: checks that replicated state is identical on all ranks, and reports the differing tensors.

Ranks first compare one digest each. Only if these differ do they exchange digests per tensor, so identical replicas
cost one small all-gather. Snapshots call it for components that ask for validation.
"""

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
    leaves_by_path,
    state_digests,
)
from forgather.ml.checkpoint.encoding.staging import iter_chunks
from forgather.ml.distributed import Peers


class ValidationLevel(Enum):
    """Level of detail of the comparison between replicas."""

    NONE = "none"
    """No comparison."""

    QUICK = "quick"
    """One fingerprint per rank: structure, dtypes, a sample of the values."""

    TENSOR = "tensor"
    """Full content of every tensor, and every other leaf."""

    FULL = "full"
    """Like TENSOR, and measures the largest absolute difference of differing tensors."""


@dataclass(frozen=True)
class Divergence:
    """Path in the state with different values on different ranks.

    `texts` maps each rank to its digest text, None if the path is missing there. `majority` is the largest set of ranks
    that agree; of equally large sets, the set with the lowest rank.
    """

    path: str
    texts: Mapping[int, str | None]
    majority: Sequence[int]

    @property
    def reference(self) -> str | None:
        return self.texts[self.majority[0]]

    @property
    def comparable_ranks(self) -> list[int]:
        """Ranks with a tensor of the majority's dtype and shape but different content."""
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
    """Return whether all ranks of the group hold the same state, and one line per differing path.

    Collective over the group; every rank gets the same result. Any differing bit is a difference. At level FULL, `rtol`
    and `atol` only decide whether a line reports it as within tolerance. If a rank cannot digest its state, all raise.
    """
    level = as_validation_level(validation_level)
    peers = Peers(group)
    if level is ValidationLevel.NONE or peers.size == 1:
        return True, []
    digests: dict[str, str] = {}
    fingerprint = ""
    # A state may contain a leaf that cannot be digested on one rank only. Without agreement the others would hang.
    with peers.agreement("computing the digests of replicated state"):
        if level is ValidationLevel.QUICK:
            fingerprint = compute_state_hash(state_dict)
        else:
            digests = state_digests(state_dict)
            fingerprint = combine_digests(digests)
    # Messages use global ranks, while broadcasts number their source within the group.
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    fingerprints = dict(zip(ranks, peers.gather(fingerprint), strict=True))
    if len(set(fingerprints.values())) == 1:
        return True, []
    if level is ValidationLevel.QUICK:
        return False, [fingerprint_line(fingerprints)]
    # All ranks gathered the same fingerprints, so either all of them reach this second exchange or none does.
    divergences = find_divergences(dict(zip(ranks, peers.gather(digests), strict=True)))
    if level is ValidationLevel.TENSOR:
        return False, [str(divergence) for divergence in divergences]
    sources = {d.path: ranks.index(d.majority[0]) for d in divergences if d.comparable_ranks}
    tolerance = Tolerance(rtol, atol)
    measured = dict(zip(ranks, _measure_differences(state_dict, sources, peers, tolerance), strict=True))
    return False, [f"{divergence}{_measured_text(divergence, measured, tolerance)}" for divergence in divergences]


def as_validation_level(level: ValidationLevel | str) -> ValidationLevel:
    """Return the level for a member or its value. Raise `ValueError` for other values."""
    try:
        return ValidationLevel(level)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in ValidationLevel)
        raise ValueError(f"validation_level is {level!r}, but must be one of {choices}") from None


def compare_replicas(digests_by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return one line per path with different digests. The digests come from `state_digests`, by global rank."""
    return [str(divergence) for divergence in find_divergences(digests_by_rank)]


def find_divergences(digests_by_rank: Mapping[int, Mapping[str, str]]) -> list[Divergence]:
    """Return the paths with different digests on different ranks, in the order of the state."""
    paths = dict.fromkeys(path for digests in digests_by_rank.values() for path in digests)
    divergences = []
    for path in paths:
        texts = {rank: digests_by_rank[rank].get(path) for rank in sorted(digests_by_rank)}
        if len(set(texts.values())) > 1:
            divergences.append(Divergence(path, texts, _majority(texts)))
    return divergences


def format_divergence(key: str, lines: Sequence[str], limit: int = 20) -> str:
    """Return the error message of a failed validation of component `key`, with at most `limit` lines."""
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  ... and {len(lines) - limit} more")
    places = "1 place" if len(lines) == 1 else f"{len(lines)} places"
    headline = f"Replication validation failed: the copies of component {key!r} differ between ranks in {places}:"
    advice = (
        "The ranks no longer train the same state, and saving one copy would lose the others. Find the code that updates "
        "it on some ranks only, or declare the component PER_RANK if its copies should differ."
    )
    return "\n".join([headline, *shown, advice])


def _majority(texts: Mapping[int, str | None]) -> list[int]:
    ranks_by_text: dict[str | None, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        ranks_by_text[text].append(rank)
    return max(ranks_by_text.values(), key=lambda ranks: (len(ranks), -ranks[0]))


def fingerprint_line(fingerprints: Mapping[int, str]) -> str:
    majority = _majority(fingerprints)
    others = [rank for rank, text in fingerprints.items() if text != fingerprints[majority[0]]]
    return f"fingerprint: {_sentence(others, majority, '')}; use validation level 'tensor' to see the tensors"


def _array_kind(text: str | None) -> str | None:
    """Return the dtype and shape in the digest text of a tensor or array; None for other leaves."""
    if text is None or not text.startswith(("tensor ", "ndarray ")):
        return None
    return f"{text.rpartition(']')[0]}]"


_MISSING = "missing"
_EXTRA = "extra"


def _remark(text: str | None, reference: str | None) -> str:
    """Return the remark about a rank that differs from the majority; "" if only the content differs."""
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
    """Tolerance for differences: `atol` + `rtol` times the magnitude of the reference."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"rtol={self.rtol:g}, atol={self.atol:g}"


@dataclass
class Difference:
    """Largest absolute difference between one rank's tensor and the reference."""

    largest: float = 0.0
    is_within_tolerance: bool = True

    def include(self, largest: float, is_within_tolerance: bool) -> None:
        # `max(a, nan)` returns `a`, which would hide the NaN.
        self.largest = largest if largest != largest else max(largest, self.largest)
        self.is_within_tolerance &= is_within_tolerance


def _measured_text(
    divergence: Divergence, measured: Mapping[int, Mapping[str, Difference]], tolerance: Tolerance
) -> str:
    total = Difference()
    found = [measured[rank].get(divergence.path) for rank in divergence.comparable_ranks]
    # A part of the differences would understate the largest one.
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
    """Return for each rank the differences of its tensors from the source's, by path. Collective.

    `sources` maps each path to the reference rank, numbered within the group.
    """
    leaves = leaves_by_path(state_dict)
    measured: dict[str, Difference] = {}
    for path, source in sources.items():
        difference = _difference_from(source, leaves.get(path), peers, tolerance)
        if difference is not None:
            measured[path] = difference
    return peers.gather(measured)


def _difference_from(source: int, leaf: object, peers: Peers, tolerance: Tolerance) -> Difference | None:
    """Compare this rank's tensor with the source's, chunk by chunk. Return None if they cannot be compared.

    Every rank takes part in every broadcast, even a rank without this tensor. Chunks bound the extra memory.
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
    # Meta, quantised and sparse tensors have no plain bytes to broadcast.
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.is_quantized or dense_components(leaf) is not None:
        return []
    return list(iter_chunks(leaf.detach()))


def _kind_of(leaf: object) -> tuple[str, tuple[int, ...]] | None:
    return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else None


def _flat(chunk: torch.Tensor) -> torch.Tensor:
    # Conjugation and negation are lazy in torch: the raw bytes do not show them until they are resolved.
    return chunk.cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def _content(chunk: torch.Tensor) -> bytes:
    # Bytes, because pickling a view would include its full storage.
    return _flat(chunk).view(torch.uint8).numpy().tobytes()


def _include_chunk(
    difference: Difference, chunk: torch.Tensor, content: bytes, tolerance: Tolerance
) -> Difference | None:
    own = _flat(chunk)
    # A tensor without elements: `frombuffer` rejects an empty buffer.
    if not content:
        return difference
    reference = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(own.dtype)
    try:
        difference.include(*_compare(own, reference, tolerance))
    except (NotImplementedError, RuntimeError, TypeError):
        # Torch cannot convert this dtype. The divergence is still reported, without its size.
        return None
    return difference


def largest_difference(own: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return the largest absolute difference of two tensors of one dtype and shape; None if torch cannot convert it."""
    difference: Difference | None = Difference()
    for own_chunk, chunk in zip(_readable_chunks(own), _readable_chunks(reference), strict=True):
        if difference is not None:
            difference = _include_chunk(difference, own_chunk, _content(chunk), Tolerance(0.0, 0.0))
    return None if difference is None else difference.largest


def _compare(own: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> tuple[float, bool]:
    """Return the largest absolute difference of two flat tensors of one dtype, and whether all are within tolerance."""
    # In float64, because a difference in float16 could overflow or round to zero.
    if own.is_floating_point() or own.is_complex():
        wide = torch.complex128 if own.is_complex() else torch.float64
        magnitude = reference.to(wide).abs()
        distance = (own.to(wide) - reference.to(wide)).abs()
        # The difference of equal infinities or NaNs is NaN, so compare their bits.
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
    # Subtract as unsigned integers: in float64, adjacent values above 2**53 would come out equal. For int64 the signed
    # difference can overflow; its unsigned reading is right.
    wide = np.int64 if own.dtype.kind == "i" else np.uint64
    first, second = own.astype(wide), reference.astype(wide)
    high, low = np.maximum(first, second), np.minimum(first, second)
    return torch.from_numpy((high.view(np.uint64) - low.view(np.uint64)).astype(np.float64))
