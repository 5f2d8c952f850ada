"""The place of a process in the job, the groups it belongs to, and how ranks agree that something failed."""

from forgather.ml.distributed.agreement import DistributedError, Peers, agree, agreement
from forgather.ml.distributed.entry_point import record_entry_point
from forgather.ml.distributed.environment import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    from_env,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_size,
    init_from_env,
)
from forgather.ml.distributed.groups import (
    get_barrier_fn,
    get_global_process_group,
    get_local_process_group,
    null_barrier,
    reset_process_groups,
)
from forgather.ml.distributed.main_process_first import main_process_first
from forgather.ml.distributed.rank_logging import prefix_logger_rank

__all__ = [
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedError",
    "Peers",
    "StaticDistributedEnvironment",
    "agree",
    "agreement",
    "from_env",
    "get_barrier_fn",
    "get_global_process_group",
    "get_local_process_group",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "init_from_env",
    "main_process_first",
    "null_barrier",
    "prefix_logger_rank",
    "record_entry_point",
    "reset_process_groups",
]
