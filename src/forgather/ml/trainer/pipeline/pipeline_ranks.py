"""PipelineRanks: position of this rank in its pipeline, and the process groups between stages.

Every rank of the job belongs to exactly one pipeline. `PipelineTrainer` creates the object from its device mesh.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather.ml.distributed.groups import new_partition


class PipelineRanks:
    """Ranks of this pipeline (`group`), and the global ranks of every pipeline of the job (`pipelines`).

    `replicas` is the group of ranks with copies of the same stages, one rank per pipeline. It is None if there is only
    one pipeline.
    """

    def __init__(
        self, group: ProcessGroup, pipelines: Sequence[Sequence[int]], replicas: ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.pipelines = pipelines
        self.replicas = replicas
        self._return_group: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank within the pipeline."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def replica(self) -> int:
        """Index of this rank's pipeline."""
        return 0 if self.replicas is None else dist.get_rank(self.replicas)

    def return_group(self) -> ProcessGroup:
        """Return a second group of this pipeline's ranks, for sends from higher to lower ranks; collective."""
        # NCCL runs the operations of a group in order. With one group for both directions, ranks could deadlock.
        if self._return_group is None:
            self._return_group = new_partition(self.pipelines)
        return self._return_group
