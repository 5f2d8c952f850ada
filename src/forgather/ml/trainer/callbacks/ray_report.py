"""RayReportCallback: reports metrics and checkpoints of a run inside Ray Train to `ray.train.report`.

Invariant: all ranks call `report` at the same events, because it is a barrier over all workers. Checkpoints stay in the
output directory; Ray receives a reference to them, or a copy.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forgather._extras import MissingPackageError, is_installed, missing_message
from forgather.ml.distributed.watch import SAVING, in_phase
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.json_values import to_json
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from ray.train import Checkpoint

REFERENCE_FILE_NAME = "forgather_checkpoint.json"
"""File of a Ray checkpoint that refers to a checkpoint in the output directory."""


class RayReportCallback(TrainerCallback):
    """Callback that reports to Ray Train after each save and at the end of training.

    A report has the newest value of every metric that was logged or evaluated, the step, and `checkpoint_path`, the path
    of the newest checkpoint. `Result.metrics` and `Result.best_checkpoints` of Ray contain them.

    Args:
        copy_checkpoints: upload each checkpoint to `RunConfig(storage_path=...)`. By default Ray stores a reference, a
            directory with one small file, so that the retention of Ray deletes no checkpoint of the output directory.
        report_logs: also report each log record and evaluation, for callbacks of `RunConfig`. Ray collects one report
            every two seconds (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S), and training waits while another is pending.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self, copy_checkpoints: bool = False, report_logs: bool = False) -> None:
        if not is_installed("ray"):
            raise MissingPackageError(f"{missing_message('RayReportCallback', 'ray')}.")
        self._copies = copy_checkpoints
        self._reports_logs = report_logs
        self._metrics: dict[str, Any] = {}
        self._checkpoint: str | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        _require_worker()
        if not os.path.isabs(args.output_dir):
            raise ValueError(
                f"output_dir={args.output_dir!r} is a relative path. Ray starts each worker in a temporary folder of its "
                "session, so checkpoints would be lost with it. Pass an absolute path on storage that all nodes share."
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, trainer: Any, **kwargs: object
    ) -> None:
        # A resumed run may save before it logs or evaluates again.
        self._metrics = {name: value for record in state.log_history for name, value in record.items()}
        self._checkpoint = getattr(trainer, "resume_path", None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._note(state, logs)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._note(state, metrics)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        checkpoint_path: str,
        **kwargs: object,
    ) -> None:
        self._checkpoint = checkpoint_path
        with self._ray_checkpoint(state, copies=self._copies) as checkpoint:
            self._report(state, checkpoint)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Ray keeps only metrics that come with a checkpoint. The last copy was reported with the last save.
        if self._copies:
            self._report(state)
            return
        with self._ray_checkpoint(state, copies=False) as checkpoint:
            self._report(state, checkpoint)

    def _note(self, state: TrainerState, values: Mapping[str, Any]) -> None:
        self._metrics.update(values)
        if self._reports_logs:
            self._report(state)

    @contextlib.contextmanager
    def _ray_checkpoint(self, state: TrainerState, copies: bool) -> "Iterator[Checkpoint | None]":
        """Yield the checkpoint that rank 0 hands to Ray: the directory of the newest one, or a reference to it."""
        from ray.train import Checkpoint

        if not state.is_world_process_zero:
            yield None
        elif copies and self._checkpoint is not None:
            yield Checkpoint.from_directory(self._checkpoint)
        else:
            with tempfile.TemporaryDirectory(prefix="forgather-ray-") as folder:
                with open(os.path.join(folder, REFERENCE_FILE_NAME), "w", encoding="utf-8") as file:
                    json.dump({"checkpoint_path": self._checkpoint}, file)
                yield Checkpoint.from_directory(folder)

    def _report(self, state: TrainerState, checkpoint: "Checkpoint | None" = None) -> None:
        """Report the newest metrics; collective over all workers of Ray."""
        from ray import train

        position = {"step": state.global_step, "epoch": state.epoch, "checkpoint_path": self._checkpoint}
        # A copy to remote storage may take as long as a save.
        with in_phase(SAVING):
            train.report(to_json({**self._metrics, **position}), checkpoint=checkpoint)


def _require_worker() -> None:
    """Raise RuntimeError unless Ray Train runs this function."""
    from ray import train

    try:
        train.get_context()
    except RuntimeError as error:
        raise RuntimeError(
            "RayReportCallback reports to Ray Train, but this process is not a worker of it. Start the run with "
            "ray.train.torch.TorchTrainer(...).fit(), or remove the callback."
        ) from error
