"""One rank of the data-parallel benchmark. `ddp.py` starts it with the environment variables that torchrun sets.

    python benchmarks/ddp_rank.py DIRECTORY SIZE ROUNDS NAME...

Rank 0 writes the costs of each contender to the directory.
"""

import torch
import torch.distributed as dist
from ddp_contenders import CONTENDERS, RankTask
from rank_runner import RankRunner, gather, run_rank
from step_contenders import Size


class ReplicaRunner(RankRunner):
    """Contender that holds the same parameters on all ranks."""

    def close(self) -> None:
        self._require_same_parameters()
        super().close()

    def _require_same_parameters(self) -> None:
        own = torch.cat([one.detach().flatten() for one in self.task.model.parameters()])
        of_first = own.clone()
        dist.broadcast(of_first, 0, group=self._group)
        if not all(gather(torch.equal(own, of_first), self._group)):
            raise RuntimeError(f"{self.name} left the ranks with different parameters.")


def _make_runner(name: str, size: Size, directory: str, group: dist.ProcessGroup) -> ReplicaRunner:
    return ReplicaRunner(name, RankTask(size, directory), CONTENDERS, group)


if __name__ == "__main__":
    run_rank(_make_runner)
