"""Error agreement between ranks: an error on one rank is raised on every rank of the group.

`Peers` exchanges small values over gloo, in messages that are no pickles. Its `agree` and `agreement` raise the same
`DistributedError` on all ranks, so that no rank waits in a collective for a rank that has failed. Trainers, data loaders
and checkpoints use it around work that may fail on one rank only.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather._terminal_text import printable, printable_line
from forgather.ml.distributed.groups import get_global_process_group
from forgather.ml.distributed.payload_gather import as_tensor, broadcast_payload, gather_payloads
from forgather.ml.distributed.rank_messages import decode, encode, register_type

T = TypeVar("T")

_MOST_CHARACTERS = 2**16
"""Length of a message, and of a traceback, that another rank may send."""


class DistributedError(RuntimeError):
    """Error of the lowest failing rank, raised on every rank.

    `rank` is the global rank of the failed process. It is None when the ranks lost contact and the failed rank is
    unknown. Texts are bounded, and control characters in them are visible: they come from another process.
    """

    def __init__(self, during: str, rank: int | None, error_type: str, message: str, traceback_text: str = "") -> None:
        during, error_type = printable_line(during), printable_line(error_type)
        # The end of a traceback says more than its beginning.
        message = printable(message[:_MOST_CHARACTERS])
        traceback_text = printable(traceback_text[-_MOST_CHARACTERS:])
        # Pickle passes `args` back to the constructor, so `args` must hold all fields.
        super().__init__(during, rank, error_type, message, traceback_text)
        self.during = during
        self.rank = rank
        self.error_type = error_type
        self.message = message
        self.traceback_text = traceback_text

    @classmethod
    def describing(cls, error: BaseException, during: str, rank: int | None) -> "DistributedError":
        """Return a report about `error`; a `DistributedError` is returned unchanged and keeps its original rank."""
        if isinstance(error, DistributedError):
            return error
        text = "".join(traceback.format_exception(error))
        return cls(during, rank, type(error).__name__, str(error), text)

    def __str__(self) -> str:
        if self.rank is None:
            return (
                f"contact with the other ranks was lost while {self.during}: {self.error_type}: {self.message}\n"
                "A rank has died, exited, or run different code. Its own output shows the cause."
            )
        headline = f"rank {self.rank} failed while {self.during}: {self.error_type}: {self.message}"
        if not self.traceback_text:
            return headline
        return f"{headline}\n\nTraceback of rank {self.rank}:\n{self.traceback_text.rstrip()}"


register_type(DistributedError, lambda error: error.args, lambda fields: DistributedError(*fields))


class Peers:
    """Ranks of a process group that act together and exchange small values over gloo.

    Values are numbers, text, bytes, tensors, NumPy arrays, enums, dataclasses and containers of them. Mappings arrive as
    dicts.

    Every method is collective: all ranks of the group call it, in the same order. `rank` and `size` count inside the
    group. The default group contains all ranks, or only this process if torch.distributed is not initialised.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = get_global_process_group() if group is None else group
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)
        # Torch returns rank -1 for a process outside the group. Its collectives would return at once, without a result.
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the process group passed to it. "
                "Pass each rank a group that contains it."
            )

    @classmethod
    def world(cls) -> "Peers":
        """Return the peers of all ranks of the job."""
        return cls()

    def gather(self, value: T, during: str = "gathering a value from every rank") -> list[T]:
        """Return the values of all ranks in rank order; the error message names `during` if contact is lost.

        Values that are equal on several ranks may be one object. Do not modify them.
        """
        if self.size == 1:
            return [value]
        with _contact(during):
            parcels = gather_payloads(_pack(value, during), self._group, control_device(self._group))
        # In rank order, so that all ranks raise the error of the same rank. Equal parcels are decoded once: with
        # thousands of ranks, that is most of the time and memory of a gather.
        unpacked = {parcel: _unpack(parcel) for parcel in dict.fromkeys(parcels)}
        return [unpacked[parcel] for parcel in parcels]

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source` (counted inside the group) on every rank."""
        if self.size == 1:
            return value
        during = f"broadcasting a value from rank {source} of the group"
        parcel = _pack(value, during) if self.rank == source else b""
        with _contact(during):
            parcel = broadcast_payload(parcel, source, self._group, control_device(self._group))
        received: T = _unpack(parcel)
        return received

    def agree(self, error: BaseException | None, during: str) -> None:
        """Raise the same `DistributedError` on every rank when any rank passes an error.

        The error describes the lowest failing rank. A failing rank chains its own error as the cause. Without a failure
        the cost is one all-reduce of a single integer. If a rank has died, its neighbours in the all-reduce fail at
        once, and the other ranks fail when those neighbours disconnect. So let the error end the process.
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
        """Run the body, then `agree` on whether it succeeded on every rank.

        The body must contain no collectives. A rank that fails half-way would reach the all-reduce of the agreement
        while the other ranks wait in a collective of the body, and the two collectives would be matched with each
        other.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, on every rank, by the agreement below
            failure = error
        except BaseException as stop:
            # KeyboardInterrupt and SystemExit are re-raised unchanged on this rank. The other ranks must learn that
            # this rank is leaving, or they would wait for it.
            with suppress(DistributedError):
                self.agree(stop, during)
            raise
        self.agree(failure, during)

    def _lowest_failing_rank(self, error: BaseException | None, during: str) -> int:
        """Return the lowest failing rank inside the group, or `size` if no rank failed."""
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
        """Return the report of `failed_rank` after every rank has received it."""
        with _contact(during, error):
            parcel = b"" if report is None else _pack(report, during)
            parcel = broadcast_payload(parcel, failed_rank, self._group, control_device(self._group))
        # A rank that exits closes its connections and could interrupt a broadcast in progress. The barrier keeps every
        # rank here until all ranks have the report.
        with suppress(RuntimeError):
            dist.barrier(group=self._group)
        sent: DistributedError = _unpack(parcel)
        return sent


def agree(error: BaseException | None, during: str, group: ProcessGroup | None = None) -> None:
    """Call `Peers.agree` among the ranks of `group` (default: all ranks)."""
    Peers(group).agree(error, during)


@contextmanager
def agreement(during: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Run the body under `Peers.agreement` of `group` (default: all ranks); the body must contain no collectives."""
    with Peers(group).agreement(during):
        yield


@contextmanager
def _contact(during: str, own_error: BaseException | None = None) -> Iterator[None]:
    """Convert a backend error about a dead or silent peer into a `DistributedError`."""
    try:
        yield
    except RuntimeError as lost:
        report = DistributedError(during, None, type(lost).__name__, str(lost))
        # An error of this rank is closer to the root cause than the broken connection, so it is chained instead.
        raise report from (lost if own_error is None else own_error)


def _pack(value: object, during: str) -> bytes:
    """Return the message for a value, or for a `DistributedError` if it cannot be sent."""
    # Raising here would leave the other ranks waiting in the collective. The receivers raise the error instead.
    try:
        return b"".join(encode((value, None)))
    except Exception as error:  # noqa: BLE001 - raised by the receivers, this rank included
        return b"".join(encode((None, DistributedError.describing(error, during, _global_rank()))))


def _unpack(parcel: bytes) -> Any:
    value, error = decode(as_tensor(parcel, torch.device("cpu")))
    if error is not None:
        raise error
    return value


def _global_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def control_device(group: ProcessGroup | None) -> torch.device:
    """Return a device that the backend of the group supports, the CPU if possible."""
    # The backend configuration has the form "cpu:gloo,cuda:nccl".
    device_types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in device_types else device_types[0])
