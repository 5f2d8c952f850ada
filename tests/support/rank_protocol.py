"""Messages between the test process and its rank workers, and the environment of a rank."""

import traceback
from dataclasses import dataclass
from typing import Any


@dataclass
class Job:
    """Function call for one rank."""

    rank: int
    world_size: int
    store_port: int
    module: str
    qualname: str
    pickled_args: bytes


@dataclass
class Ready:
    """The rank has joined its process group and starts the call; the time limit starts now."""


@dataclass
class Finished:
    """The call returned or raised; the worker keeps its process group until `TearDown`."""

    pickled_value: bytes | None
    error: tuple[str, str, str] | None


@dataclass
class TearDown:
    """All ranks have finished: leave the process group."""


@dataclass
class Clean:
    """The worker is reusable, or `leftovers` names what makes it unfit for another call."""

    leftovers: list[str]


@dataclass
class RankOutcome:
    """Outcome of the call on one rank; `error_type` and `error_message` are None without an error."""

    value: Any = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None

    @property
    def failed(self) -> bool:
        return self.error_type is not None


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Return name, message and full traceback of an exception, as strings, because it may not survive pickling."""
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank on a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
