"""TBLogger callback: writes log and evaluation records, and texts, for TensorBoard.

Rank 0 writes. The directory is checkpointed, so that a resumed run continues the same curves.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forgather._extras import MissingPackageError, is_installed, missing_message
from forgather._run_files import make_folder_in_run
from forgather.ml.checkpoint.state.state_schema import Schema, every, optional, relative_path, that
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.repeated_records import RepeatedRecords
from forgather.ml.trainer.callbacks.support.state_checks import check_callback_state
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_RUNS = "runs"
_in_runs = that(f"a directory below {_RUNS!r} of the run", lambda value: value.startswith(f"{_RUNS}/"))
_STATE = Schema({"directory": optional(every(relative_path, _in_runs))})


class TBLogger(TrainerCallback):
    """Callback that writes log and evaluation records to `args.logging_dir`, or `<output_dir>/runs/<time>_<host>`.

    A resumed run continues in the same directory. It makes TensorBoard purge the records after the checkpoint, because
    those steps are repeated.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self) -> None:
        # All ranks fail here, before training. The import below runs on rank 0 only.
        if not is_installed("tensorboard"):
            raise MissingPackageError(f"{missing_message('TBLogger', 'tensorboard')}.")
        self._directory: str | None = None
        self._writer: SummaryWriter | None = None
        self._records = RepeatedRecords()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        writer = self._open(args, state)
        if state.global_step == 0 and hasattr(args, "to_dict"):
            settings = json.dumps(args.to_dict(), indent=2, default=str)
            writer.add_text("arguments", f"```json\n{settings}\n```", 0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._write(args, state, logs)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._write(args, state, metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def add_text(self, args: TrainingArguments, state: TrainerState, tag: str, text: str) -> None:
        """Write a text for the current step. Other callbacks call this."""
        if state.is_world_process_zero:
            self._open(args, state).add_text(tag, text, state.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"directory": self._directory}

    def check_state_dict(self, state_dict: object) -> None:
        check_callback_state(self, _STATE, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._directory = state_dict["directory"]

    def _open(self, args: TrainingArguments, state: TrainerState) -> "SummaryWriter":
        if self._writer is None:
            # Imported late: TensorBoard is slow to import, and the other ranks do not need it.
            from torch.utils.tensorboard import SummaryWriter

            path = self._choose_directory(args)
            # SummaryWriter drops all events from purge_step on. Events of the checkpoint's own step stay.
            is_continued = state.global_step > 0 and os.path.isdir(path)
            self._writer = SummaryWriter(path, purge_step=state.global_step + 1 if is_continued else None)
        return self._writer

    def _choose_directory(self, args: TrainingArguments) -> str:
        """Return the user's directory, or the directory of this run below `<output_dir>/runs`."""
        given = args.logging_dir
        runs = os.path.join(args.output_dir, _RUNS)
        # A name below `runs` may contain the start time of this process. A resumed run must keep the stored directory.
        if given is not None and not os.path.abspath(given).startswith(os.path.abspath(runs) + os.sep):
            return str(given)
        if self._directory is None:
            path = given or os.path.join(runs, f"{time.strftime('%Y-%m-%dT%H-%M-%S')}_{socket.gethostname()}")
            # Relative, because the output directory may be moved before a resume.
            self._directory = os.path.relpath(path, args.output_dir)
        return make_folder_in_run(args.output_dir, *os.path.normpath(self._directory).split(os.sep))

    def _write(self, args: TrainingArguments, state: TrainerState, values: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero or self._records.is_repeated(state.global_step, values):
            return
        writer = self._open(args, state)
        for tag, number in _scalars(values):
            writer.add_scalar(tag, number, state.global_step)
        writer.flush()


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record with TensorBoard tags: eval/loss, train/loss, train/peak_mem_allocated/0."""
    for name, value in values.items():
        group, _, rest = name.partition("_")
        tag = f"{group}/{rest}" if group in ("eval", "train") and rest else f"train/{name}"
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, (list, tuple)):
            yield from ((f"{tag}/{rank}", item) for rank, item in enumerate(value) if isinstance(item, (int, float)))
        elif isinstance(value, (int, float)):
            yield tag, value
