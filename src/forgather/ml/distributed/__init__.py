"""Distributed processes: environment, process groups, agreement of ranks, small messages.

Which object is for what:

- `DistributedEnvironment`: rank, device and process group of this process; makes `init_process_group` calls.
  `StaticDistributedEnvironment` and `from_env` only describe, and initialise nothing. `get_rank`, `get_world_size`,
  `get_local_rank`, `get_local_world_size` read the launcher's environment variables.
- `get_global_process_group`, `get_local_process_group`: gloo groups for control messages, over all ranks or the ranks of
  this node. `reset_process_groups` forgets them. `get_barrier_fn` makes a barrier for a group.
- `Peers`: the ranks of a group that act together. `gather` and `broadcast` exchange picklable objects; `agree` and
  `agreement` raise one rank's error on every rank as a `DistributedError`. The functions `agree` and `agreement` do this
  for one call, without keeping a `Peers`.
- `main_process_first`: a context that local rank 0 runs before the other ranks of its node (downloads, caches).
- `RankLinks`: the connections for small, frequent messages: a gloo group, and Unix sockets between ranks of one machine.
- `NumberExchange` (made by `number_exchange.number_exchange(links)`): asynchronous sums of a few numbers over `RankLinks`,
  such as the token count of a step. Objects go by `Peers`, tensors by collectives of torch.
- `record_entry_point`: decorates a script's main function, so that torchrun reports the rank that failed first.
- `prefix_logger_rank`: log lines with the rank in front, for chosen ranks.

Used inside: `launch_variables` checks the environment variables, `rendezvous` keeps restarted jobs apart, `shutdown` leaves
the process group when Python exits.
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
