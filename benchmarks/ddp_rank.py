"""One rank of the benchmark of data-parallel steps, which starts it with the environment variables that torchrun sets.

    python benchmarks/ddp_rank.py DIRECTORY SIZE ROUNDS NAME...

Rank 0 leaves the costs of each contender in the directory.
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
# A turn begins with steps that are not measured, in which batches are read ahead as far as they are at the end of it.
_LEAD_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


class RankRunner(Runner):
    """A contender of which all ranks take the same steps at the same time."""

    def __init__(self, name: str, task: RankTask, group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, _run)
        self._require_own_batches(task)

    def take_steps(self, num_steps: int) -> Cost:
        """What a step costs rank 0, over that many; returns when all ranks have taken them."""
        super().take_steps(_LEAD_STEPS)
        return _gather(super().take_steps(num_steps), self._group)[0]

    def close(self) -> None:
        self._require_same_parameters()
        super().close()

    # What is not data-parallel training must not be measured as if it were.

    def _require_own_batches(self, task: RankTask) -> None:
        inputs = _gather(task.first_input, self._group)
        shape = (task.size.batch_size, task.size.sequence_length)
        if any(one is None or one.shape != shape for one in inputs) or torch.equal(inputs[0], inputs[1]):
            raise RuntimeError(f"{self.name} did not give each rank a batch of its own, of shape {shape}.")

    def _require_same_parameters(self) -> None:
        own = torch.cat([one.detach().flatten() for one in self.task.model.parameters()])
        of_first = own.clone()
        dist.broadcast(of_first, 0, group=self._group)
        if not all(_gather(torch.equal(own, of_first), self._group)):
            raise RuntimeError(f"{self.name} left the ranks with different parameters.")


class _Here(threading.local):
    """What the thread of a contender calls after each step of its optimizer."""

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
    # Apart from the group that the contenders use, so that none of their communication can be taken for this.
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
