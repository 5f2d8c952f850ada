"""How ranks tell each other that something failed, so that all of them raise the same error."""

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather.ml.distributed.groups import get_global_process_group

T = TypeVar("T")


class DistributedError(RuntimeError):
    """What went wrong on the first failing rank, as every rank reports it.

    `rank` is the global rank of the process that failed, or None when the ranks lost contact and it is unknown who did.
    """

    def __init__(self, during: str, rank: int | None, error_type: str, message: str, traceback_text: str = "") -> None:
        # All fields are `args`, which is what pickle hands back to the constructor.
        super().__init__(during, rank, error_type, message, traceback_text)
        self.during = during
        self.rank = rank
        self.error_type = error_type
        self.message = message
        self.traceback_text = traceback_text

    @classmethod
    def describing(cls, error: BaseException, during: str, rank: int | None) -> "DistributedError":
        """The report about `error`; one that is already a report keeps naming its own origin."""
        if isinstance(error, DistributedError):
            return error
        text = "".join(traceback.format_exception(error))
        return cls(during, rank, type(error).__name__, str(error), text)

    def __str__(self) -> str:
        if self.rank is None:
            return (
                f"contact with the other ranks was lost during {self.during}: {self.error_type}: {self.message}\n"
                "A rank has died, has left, or takes another path through the program; its own output says why."
            )
        headline = f"rank {self.rank} failed during {self.during}: {self.error_type}: {self.message}"
        if not self.traceback_text:
            return headline
        return f"{headline}\n\nTraceback of rank {self.rank}:\n{self.traceback_text.rstrip()}"


class Peers:
    """The ranks that act together, and how they exchange small Python objects (over gloo).

    Every method is collective: all ranks of the group call it, in the same order. `rank` and `size` count inside the
    group. Without a group this means all ranks, or this process alone where torch.distributed is not initialised.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = get_global_process_group() if group is None else group
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the process group it was asked to act in; "
                "give every rank the group that contains it"
            )

    @classmethod
    def world(cls) -> "Peers":
        """All ranks of the job."""
        return cls()

    def gather(self, value: T, during: str = "gathering a value from every rank") -> list[T]:
        """The values of all ranks, in rank order, on every rank; `during` is for the message when contact is lost."""
        if self.size == 1:
            return [value]
        parcels: list[Any] = [None] * self.size
        with _contact(during):
            dist.all_gather_object(parcels, _pack(value, during), group=self._group)
        return [_unpack(parcel) for parcel in parcels]

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of `source` (a rank inside the group), on every rank."""
        if self.size == 1:
            return value
        during = f"broadcasting a value from rank {source} of the group"
        parcel = [_pack(value, during) if self.rank == source else None]
        with _contact(during):
            dist.broadcast_object_list(parcel, group=self._group, group_src=source)
        assert parcel[0] is not None, "the source sent its value"
        received: T = _unpack(parcel[0])
        return received

    def agree(self, error: BaseException | None, during: str) -> None:
        """Raise the same `DistributedError` on every rank when any rank passes an error.

        It tells of the lowest failing rank; a rank that failed chains its own error as the cause. While all is well
        this costs one reduction of a single integer. A rank that has died is noticed by its neighbours in that
        reduction at once, and by the others as soon as those leave: let the error end the process.
        """
        failed_rank = self._lowest_failing_rank(error, during)
        if failed_rank == self.size:
            return
        report = None if error is None else DistributedError.describing(error, during, _global_rank())
        if self.size > 1:
            report = self._share_report(report, failed_rank, error, during)
        assert report is not None, "a failing rank sends a report"
        if report is error:
            raise report
        raise report from error

    @contextmanager
    def agreement(self, during: str) -> Iterator[None]:
        """Run the body, then `agree` on whether it succeeded everywhere.

        The body must contain no collectives: a rank that fails half-way leaves the body and reaches the agreement while
        the others still wait in the body's collective, and the two would be taken for one another.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, on every rank, by the agreement below
            failure = error
        except BaseException as stop:
            # An interrupt or exit keeps its meaning here; the other ranks only need to know that this one is leaving.
            with suppress(DistributedError):
                self.agree(stop, during)
            raise
        self.agree(failure, during)

    def _lowest_failing_rank(self, error: BaseException | None, during: str) -> int:
        """The rank inside the group, or `size` when all are fine."""
        candidate = self.size if error is None else self.rank
        if self.size == 1:
            return candidate
        with _contact(during, error):
            lowest = torch.tensor([candidate], dtype=torch.int32, device=control_device(self._group))
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
            return int(lowest.item())

    def _share_report(
        self, report: DistributedError | None, failed_rank: int, error: BaseException | None, during: str
    ) -> DistributedError:
        """The report of `failed_rank`, once every rank holds it."""
        with _contact(during, error):
            fields = [None if report is None else report.args]
            dist.broadcast_object_list(fields, group=self._group, group_src=failed_rank)
        # The first rank to leave takes its connections with it: nobody leaves before all have the report.
        with suppress(RuntimeError):
            dist.barrier(group=self._group)
        assert fields[0] is not None, "the failing rank sent its report"
        return DistributedError(*fields[0])


def agree(error: BaseException | None, during: str, group: ProcessGroup | None = None) -> None:
    """`Peers.agree` among the ranks of `group`, by default all ranks."""
    Peers(group).agree(error, during)


@contextmanager
def agreement(during: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """`Peers.agreement` among the ranks of `group`, by default all ranks; no collectives in the body."""
    with Peers(group).agreement(during):
        yield


@contextmanager
def _contact(during: str, own_error: BaseException | None = None) -> Iterator[None]:
    """Turn the backend's complaint about a dead or silent peer into a `DistributedError`."""
    try:
        yield
    except RuntimeError as lost:
        report = DistributedError(during, None, type(lost).__name__, str(lost))
        # A rank with a failure of its own shows that one: it is closer to the root cause than the broken connection.
        raise report from (lost if own_error is None else own_error)


def _pack(value: object, during: str) -> bytes | DistributedError:
    """`value` in transport form, or why it has none: failing here alone would leave the others waiting."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may refuse in its own way; raised on every rank by _unpack
        return DistributedError.describing(error, during, _global_rank())


def _unpack(parcel: bytes | DistributedError) -> Any:
    if isinstance(parcel, DistributedError):
        raise parcel
    return pickle.loads(parcel)


def _global_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def control_device(group: ProcessGroup | None) -> torch.device:
    """The device whose tensors the group can carry: the CPU where possible."""
    # The configuration reads like "cpu:gloo,cuda:nccl".
    device_types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in device_types else device_types[0])
