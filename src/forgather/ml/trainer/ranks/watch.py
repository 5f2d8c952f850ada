"""Watch over a run of a trainer: place of this rank, time limits from the arguments, and the folder for stacks.

`Trainer` enters `watched` around training and around `evaluate`. Inside a run that is watched already, it
does nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from forgather.ml.distributed import get_rank, get_world_size
from forgather.ml.distributed.failure_reports import raised_on_all_ranks
from forgather.ml.distributed.watch import SETUP, Limits, Place, place_of, register_early, watching
from forgather.ml.distributed.watch.store_notes import identity_of_store, share_key
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.setup.rank_settings import handles_ranks

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

WATCH_FOLDER = "watch"
_LEAST_COMPILED = 600.0
"""Lower bound of measured limits with torch.compile, which may compile again in any step."""


@contextlib.contextmanager
def watched(trainer: "Trainer[Any]", phase: int = SETUP) -> Iterator[None]:
    """Watch this rank during the body, as the arguments say; collective on the first call for a process group."""
    args: TrainingArguments = trainer.args
    if not args.watch.enabled:
        # A rank that fails leaves its report on the board.
        register_early(_place(trainer))
    folder = os.path.join(args.output_dir, WATCH_FOLDER)
    watch = watching(_place(trainer), limits_of(args), folder, phase)
    with watch if args.watch.enabled else contextlib.nullcontext():
        if handles_ranks(type(trainer)):
            with raised_on_all_ranks():
                share_key()
        yield


def limits_of(args: TrainingArguments) -> Limits:
    settings = {name: value for name, value in vars(args.watch).items() if name != "enabled"}
    return Limits(**settings, least=_LEAST_COMPILED) if args.torch_compile else Limits(**settings)


def _place(trainer: "Trainer[Any]") -> Place:
    """Describe this rank, without joining a process group."""
    given = trainer.distributed_env
    if not handles_ranks(type(trainer)) or (given is not None and given.world_size == 1):
        return place_of()
    if dist.is_available() and dist.is_initialized():
        # The address in an environment object may be a default. Two jobs on a machine never share a store.
        return place_of(dist.get_rank(), dist.get_world_size(), *identity_of_store())
    if given is not None:
        return place_of(given.rank, given.world_size, given.master_addr, given.master_port)
    names = ("MASTER_ADDR", "MASTER_PORT")
    address = [os.environ[name] for name in names if name in os.environ]
    return place_of(get_rank(), get_world_size(), *address)
