"""One rank of a benchmark of training steps: contenders take turns, in the same order on all ranks.

`ddp_rank.py` and `fsdp2_rank.py` are such ranks. Rank 0 writes the costs of each contender to a directory.
"""

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_contenders import RankTask
from local_ranks import RESULT_FILE
from step import Cost, Runner, take_turns
from step_contenders import SIZES, Contenders, Size, Task, run
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

TIMEOUT = timedelta(minutes=5)
# Unmeasured steps at the start of a turn, so that as many batches are prefetched at its start as at its end.
LEAD_STEPS = 3
# Limit of the parameter difference, as a fraction of the first AdamW update. The length of this update hardly depends
# on the gradients, but its direction does.
_LARGEST_DIFFERENCE = 0.05


class RankRunner(Runner):
    """Contender that takes the same steps on all ranks at the same time."""

    def __init__(self, name: str, task: RankTask, contenders: Contenders[Any], group: dist.ProcessGroup) -> None:
        self._group = group
        super().__init__(name, task, lambda name, task: _run(name, task, contenders))
        self._require_own_batches(task)

    def take_steps(self, num_steps: int) -> Cost:
        """Return the mean cost of a step on rank 0, when all ranks have taken `num_steps` steps."""
        super().take_steps(LEAD_STEPS)
        return gather(super().take_steps(num_steps), self._group)[0]

    def _require_own_batches(self, task: RankTask) -> None:
        """Raise RuntimeError unless the ranks train on different batches, as in real data-parallel training."""
        inputs = gather(task.first_input, self._group)
        shape = (task.size.batch_size, task.size.sequence_length)
        if any(one is None or one.shape != shape for one in inputs) or torch.equal(inputs[0], inputs[1]):
            raise RuntimeError(f"{self.name} did not give each rank its own batch of shape {shape}.")


class _Here(threading.local):
    """Callback of the current contender's thread, called after each optimizer step."""

    on_step: Callable[[], None] | None = None
    depth = 0


_here = _Here()


def _run(name: str, task: Task, contenders: Contenders[Any]) -> None:
    _here.on_step = task.on_step
    run(name, task, contenders)


def _before_optimizer_step(*_: Any) -> None:
    _here.depth += 1


def _after_optimizer_step(*_: Any) -> None:
    _here.depth -= 1
    # An optimizer that wraps another one has not finished its step when the inner step ends.
    if _here.on_step is not None and _here.depth == 0:
        _here.on_step()


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def require_same_updates(parameters: Mapping[str, Mapping[str, Tensor]], learning_rate: float) -> None:
    """Raise RuntimeError unless all contenders have the same parameters; call this after one step of each."""
    (first, reference), *others = parameters.items()
    for name, own in others:
        if own.keys() != reference.keys():
            raise RuntimeError(f"{name} trains other parameters than {first} on rank {dist.get_rank()}.")
        difference = torch.cat([(own[key] - reference[key]).detach().flatten() for key in reference])
        if difference.norm() > _LARGEST_DIFFERENCE * learning_rate * difference.numel() ** 0.5:
            raise RuntimeError(f"{name} and {first} differ in their parameters after one step.")


def write_costs(directory: str, costs: Mapping[str, Sequence[Cost]]) -> None:
    """Write the costs of each contender for the process that started the ranks."""
    text = json.dumps({name: [asdict(cost) for cost in rounds] for name, rounds in costs.items()})
    Path(directory, RESULT_FILE).write_text(text)


def run_rank(
    make_runner: Callable[[str, Size, str, dist.ProcessGroup], RankRunner],
    check: Callable[[Sequence[RankRunner]], None] = lambda runners: None,
) -> None:
    """Measure the contenders that the command line names: DIRECTORY SIZE ROUNDS NAME...

    `make_runner` starts a contender in its own directory; `check` is called after the first step of all of them.
    """
    directory, size_name, num_rounds, *names = sys.argv[1:]
    (size,) = (size for size in SIZES if size.name == size_name)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    # A separate group, so that collectives of the benchmark never match collectives of the contenders.
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    register_optimizer_step_pre_hook(_before_optimizer_step)
    register_optimizer_step_post_hook(_after_optimizer_step)
    runners = [make_runner(name, size, str(Path(directory, name)), group) for name in names]
    check(runners)
    costs = take_turns(runners, int(num_rounds))
    for runner in runners:
        runner.close()
    if dist.get_rank() == 0:
        write_costs(directory, costs)
    dist.destroy_process_group()
