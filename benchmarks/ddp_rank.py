"""One rank of the data-parallel benchmark. `ddp.py` starts it with the environment variables that torchrun sets.

    python benchmarks/ddp_rank.py DIRECTORY SIZE ROUNDS NAME...

Rank 0 writes the costs of each contender to the directory.
"""

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_contenders import CONTENDERS, RankTask
from step import Cost, Runner, take_turns
from step_contenders import SIZES, Task, run
from torch.optim.optimizer import register_optimizer_step_post_hook

RESULT_FILE = "costs.json"
# Unmeasured steps at the start of a turn, so that as many batches are prefetched at its start as at its end.
_LEAD_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


class RankRunner(Runner):
    """Contender that takes the same steps on all ranks at the same time."""

    def __init__(self, name: str, task: RankTask, group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, _run)
        self._require_own_batches(task)

    def take_steps(self, num_steps: int) -> Cost:
        """Return the mean cost of a step on rank 0, when all ranks have taken `num_steps` steps."""
        super().take_steps(_LEAD_STEPS)
        return _gather(super().take_steps(num_steps), self._group)[0]

    def close(self) -> None:
        self._require_same_parameters()
        super().close()

    # These checks ensure that the benchmark measures only real data-parallel training.

    def _require_own_batches(self, task: RankTask) -> None:
        inputs = _gather(task.first_input, self._group)
        shape = (task.size.batch_size, task.size.sequence_length)
        if any(one is None or one.shape != shape for one in inputs) or torch.equal(inputs[0], inputs[1]):
            raise RuntimeError(f"{self.name} did not give each rank its own batch of shape {shape}.")

    def _require_same_parameters(self) -> None:
        own = torch.cat([one.detach().flatten() for one in self.task.model.parameters()])
        of_first = own.clone()
        dist.broadcast(of_first, 0, group=self._group)
        if not all(_gather(torch.equal(own, of_first), self._group)):
            raise RuntimeError(f"{self.name} left the ranks with different parameters.")


class _Here(threading.local):
    """Callback of the current contender's thread, called after each optimizer step."""

    on_step: Callable[[], None] | None = None


_here = _Here()


def _run(name: str, task: Task) -> None:
    _here.on_step = task.on_step
    run(name, task, CONTENDERS)


def _on_optimizer_step(*_: Any) -> None:
    if _here.on_step is not None:
        _here.on_step()


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def main() -> None:
    directory, size_name, num_rounds, *names = sys.argv[1:]
    (size,) = (size for size in SIZES if size.name == size_name)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    # A separate group, so that collectives of the benchmark never match collectives of the contenders.
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    register_optimizer_step_post_hook(_on_optimizer_step)
    runners = [RankRunner(name, RankTask(size, str(Path(directory, name))), group) for name in names]
    costs = take_turns(runners, int(num_rounds))
    for runner in runners:
        runner.close()
    if dist.get_rank() == 0:
        text = json.dumps({name: [asdict(cost) for cost in rounds] for name, rounds in costs.items()})
        Path(directory, RESULT_FILE).write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
