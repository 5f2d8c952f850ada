"""ProfilerCallback: writes traces of torch.profiler for a few training steps.

After the last cycle the profiler is stopped, so that the rest of the run has no overhead.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from forgather._run_files import check_in_run, make_folder_in_run
from forgather.ml.distributed import get_rank
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class ProfilerCallback(TrainerCallback):
    """Callback that writes traces of a few training steps to `<output_dir>/profile`, for chrome://tracing or Perfetto.

    In each cycle, `wait` steps are not traced, `warmup` steps are traced and discarded, and `active` steps are kept.
    After `repeat` cycles the profiler stops, and the rest of the run has no overhead. Rank 0 writes a trace. With
    `all_ranks`, every rank writes its own.
    """

    changes_control = False

    def __init__(
        self,
        wait: int = 2,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        all_ranks: bool = False,
    ) -> None:
        if min(wait, warmup) < 0 or min(active, repeat) < 1:
            raise ValueError(
                f"wait={wait}, warmup={warmup}, active={active}, repeat={repeat} cannot be used: wait and warmup must be at "
                "least 0, active and repeat at least 1."
            )
        self._schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._num_steps = (wait + warmup + active) * repeat
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._all_ranks = all_ranks
        self._profiler: torch.profiler.profile | None = None
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not (state.is_world_process_zero or self._all_ranks):
            return
        directory = make_folder_in_run(args.output_dir, "profile")

        def write_trace(profiler: torch.profiler.profile) -> None:
            path = os.path.join(directory, f"rank{get_rank()}_step{self._step}.json.gz")
            check_in_run(*os.path.split(path))
            profiler.export_chrome_trace(path)
            logger.info("Profiler trace of the steps up to %d: %s", self._step, path)

        self._profiler = torch.profiler.profile(
            activities=_activities(), schedule=self._schedule, on_trace_ready=write_trace, **self._options
        )
        self._profiler.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._profiler is None:
            return
        self._step = state.global_step
        self._profiler.step()
        if self._profiler.step_num >= self._num_steps:
            self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def _activities() -> list[ProfilerActivity]:
    find: Callable[[], set[ProfilerActivity]] = torch.profiler.supported_activities
    return sorted(find(), key=lambda activity: activity.name)
