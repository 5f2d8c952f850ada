"""Small run of every strategy whose rank 0 sends requests to itself through the control socket.

Requests are sent at the beginning of a step, and the step continues when the control thread has received them, so that
all runs serve them after the same step.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.loop.signals import Aborted, Preempted
from forgather.ml.trainer.trainer import Trainer
from forgather.tools.control import Control, ControlError, connect
from tests.support.data_parallel import environment
from tests.support.watch_job import KINDS as WATCHED_KINDS
from tests.support.watch_job import VOCABULARY
from tests.support.watch_job import Model as WatchedModel

KINDS: dict[str, tuple[type[Trainer[Any]], int]] = {**WATCHED_KINDS, "accelerate": (AccelTrainer, 2)}
SECONDS_TO_QUEUE = 30.0
# Keys of log records that depend on the clock.
_TIMED = ("time", "runtime", "per_second")

evaluated_at: set[int] = set()
"""Steps after which this rank has run a forward pass in eval mode."""


class Ask(NamedTuple):
    """Request at the beginning of the step after `step` completed ones."""

    step: int
    method: str
    values: Mapping[str, Any] = {}


class Layer(nn.Module):
    """Layer with dropout and running statistics, whose results depend on random numbers and on buffers."""

    present: ClassVar[list[int]] = [0]
    """Number of the step that this rank works on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(dim=(0, 1)), alpha=0.1)
        elif self.present[0] > 1:
            # At the first step the ranks inspect the loss in eval mode.
            evaluated_at.add(self.present[0])
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


class Model(WatchedModel):
    """Model that follows the protocol of the splitter for causal language models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_stack = nn.ModuleList(Layer() for _ in range(2))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def samples(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (number, 6), generator=generator)
    return [{"input_ids": one, "labels": one} for one in ids]


class Client:
    """Callback of rank 0 that sends requests from threads, and collects their answers."""

    changes_control = False

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks
        self._threads: list[threading.Thread] = []
        self.answers: list[Any] = [None] * len(asks)

    def on_step_begin(self, args: Any, state: Any, control: Any, trainer: Any, **_: Any) -> None:
        Layer.present[0] = state.global_step + 1
        for number, ask in enumerate(self._asks):
            if ask.step == state.global_step and state.is_world_process_zero:
                self._send(number, connect(args.output_dir), ask, trainer.desk)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        Layer.present[0] = state.global_step

    def _send(self, number: int, job: Control, ask: Ask, desk: Any) -> None:
        def speak() -> None:
            try:
                self.answers[number] = getattr(job, ask.method)(**ask.values)
            except ControlError as error:
                self.answers[number] = error

        before = received(desk)
        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        self._threads.append(thread)
        until(lambda: received(desk) > before or not thread.is_alive())

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(SECONDS_TO_QUEUE)
        return self.answers


def received(desk: Any) -> int:
    return int(desk.count() + len(desk._leaving))


class Witness:
    """Callback that records, on its rank, the steps of saves and logs, and the logging period of each step."""

    changes_control = False

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.logged: list[int] = []
        self.periods: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.periods.append(args.logging_steps)

    def on_save(self, args: Any, state: Any, control: Any, checkpoint_path: str, **_: Any) -> None:
        self.saved.append(int(checkpoint_path.rpartition("-")[2]))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.logged.append(state.global_step)


class Facts(NamedTuple):
    """What a rank saw, and the bits of its state at the end."""

    ended: str
    step: int
    saved: list[int]
    logged: list[int]
    periods: list[int]
    evaluated: list[int]
    state: dict[str, Any]
    answers: list[Any]


def make_trainer(kind: str, output_dir: str, callbacks: Sequence[Any], **settings: Any) -> Trainer[Any]:
    pipeline = {"n_microbatches": 2} if kind in ("pipeline", "hybrid") else {}
    hybrid = {"pp_size": 2} if kind == "hybrid" else {}
    options: dict[str, Any] = {"pipe_schedule_factory": "1f1b"} if pipeline else {}
    if kind == "accelerate":
        from accelerate import Accelerator

        options["accelerator"] = Accelerator(cpu=True)
    if dist.is_initialized():
        options["distributed_env"] = environment()
    arguments = {
        "output_dir": output_dir,
        "use_cpu": True,
        "seed": 3,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 6,
        "save_total_limit": None,
        **pipeline,
        **hybrid,
        **settings,
    }
    return KINDS[kind][0](
        args=arguments,
        model_init=Model,
        train_dataset=samples(40),
        eval_dataset=samples(12),
        compute_loss_func=loss,
        callbacks=callbacks,
        default_callbacks=False,
        optimizer_cls_and_kwargs=(torch.optim.Adam, {"lr": 0.01}),
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
        **options,
    )


def train(kind: str, output_dir: str, asks: Sequence[Ask] = (), settings: Mapping[str, Any] | None = None) -> Facts:
    """Train one run on this rank."""
    evaluated_at.clear()
    torch.set_num_threads(1)
    client, witness = Client(asks), Witness()
    trainer = make_trainer(kind, output_dir, [client, witness], **(settings or {}))
    ended = "finished"
    try:
        trainer.train()
    except (Preempted, Aborted) as error:
        ended = f"{type(error).__name__} {error.code}"
    return Facts(
        ended,
        trainer.state.global_step,
        witness.saved,
        witness.logged,
        witness.periods,
        sorted(evaluated_at),
        bits_of(trainer),
        client.join(),
    )


def train_several(kind: str, runs: Mapping[str, tuple[str, Sequence[Ask], Mapping[str, Any]]]) -> dict[str, Facts]:
    """Train several runs one after the other."""
    return {name: train(kind, *run) for name, run in runs.items()}


def bits_of(trainer: Trainer[Any]) -> dict[str, Any]:
    """Return the state of this rank: weights, buffers, moments, random state, and the log history."""
    modules = trainer._forward_modules()
    moments = [
        value for state in trainer.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    history = [
        {name: value for name, value in record.items() if not any(part in name for part in _TIMED)}
        for record in trainer.state.log_history
    ]
    return {
        "parameters": [digest(one) for one in modules.parameters()],
        "buffers": [digest(one) for one in modules.buffers()],
        "moments": [digest(one) for one in moments],
        "random": digest(torch.get_rng_state()),
        "history": repr(history),
        "best": repr(trainer.state.best_metric),
    }


def digest(tensor: Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()


def files_of(checkpoint: Path, is_compared: Callable[[str], bool]) -> dict[str, str]:
    """Return the digests of the files of a checkpoint."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and is_compared(path.name)]
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Gate:
    """Callback that holds the run at the beginning of each step until the test lets it pass."""

    changes_control = False

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self.is_held = threading.Event()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._turns.acquire(blocking=False):
            self.is_held.set()
            self.wait_for_the_test()
            self.is_held.clear()

    def wait_for_the_test(self) -> None:
        assert self._turns.acquire(timeout=60)

    def let_pass(self, num_steps: int) -> None:
        self._turns.release(num_steps)


class RunningJob:
    """Context of a run in a thread of the test's process, held before its first step."""

    def __init__(self, output_dir: Path, *callbacks: Any, kind: str = "single", **settings: Any) -> None:
        self.gate = Gate()
        self.output_dir = output_dir
        self.trainer = make_trainer(kind, str(output_dir), [self.gate, *callbacks], **settings)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.gate.is_held.set()

    def __enter__(self) -> "RunningJob":
        self._thread.start()
        assert self.gate.is_held.wait(60) and self.error is None, self.error
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def has_queued(self, number: int) -> bool:
        """Return whether the job has received this number of requests for all ranks, or has ended."""
        return self.trainer.desk is None or self.trainer.desk.count() >= number

    def end(self) -> None:
        """Let the run finish."""
        self.gate.let_pass(1000)
        self._thread.join(60)
        assert not self._thread.is_alive()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + SECONDS_TO_QUEUE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
