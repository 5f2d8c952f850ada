"""PipelineRanks: the place of this rank in its pipeline, and the process groups that stages talk over."""

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from forgather.ml.distributed.environment import get_requested_timeout


class PipelineRanks:
    """`group` are the ranks of this pipeline, `pipelines` the global ranks of each pipeline of the job.

    `replicas` are the ranks with copies of the same stages, one in each pipeline; None with one pipeline.
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
        """The place of this rank in its pipeline."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def replica(self) -> int:
        """The number of this rank's pipeline."""
        return 0 if self.replicas is None else dist.get_rank(self.replicas)

    def return_group(self) -> ProcessGroup:
        """Another group of this pipeline's ranks, for tensors that pass from higher ranks to lower ones; collective."""
        if self._return_group is None:
            for ranks in self.pipelines:
                # Every rank takes part in making every group, its own or not: torch requires it.
                group = dist.new_group(list(ranks), timeout=get_requested_timeout())
                if dist.get_rank() in ranks:
                    self._return_group = cast(ProcessGroup, group)
        assert self._return_group is not None, "every rank is in a pipeline"
        return self._return_group
