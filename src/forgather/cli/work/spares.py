"""Spare ranks of elastic jobs: a layout that does not fit the number of ranks shrinks its data-parallel dimension.

Ranks that do not fit wait until the job ends or restarts; the others train as if they were the full job. Every rank
computes the same layout from its environment variables, before the process group exists. `train` calls it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from torch.distributed import DistError, TCPStore

from forgather._job_secret import SealedStore, given_secret
from forgather.cli.errors import UsageError, complain
from forgather.cli.launch.options import ELASTIC_VARIABLE
from forgather.cli.launch.run_notes import is_preempted, note_preempted
from forgather.config.schema import Configuration

if TYPE_CHECKING:
    from forgather.ml.trainer.fsdp2.fsdp2_arguments import FSDP2TrainingArguments
    from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments

_END = "forgather/spares/end"
_GONE = "forgather/spares/gone"
_FAREWELL_SECONDS = 20.0
_POLL_SECONDS = 0.5


class Layout:
    """Ranks that train, and the number of spares; for a fixed number of nodes, all ranks train."""

    def __init__(self, configuration: Configuration) -> None:
        """Fit the arguments of an elastic job to its present number of ranks; raise UsageError if that is impossible."""
        self.num_ranks = self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._rank = int(os.environ.get("RANK", "0"))
        if ELASTIC_VARIABLE not in os.environ:
            return
        if configuration.trainer.kind == "hybrid":
            self._fit_pipelines(cast("HybridTrainingArguments", configuration.args))
        elif configuration.trainer.kind == "fsdp2":
            self._fit_replicas(cast("FSDP2TrainingArguments", configuration.args))

    @property
    def num_spares(self) -> int:
        return self._world_size - self.num_ranks

    @property
    def is_spare(self) -> bool:
        return self._rank >= self.num_ranks

    def _fit_pipelines(self, args: "HybridTrainingArguments") -> None:
        if args.pp_size is None:
            raise UsageError(
                f"An elastic job (--nnodes {os.environ[ELASTIC_VARIABLE]}) with pipelines needs args.pp_size, the ranks of "
                "each pipeline: their number follows from the ranks that are left."
            )
        num_pipelines = self._world_size // args.pp_size
        self._require(args.elastic, num_pipelines * args.pp_size == self._world_size, f"pp_size={args.pp_size}")
        if num_pipelines == 0:
            raise UsageError(
                f"pp_size={args.pp_size} needs {args.pp_size} ranks, and {self._world_size} are left. Raise the minimum of "
                "--nnodes, or lower pp_size."
            )
        self.num_ranks, args.dp_size = num_pipelines * args.pp_size, num_pipelines
        if self.num_spares:
            self._say(
                f"{self.num_spares} of {self._world_size} ranks wait as spares: {num_pipelines} pipeline(s) of "
                f"{args.pp_size} ranks train"
            )

    def _fit_replicas(self, args: "FSDP2TrainingArguments") -> None:
        size, wanted = self._world_size, args.fsdp2.replicate_size
        # Each replica needs at least two shards.
        fitting = [
            number for number in range(1, wanted + 1) if (size % number == 0 and size // number > 1) or number == 1
        ]
        self._require(args.elastic, wanted in fitting, f"fsdp2.replicate_size={wanted}")
        args.fsdp2.replicate_size = max(fitting)
        if max(fitting) != wanted:
            self._say(f"fsdp2.replicate_size={wanted} does not fit {size} ranks: training with {max(fitting)}")

    def _require(self, policy: str, fits: bool, setting: str) -> None:
        if not fits and policy == "fail":
            raise UsageError(
                f"{setting} does not fit the {self._world_size} ranks that are left, and args.elastic='fail' ends the job. "
                "Start it again with the full number of nodes, or set args.elastic='shrink-data-parallel'."
            )

    def _say(self, message: str) -> None:
        if self._rank == 0:
            complain(message)

    def wait_as_spare(self) -> None:
        """Wait until the training ranks are done. If they disappear instead, let the launcher restart this rank."""
        try:
            store = _store(timedelta(seconds=_FAREWELL_SECONDS))
            while store.find(_END) is None:
                time.sleep(_POLL_SECONDS)
            store.add(_GONE, 1)
        except DistError:
            note_preempted()

    def leave_out_spares(self) -> None:
        """Make this process a rank of a job without spares; called before the process group is created."""
        if self.num_spares:
            local_rank, local_size = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
            os.environ["WORLD_SIZE"] = str(self.num_ranks)
            os.environ["LOCAL_WORLD_SIZE"] = str(min(local_size, self.num_ranks - (self._rank - local_rank)))

    @contextmanager
    def releasing_spares(self) -> Iterator[None]:
        """Tell the spares after the body that the job is done, while rank 0 still hosts the store."""
        yield
        # Spares of a run that a signal has stopped are restarted with it.
        if self._rank == 0 and self.num_spares and not is_preempted():
            self._say_farewell()

    def _say_farewell(self) -> None:
        """Release the spares, and keep the store, which this process hosts, until they have seen it."""
        store = _store(timedelta(seconds=_FAREWELL_SECONDS))
        store.set(_END, "")
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while store.add(_GONE, 0) < self.num_spares and time.monotonic() < deadline:
            time.sleep(0.05)


def _store(timeout: timedelta) -> SealedStore:
    """Return a connection to the store that rank 0 hosts for the process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return SealedStore(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout), given_secret())
