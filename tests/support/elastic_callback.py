"""Callback of elastic jobs in tests: records the samples and the loss of every step, on each rank, as JSON lines."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.trainer_types import TrainerCallback

SECONDS_PER_STEP = 0.15


class NotesSteps(TrainerCallback):
    """Writes one line per step into `<output_dir>/../notes/`: step, world size, rank and sample digests by micro-batch."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        window = kwargs["trainer"].window
        digests = [[] if isinstance(batch, EmptyBatch) else _digests(batch) for batch in window.batches]
        line = {
            "step": state.global_step,
            "size": int(os.environ.get("WORLD_SIZE", "1")),
            "rank": int(os.environ.get("RANK", "0")),
            "samples": digests,
        }
        folder = Path(args.output_dir).parent / "notes"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS_PER_STEP)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and int(os.environ.get("RANK", "0")) == 0:
            with open(Path(args.output_dir).parent / "losses.jsonl", "a") as file:
                file.write(json.dumps([state.global_step, logs["loss"]]) + "\n")


def _digests(batch: Any) -> list[str]:
    return [hashlib.sha256(bytes(row.numpy())).hexdigest()[:8] for row in batch["input_ids"]]
