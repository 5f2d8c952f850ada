"""Call trace of a training step and of a save after warm-up, per trainer, on real gloo ranks.

`trace_trainer` starts the ranks. Each rank runs this file as a script and trains a tiny Llama on the CPU. Rank 0 counts
calls into functions of `src/forgather` and writes the counts to a file.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

_RESULT_FILE = "trace.json"
_POLL_SECONDS = 0.1
_LIMIT_SECONDS = 300.0
# Steps before the trace, for lazy imports and the creation of buffers and handlers.
_WARM_UP_STEPS = 4
_NUM_STEPS = 5
_NUM_SAVES = 3
_BATCH_SIZE = 4
_SEQUENCE_LENGTH = 8
_VOCABULARY = 32
# Comprehensions count as part of the enclosing function. Python 3.12 and later create no frame for them.
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@dataclasses.dataclass(frozen=True)
class TrainerKind:
    """Public import path of a trainer, and the job that traces it."""

    name: str
    module: str
    num_ranks: int
    settings: dict[str, int]

    @property
    def qualified_name(self) -> str:
        return f"{self.module}.{self.name}"


_PACKAGE = "forgather.ml.trainer"
KINDS = (
    TrainerKind("Trainer", f"{_PACKAGE}.trainer", 1, {}),
    TrainerKind("DDPTrainer", f"{_PACKAGE}.ddp.ddp_trainer", 2, {}),
    TrainerKind("AccelTrainer", f"{_PACKAGE}.accelerate.accel_trainer", 2, {}),
    TrainerKind("PipelineTrainer", f"{_PACKAGE}.pipeline.pipeline_trainer", 2, {"n_microbatches": 4}),
    TrainerKind("HybridTrainer", f"{_PACKAGE}.hybrid.hybrid_trainer", 4, {"n_microbatches": 4, "pp_size": 2}),
)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Counts of one step or one save: distinct functions, their files, and calls from one file into another."""

    functions: int
    files: int
    file_changes: int
    file_names: list[str]


# --- starting the ranks


def trace_trainer(root: Path, kind: TrainerKind) -> dict[str, Trace]:
    """Return the traces of `step` and `save` on rank 0, with the package below `root / "src"`."""
    with tempfile.TemporaryDirectory() as directory:
        _run_ranks(root, kind, Path(directory))
        found = json.loads(Path(directory, _RESULT_FILE).read_text())
    return {name: Trace(**counts) for name, counts in found.items()}


def _run_ranks(root: Path, kind: TrainerKind, directory: Path) -> None:
    command = [sys.executable, __file__, str(root), kind.name, str(directory)]
    logs = [directory / f"rank{rank}.log" for rank in range(kind.num_ranks)]
    with contextlib.ExitStack() as stack:
        processes = []
        for log, environment in zip(logs, _environments(root, kind.num_ranks), strict=True):
            file = stack.enter_context(log.open("w"))
            process = stack.enter_context(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
            # If one rank dies, the others would wait for it.
            stack.callback(process.kill)
            processes.append(process)
        codes = _await_all(processes)
    if any(code != 0 for code in codes):
        texts = (f"--- {log.name}:\n{log.read_text()}" for log in logs)
        reason = f"The trace of {kind.name} failed: ranks ended with {codes} (None: stopped by this tool)."
        raise RuntimeError("\n".join([reason, *texts]))


def _await_all(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until all ranks ended, a rank failed, or the time is over; return exit codes, None for a running rank."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        codes = [process.poll() for process in processes]
    return codes


def _environments(root: Path, num_ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank, with the variables of torchrun if there are several ranks."""
    common = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if num_ranks == 1:
        return [common]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


# --- counting calls


class CallCounter:
    """Profile hook that counts calls into the files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"{folder}{os.sep}"
        self._functions: set[CodeType] = set()
        self._num_changes = 0
        self._is_active = False

    def start(self) -> None:
        self._functions.clear()
        self._num_changes = 0
        self._is_active = True
        # Threads that start from now on count too, since a save may write its files in threads.
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> Trace:
        sys.setprofile(None)
        threading.setprofile(None)
        self._is_active = False
        files = sorted({code.co_filename.removeprefix(self._prefix) for code in self._functions})
        return Trace(len(self._functions), len(files), self._num_changes, files)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not self._is_active or not code.co_filename.startswith(self._prefix):
            return
        if code.co_name not in _COMPREHENSIONS:
            self._functions.add(code)
        caller = self._calling_file(frame)
        self._num_changes += caller is not None and caller != code.co_filename

    def _calling_file(self, frame: FrameType) -> str | None:
        """Return the nearest file of the package on the stack; frames of torch may be in between."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename != __file__:
            if caller.f_code.co_filename.startswith(self._prefix):
                return caller.f_code.co_filename
            caller = caller.f_back
        return None


class TraceCallback:
    """Callback that traces steps, each from the end of the previous step, and then calls of `save_checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.trainer: object = None
        self.steps: list[Trace] = []
        self.saves: list[Trace] = []
        self._counter = CallCounter(folder)
        self._num_ended = 0

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._num_ended += 1
        if self._num_ended > _WARM_UP_STEPS and len(self.steps) < _NUM_STEPS:
            self.steps.append(self._counter.stop())
        if len(self.steps) == _NUM_STEPS:
            self._trace_save()
        elif self._num_ended >= _WARM_UP_STEPS:
            self._counter.start()

    def _trace_save(self) -> None:
        self._counter.start()
        self.trainer.save_checkpoint()  # type: ignore[attr-defined]
        self.saves.append(self._counter.stop())


def median_trace(traces: Sequence[Trace]) -> Trace:
    """Return the median of each count, and the file names of the trace with the median number of files."""
    typical = sorted(traces, key=lambda trace: trace.files)[len(traces) // 2]
    return Trace(
        statistics.median_low(trace.functions for trace in traces),
        typical.files,
        statistics.median_low(trace.file_changes for trace in traces),
        typical.file_names,
    )


# --- one rank


def _run_rank(root: Path, kind: TrainerKind, directory: Path) -> None:
    folder = root / "src" / "forgather"
    callback = TraceCallback(folder)
    trainer_class = getattr(importlib.import_module(kind.module), kind.name)
    _require_tree(trainer_class, folder)
    num_steps = _WARM_UP_STEPS + _NUM_STEPS + _NUM_SAVES
    num_replicas = kind.num_ranks // kind.settings.get("pp_size", 1)
    trainer = trainer_class(
        args={**_settings(directory, num_steps), **kind.settings},
        model_init=_tiny_llama,
        train_dataset=_samples((num_steps + 2) * _BATCH_SIZE * num_replicas),
        callbacks=[callback],
        **_own_options(kind, trainer_class),
    )
    callback.trainer = trainer
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        # Skip the first save: it creates folders and imports modules that no step needs.
        found = {"step": median_trace(callback.steps), "save": median_trace(callback.saves[1:])}
        texts = {name: dataclasses.asdict(trace) for name, trace in found.items()}
        Path(directory, _RESULT_FILE).write_text(json.dumps(texts))


def _require_tree(trainer_class: type, folder: Path) -> None:
    loaded = Path(str(sys.modules[trainer_class.__module__].__file__)).resolve()
    if not loaded.is_relative_to(folder):
        raise RuntimeError(f"{trainer_class.__name__} was imported from {loaded}, which is not below {folder}.")


def _settings(directory: Path, num_steps: int) -> dict[str, object]:
    return {
        "output_dir": str(directory / "output"),
        "use_cpu": True,
        "seed": 0,
        "max_steps": num_steps,
        "save_strategy": "no",
        "logging_strategy": "no",
        "eval_strategy": "no",
        "per_device_train_batch_size": _BATCH_SIZE,
    }


def _own_options(kind: TrainerKind, trainer_class: type) -> dict[str, object]:
    options: dict[str, object] = {}
    # Without this switch in the constructor, passed callbacks replace the default callbacks.
    constructors = [vars(known)["__init__"] for known in trainer_class.__mro__[:-1] if "__init__" in vars(known)]
    if any("default_callbacks" in inspect.signature(constructor).parameters for constructor in constructors):
        options["default_callbacks"] = False
    if kind.name == "AccelTrainer":
        from accelerate import Accelerator  # type: ignore[import-untyped]

        options["accelerator"] = Accelerator(cpu=True)
    return options


def _tiny_llama() -> "nn.Module":
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def _samples(num_samples: int) -> list[dict[str, "Tensor"]]:
    import torch

    rows = torch.arange(num_samples * _SEQUENCE_LENGTH).remainder(_VOCABULARY).view(num_samples, -1)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def _main() -> None:
    root, name, directory = sys.argv[1:]
    _run_rank(Path(root), next(kind for kind in KINDS if kind.name == name), Path(directory))


if __name__ == "__main__":
    _main()
