"""Small job with one rank that hangs, for every strategy: `main([DIRECTORY, KIND, FAULT, RANK, SECONDS])`.

The time limits of the watch are `SECONDS`. The fault begins after a few steps, and touches the file "began". The job
needs only torch, so that it starts fast.
"""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.distributed import DistributedEnvironment, StaticDistributedEnvironment, get_rank, record_entry_point
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer

KINDS: dict[str, tuple[type[Trainer[Any]], int]] = {
    "single": (Trainer, 1),
    "ddp": (DDPTrainer, 2),
    "fsdp2": (FSDP2Trainer, 2),
    "pipeline": (PipelineTrainer, 2),
    "hybrid": (HybridTrainer, 4),
}
"""Trainers with their numbers of ranks."""
FAULTY_STEP = 4
SECONDS_OF_SETUP = 90.0
VOCABULARY = 16


class Fault:
    """Fault of one rank at one place, from the given step on."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self.name = name
        self.is_due = False

    def happen(self, place: str) -> None:
        """Hang here, if this is the place of the fault and its step has come."""
        if place == self.name.split("-")[0] and self.is_due:
            (self._directory / "began").touch()
            self.is_due = False
            self._hang()

    def _hang(self) -> None:
        how = self.name.partition("-")[2]
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "gil":
            # Backtracking without end, in C code that never releases the GIL.
            re.match("(a*)*(a*)*(a*)*b", "a" * 60)
        elif how == "none":
            # The test acts now.
            return
        elif how == "orphan-kill":
            start_stubborn_child(self._directory / "children")
            # Longer than the watcher process takes to look at the children.
            time.sleep(4.0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "orphan-sleep":
            start_stubborn_child(self._directory / "children")
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stopworker":
            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
        while how in ("loop", "sleep", "orphan-sleep"):
            if how != "loop":
                time.sleep(0.01)


def start_stubborn_child(path: Path) -> None:
    """Start a process with a child of its own, in another session. Both ignore signals, and note their ids in a file."""
    sleeping = f"import os, signal, time; open({str(path)!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.signal(15, 1)"
    child = f"{sleeping}; time.sleep(600)"
    parent = f"{sleeping}; import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", parent], start_new_session=True)
    while not path.exists() or path.read_text().count("\n") < 2:
        time.sleep(0.02)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Model that follows the protocol of the splitter for causal language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_encoder = nn.Embedding(VOCABULARY, 8)
        self.layer_stack = nn.ModuleList(Layer() for _ in range(2))
        self.output_decoder = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden)
        logits: Tensor = self.output_decoder(hidden)
        return logits


class Samples:
    """Dataset with the fault "dataset"."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._fault.happen("dataset")
        return {"input_ids": torch.arange(6) + index % 9, "labels": torch.arange(6) + index % 8}


class Faulty:
    """Callback with the faults "callback" and "state", which makes all faults due at their step."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._fault.name.startswith("setup"):
            self._fault.is_due = True
            self._fault.happen("setup")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Slow enough for the watcher processes to start before the fault.
        time.sleep(0.4)
        # Nodes need a few seconds to exchange their first notes.
        self._fault.is_due = state.global_step >= (
            3 * FAULTY_STEP if self._fault.name.endswith("none") else FAULTY_STEP
        )
        self._fault.happen("callback")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._fault.happen("evaluation")

    def state_dict(self) -> dict[str, Any]:
        self._fault.happen("state")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def loss_with(fault: Fault) -> Any:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        fault.happen("loss")
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


def arguments(directory: Path, kind: str, fault: Fault, seconds: float) -> dict[str, Any]:
    pipeline = {"n_microbatches": 2} if kind in ("pipeline", "hybrid") else {}
    hybrid = {"pp_size": 2} if kind == "hybrid" else {}
    own_data = {"dispatch_batches": False} if kind in ("ddp", "fsdp2") else {}
    limits = dict.fromkeys(("step_timeout", "save_timeout", "data_timeout", "evaluation_timeout"), seconds)
    return {
        "output_dir": str(directory / "output"),
        "use_cpu": True,
        "seed": 3,
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "save_steps": FAULTY_STEP + 1,
        "eval_strategy": "steps" if fault.name.startswith("evaluation") else "no",
        "eval_steps": FAULTY_STEP,
        "dataloader_num_workers": 1 if fault.name.endswith("stopworker") else 0,
        "watch": {**limits, "setup_timeout": SECONDS_OF_SETUP},
        **pipeline,
        **hybrid,
        **own_data,
    }


def train(words: Sequence[str]) -> None:
    directory, kind, name, rank, seconds = Path(words[0]), words[1], words[2], int(words[3]), float(words[4])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    is_faulty = get_rank() == rank
    fault = Fault(directory, name if is_faulty else "none")
    fault.is_due = name.startswith("early")
    fault.happen("early")
    trainer_class, num_ranks = KINDS[kind]
    env = DistributedEnvironment(no_accelerator=True) if num_ranks > 1 else StaticDistributedEnvironment()
    fault.happen("earlyjoined")
    fault.is_due = False
    options: dict[str, Any] = {"pipe_schedule_factory": "1f1b"} if kind in ("pipeline", "hybrid") else {}
    trainer = trainer_class(
        args=arguments(directory, kind, Fault(directory, name), seconds),
        model_init=Model,
        train_dataset=Samples(fault),
        eval_dataset=[Samples(Fault(directory, "none"))[index] for index in range(24)],
        compute_loss_func=loss_with(fault),
        callbacks=[Faulty(fault)],
        default_callbacks=False,
        distributed_env=env,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        **options,
    )
    trainer.train()
    print(f"rank {get_rank()} finished at step {trainer.state.global_step}", flush=True)


def main(words: Sequence[str]) -> None:
    record_entry_point(train)(words)


if __name__ == "__main__":
    main(sys.argv[1:])
