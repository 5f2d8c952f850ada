"""One rank of the pipeline benchmark. `pipeline.py` starts it with torchrun.

    torchrun --nproc-per-node 2 benchmarks/pipeline_rank.py DIRECTORY SIZE SCHEDULE ROUNDS NAME...

Rank 0 writes the costs of each contender to the directory.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_contenders import CONTENDERS, LEARNING_RATE, SIZES, PipelineTask
from step import Cost, Runner, take_turns
from step_contenders import run

RESULT_FILE = "costs.json"
# Unmeasured steps at the start of a turn, so that as many batches are prefetched at its start as at its end.
_LEAD_STEPS = 3
_TIMEOUT = timedelta(minutes=5)
# Limit of the parameter difference, as a fraction of the first AdamW update. The length of this update hardly depends
# on the gradients, but its direction does.
_LARGEST_DIFFERENCE = 0.05


class PipelineRunner(Runner):
    """Contender that takes the same steps on all ranks at the same time."""

    task: PipelineTask

    def __init__(self, name: str, task: PipelineTask, group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, lambda name, task: run(name, task, CONTENDERS))

    def take_steps(self, num_steps: int) -> Cost:
        """Return the mean cost of a step after `num_steps` on all ranks: longest wall time, sum of CPU times."""
        super().take_steps(_LEAD_STEPS)
        costs: list[Cost] = [Cost(0, 0)] * dist.get_world_size(self._group)
        dist.all_gather_object(costs, super().take_steps(num_steps), group=self._group)
        return Cost(max(cost.wall for cost in costs), sum(cost.cpu for cost in costs))


def _require_same_training(runners: Sequence[PipelineRunner]) -> None:
    """Raise RuntimeError unless all contenders have the same parameters; call this after one step of each."""
    reference = runners[0].task.parameters
    for runner in runners:
        own = runner.task.parameters
        if own.keys() != reference.keys():
            raise RuntimeError(
                f"{runner.name} trains other parameters than {runners[0].name} on rank {dist.get_rank()}."
            )
        difference = torch.cat([(own[name] - reference[name]).detach().flatten() for name in reference])
        if difference.norm() > _LARGEST_DIFFERENCE * LEARNING_RATE * difference.numel() ** 0.5:
            raise RuntimeError(f"{runner.name} and {runners[0].name} differ in their parameters after one step.")


def main() -> None:
    directory, size_name, schedule, num_rounds, *names = sys.argv[1:]
    (size,) = (size for size in SIZES if size.name == size_name)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    # A separate group, so that collectives of the benchmark never match collectives of the contenders.
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    tasks = [PipelineTask(size, str(Path(directory, name)), schedule=schedule) for name in names]
    runners = [PipelineRunner(name, task, group) for name, task in zip(names, tasks, strict=True)]
    _require_same_training(runners)
    costs = take_turns(runners, int(num_rounds))
    for runner in runners:
        runner.close()
    if dist.get_rank() == 0:
        text = json.dumps({name: [asdict(cost) for cost in rounds] for name, rounds in costs.items()})
        Path(directory, RESULT_FILE).write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
