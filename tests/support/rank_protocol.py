"""The messages between the test process and its rank workers, and the environment of a rank."""

import traceback
from dataclasses import dataclass
from typing import Any


@dataclass
class Job:
    """One function call on one rank."""

    rank: int
    world_size: int
    store_port: int
    module: str
    qualname: str
    pickled_args: bytes


@dataclass
class Ready:
    """The rank has joined its process group and begins the call: the time limit starts to count."""


@dataclass
class Finished:
    """The call returned or raised; the worker keeps its process group until it gets `TearDown`."""

    pickled_value: bytes | None
    error: tuple[str, str, str] | None


@dataclass
class TearDown:
    """All ranks have finished: leave the process group."""


@dataclass
class Clean:
    """The worker is as it was before the call, or names what is left over and makes it unfit for another."""

    leftovers: list[str]


@dataclass
class RankOutcome:
    """What became of the call on one rank; without an error, `error_type` and `error_message` are None."""

    value: Any = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None

    @property
    def failed(self) -> bool:
        return self.error_type is not None


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Name, message and full traceback of an exception, which need not survive pickling."""
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank on a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
