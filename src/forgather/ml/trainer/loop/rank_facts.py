"""RankFacts: memory of every rank, and the measured step of a pipeline, collected at log steps for the run record."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from forgather.ml.trainer.ranks.team import Team


@dataclass
class RankFacts:
    """Facts about all ranks as of the last log."""

    memory: list[int] = field(default_factory=list)
    """Bytes of each rank: peak of allocated accelerator memory, or resident memory of the process on the CPU."""
    schedule: dict[str, Any] | None = None
    """Measured pipeline step, until the record has it."""

    def collect_memory(self, team: Team, device: torch.device) -> None:
        """Exchange the memory in use of each rank; collective."""
        # A sum with one entry per rank: the team's sum is much faster than a gather of objects.
        numbers = torch.zeros(team.size, dtype=torch.int64)
        numbers[team.rank] = memory_in_use(device)
        self.memory = [int(number) for number in team.sum(numbers).tolist()]


def memory_in_use(device: torch.device) -> int:
    """Return the peak of allocated accelerator memory; on the CPU, the resident memory of the process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        from forgather.ml.trainer.callbacks.peak_memory import peak_memory_bytes

        return peak_memory_bytes()
