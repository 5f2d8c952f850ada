"""Distributed processes: environment, process groups, error agreement, small messages between ranks.

Public facade of the package. The comment below the imports lists the purpose of each object.
"""

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
from forgather.ml.distributed.number_exchange import NumberExchange
from forgather.ml.distributed.rank_links import RankLinks
from forgather.ml.distributed.rank_logging import prefix_logger_rank

# - `DistributedEnvironment`: rank, device and process group of this process. It calls `init_process_group`.
#   `StaticDistributedEnvironment` and `from_env` describe an environment and initialise nothing. `get_rank`,
#   `get_world_size`, `get_local_rank` and `get_local_world_size` read the environment variables of the launcher.
# - `get_global_process_group`, `get_local_process_group`: gloo groups for control messages, over all ranks or the ranks
#   of this node. `reset_process_groups` clears the cache of these groups. `get_barrier_fn` returns a barrier of a
#   group.
# - `Peers`: ranks of a group that act together. `gather` and `broadcast` exchange numbers, text, tensors, dataclasses
#   and containers of them. `agree` and `agreement` raise an error of one rank on every rank as a `DistributedError`. The
#   functions of the same names do this without a `Peers` object.
# - `main_process_first`: context manager. Local rank 0 runs its body before the other ranks of the node (downloads,
#   caches).
# - `RankLinks`: connections for small, frequent messages. A gloo group, and Unix sockets between ranks of one machine.
# - `NumberExchange`: asynchronous sums of a few numbers, such as the token count of a step. `number_exchange(links)`
#   creates it. Use `Peers` for objects and the collectives of torch for tensors.
# - `record_entry_point`: decorator of a script's main function, so that torchrun reports the rank that failed first.
# - `prefix_logger_rank`: log lines with a rank prefix, for selected ranks.
#
# Internal modules: `launch_variables` checks the environment variables. `devices` selects the device of a rank.
# `rendezvous` isolates restarted jobs in a shared store. `meeting` ends a waiting process on a stop signal. `shutdown`
# destroys the process group when Python exits.

__all__ = [
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedError",
    "NumberExchange",
    "Peers",
    "RankLinks",
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
