"""One rank of the pipeline benchmark. `pipeline.py` starts it with torchrun.

    torchrun --nproc-per-node 2 benchmarks/pipeline_rank.py DIRECTORY SIZE SCHEDULE ROUNDS NAME...

Rank 0 writes the costs of each contender to the directory.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from pipeline_contenders import CONTENDERS, SIZES, PipelineTask
from rank_runner import LEAD_STEPS, TIMEOUT, gather, require_same_updates, write_costs
from step import Cost, Runner, take_turns
from step_contenders import LEARNING_RATE, run


class PipelineRunner(Runner):
    """Contender that takes the same steps on all ranks at the same time."""

    task: PipelineTask

    def __init__(self, name: str, task: PipelineTask, group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, lambda name, task: run(name, task, CONTENDERS))

    def take_steps(self, num_steps: int) -> Cost:
        """Return the mean cost of a step after `num_steps` on all ranks: longest wall time, sum of CPU times."""
        super().take_steps(LEAD_STEPS)
        costs = gather(super().take_steps(num_steps), self._group)
        return Cost(max(cost.wall for cost in costs), sum(cost.cpu for cost in costs))


def main() -> None:
    directory, size_name, schedule, num_rounds, *names = sys.argv[1:]
    (size,) = (size for size in SIZES if size.name == size_name)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    # A separate group, so that collectives of the benchmark never match collectives of the contenders.
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    tasks = [PipelineTask(size, str(Path(directory, name)), schedule=schedule) for name in names]
    runners = [PipelineRunner(name, task, group) for name, task in zip(names, tasks, strict=True)]
    require_same_updates({runner.name: runner.task.parameters for runner in runners}, LEARNING_RATE)
    costs = take_turns(runners, int(num_rounds))
    for runner in runners:
        runner.close()
    if dist.get_rank() == 0:
        write_costs(directory, costs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
