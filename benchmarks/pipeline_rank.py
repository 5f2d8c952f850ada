"""One rank of the benchmark of pipeline-parallel steps, which has torchrun start it.

    torchrun --nproc-per-node 2 benchmarks/pipeline_rank.py DIRECTORY SIZE SCHEDULE ROUNDS NAME...

Rank 0 leaves the costs of each contender in the directory.
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
# A turn begins with steps that are not measured, in which batches are read ahead as far as they are at the end of it.
_LEAD_STEPS = 3
_TIMEOUT = timedelta(minutes=5)
# Of the length of the first update, which is about as long whatever the gradients are, and in another direction if they differ.
_LARGEST_DIFFERENCE = 0.05


class PipelineRunner(Runner):
    """A contender of which all ranks take the same steps at the same time."""

    task: PipelineTask

    def __init__(self, name: str, task: PipelineTask, group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, lambda name, task: run(name, task, CONTENDERS))

    def take_steps(self, num_steps: int) -> Cost:
        """What a step costs all ranks together, over that many; returns when all ranks have taken them."""
        super().take_steps(_LEAD_STEPS)
        costs: list[Cost] = [Cost(0, 0)] * dist.get_world_size(self._group)
        dist.all_gather_object(costs, super().take_steps(num_steps), group=self._group)
        return Cost(max(cost.wall for cost in costs), sum(cost.cpu for cost in costs))


def _require_same_training(runners: Sequence[PipelineRunner]) -> None:
    """What does something else than the first one must not be compared with it; to be called after one step of each."""
    reference = runners[0].task.parameters
    for runner in runners:
        own = runner.task.parameters
        if own.keys() != reference.keys():
            raise RuntimeError(
                f"{runner.name} trains other parameters than {runners[0].name} on rank {dist.get_rank()}."
            )
        difference = torch.cat([(own[name] - reference[name]).detach().flatten() for name in reference])
        if difference.norm() > _LARGEST_DIFFERENCE * LEARNING_RATE * difference.numel() ** 0.5:
            raise RuntimeError(f"{runner.name} came to other parameters in a step than {runners[0].name} did.")


def main() -> None:
    directory, size_name, schedule, num_rounds, *names = sys.argv[1:]
    (size,) = (size for size in SIZES if size.name == size_name)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    # Apart from the group that the contenders use, so that none of their communication can be taken for this.
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
