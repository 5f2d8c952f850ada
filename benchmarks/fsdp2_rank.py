"""One rank of the step section of the FSDP2 benchmark. `fsdp2.py` starts it with the variables that torchrun sets.

    python benchmarks/fsdp2_rank.py DIRECTORY SIZE ROUNDS NAME...

Rank 0 writes the costs of each contender to the directory.
"""

from collections.abc import Sequence

import torch.distributed as dist
from fsdp2_contenders import CONTENDERS, ShardedTask
from rank_runner import RankRunner, require_same_updates, run_rank
from step_contenders import LEARNING_RATE, Size
from torch import Tensor

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part


def _make_runner(name: str, size: Size, directory: str, group: dist.ProcessGroup) -> RankRunner:
    return RankRunner(name, ShardedTask(size, directory), CONTENDERS, group)


def _require_same_training(runners: Sequence[RankRunner]) -> None:
    require_same_updates({runner.name: _shards(runner) for runner in runners}, LEARNING_RATE)


def _shards(runner: RankRunner) -> dict[str, Tensor]:
    return {name: local_part(parameter) for name, parameter in runner.task.model.named_parameters()}


if __name__ == "__main__":
    run_rank(_make_runner, _require_same_training)
