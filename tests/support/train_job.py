"""Training runs that are killed, preempted and resumed; each start runs in a separate process.

Started as `python -m tests.support.train_job <directory>`, with a list of scenarios in `plan.json`. Importing torch and
transformers takes longer than a run, so this process imports them once and forks the starts. It must stay without
threads. A stopped child exits through the interpreter, so that its exit code is the one a user would see.
"""

import functools
import gc
import hashlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer imports it; import it once for all starts.
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import get_scheduler  # noqa: F401 - imported once for all starts

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.trainer.callbacks import default_callbacks
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.launch import RankProcess, free_port
from tests.support.rank_nursery import WarmProgram
from tests.support.rank_protocol import rank_variables

# One more than the cores of a small machine, because a start waits for the disk about as long as it computes.
NUM_LANES = 3
LAUNCH_SECONDS = 240.0
GRACE_SECONDS = 3.0
VOCABULARY = 24
SEQUENCE_LENGTH = 8
NUM_SAMPLES = 26
NUM_EVAL_SAMPLES = 8
IGNORED = -100
# Logged values that must not depend on the number of stops, unlike times and speeds.
LOGGED = (
    *("step", "epoch", "loss", "grad_norm", "max_grad_norm", "learning_rate", "tokens", "total_tokens", "total_flos"),
    *("eval_loss", "eval_tokens", "train_loss", "train_samples", "total_flops"),
)


@dataclass(frozen=True)
class Stop:
    """Point where a start sends itself a signal: at the nth `event` while `state.global_step` is `step`.

    An event is the name of a callback's handler, or "fsync": the nth file or directory that a save flushes to disk, or
    "timer": `step` milliseconds after the start, with SIGALRM, which ends the process as suddenly as SIGKILL.
    """

    event: str
    step: int
    nth: int = 1
    signal: str = "SIGKILL"
    times: int = 1
    to_group: bool = False
    """Send it to the data workers too, as a terminal and some schedulers do."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that send it, each to itself."""


@dataclass(frozen=True)
class Scenario:
    """Run with one start for each stop, and a last start that reaches the end."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    stops: tuple[Stop, ...] = ()
    data: str = "map"
    optimizer: str = "adamw"
    default_callbacks: bool = False
    trainer: str = "single"
    num_ranks: int = 1
    ends_survivors: bool = False
    """End the other ranks after one has failed, as torchrun does. Before they are connected, they cannot notice it."""


@dataclass
class Start:
    """Result of one start of a scenario."""

    exit_code: int
    """With several ranks, the first exit code that is not 0."""
    output: str
    began_at: int | None
    """Global step at the start of training; None if the start ended before."""
    saved: list[int]
    evaluated: list[int]
    facts: dict[str, Any] | None
    """Final state of all ranks, which must not depend on stops; None if a rank did not reach the end."""


BuildT = Callable[[Any, str, Sequence[Any]], Trainer]
FactsT = Callable[[Any], dict[str, Any]]


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=SEQUENCE_LENGTH,
        attention_dropout=0.2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def sample(index: int, noisy: bool) -> dict[str, Tensor]:
    """Return a sequence that depends on its index, with a varying number of targets; every ninth has none.

    The noise draws from all three generators, as data augmentation does.
    """
    tokens = (torch.arange(SEQUENCE_LENGTH) * (index % 5 + 1) + index) % VOCABULARY
    if noisy:
        tokens[random.randrange(SEQUENCE_LENGTH)] = random.randrange(VOCABULARY)
        tokens[np.random.randint(SEQUENCE_LENGTH)] = np.random.randint(VOCABULARY)
        tokens[torch.randint(SEQUENCE_LENGTH, ())] = torch.randint(VOCABULARY, ())
    labels = tokens.clone()
    labels[: SEQUENCE_LENGTH if index % 9 == 0 else index % 7] = IGNORED
    return {"input_ids": tokens, "labels": labels}


class Samples:
    """Map-style dataset."""

    def __init__(self, num_samples: int, noisy: bool) -> None:
        self._num_samples = num_samples
        self._noisy = noisy

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index, self._noisy)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Iterable dataset without a length that keeps its position; with n workers, each takes every nth sample."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._epoch = 0
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        position, self._next = self._next, 0
        for index in range(first + position * stride, self._num_samples, stride):
            position += 1
            self._next = position
            yield sample(index + 3 * self._epoch, noisy=True)
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


class Stopper:
    """Callback that sends signals at a `Stop`."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._num_seen = 0
        if stop.event == "fsync":
            self._watch_fsync()
        elif stop.event == "timer":
            signal.setitimer(signal.ITIMER_REAL, stop.step / 1000)
        else:
            setattr(self, stop.event, self._at_event)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._state = state

    def _at_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._state = state
        self._pass()

    def _watch_fsync(self) -> None:
        fsync: Callable[[Any], None] = os.fsync

        def watched(descriptor: Any) -> None:
            if hasattr(self, "_state"):
                self._pass()
            fsync(descriptor)

        os.fsync = watched

    def _pass(self) -> None:
        if self._state.global_step != self._stop.step:
            return
        self._num_seen += 1
        if self._num_seen == self._stop.nth:
            for _ in range(self._stop.times):
                self._send()

    def _send(self) -> None:
        number = signal.Signals[self._stop.signal]
        if self._stop.to_group:
            send_to_group(number)
        else:
            os.kill(os.getpid(), number)


def send_to_group(number: signal.Signals) -> None:
    """Send a signal to this process and its data workers from a third process.

    torch's data workers exit normally on a SIGTERM from their parent.
    """
    group = os.getpgid(0)
    sender = os.fork()
    if sender == 0:
        os.setpgid(0, 0)
        os.killpg(group, number)
        os._exit(0)
    os.waitpid(sender, 0)
    # Long enough for this process to notice the death of a worker.
    time.sleep(0.3)


class Notes:
    """Callback that writes events to a file immediately, so that they survive a SIGKILL."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("began", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("saved", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._add("evaluated", state.global_step)

    def _add(self, kind: str, step: int) -> None:
        os.write(self._descriptor, (json.dumps([kind, step]) + "\n").encode())


USUAL_SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "seed": 7,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 3,
}
"""Settings of all stopped jobs: they log, evaluate and save in the middle of epochs."""


def build_trainer(scenario: Scenario, output_dir: str, callbacks: Sequence[Any]) -> Trainer:
    settings = {
        **USUAL_SETTINGS,
        "output_dir": output_dir,
        "per_device_train_batch_size": 2,
        # 13 batches per epoch: four windows of three batches, and one window of one batch.
        "gradient_accumulation_steps": 3,
        **scenario.settings,
    }
    return trainer_class(scenario)(
        args=settings,
        model_init=tiny_llama,
        train_dataset=DATASETS[scenario.data](),
        eval_dataset=Samples(NUM_EVAL_SAMPLES, noisy=False),
        optimizer_groups=TWO_OPTIMIZERS if scenario.optimizer == "multiopt" else None,
        callbacks=list(callbacks),
        default_callbacks=scenario.default_callbacks,
    )


def measured_sample(index: int) -> dict[str, Any]:
    return {**sample(index, noisy=False), "length": index * 5 % 7}


def shuffled_stream() -> Any:
    from datasets import Dataset

    made = Dataset.from_list([{"index": index} for index in range(NUM_SAMPLES)]).to_iterable_dataset(num_shards=2)
    return (
        made.shuffle(seed=3, buffer_size=5).map(lambda one: sample(one["index"], noisy=False)).remove_columns("index")
    )


DATASETS: dict[str, Callable[[], Any]] = {
    "measured": lambda: [measured_sample(index) for index in range(NUM_SAMPLES)],
    "shuffled stream": shuffled_stream,
    "map": lambda: Samples(NUM_SAMPLES, noisy=True),
    "quiet map": lambda: Samples(NUM_SAMPLES, noisy=False),
    "stream": lambda: Stream(NUM_SAMPLES),
}


def trainer_class(scenario: Scenario) -> Callable[..., Trainer]:
    if scenario.trainer == "accelerate":
        from accelerate import Accelerator

        from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer

        return functools.partial(AccelTrainer, accelerator=Accelerator(cpu=True))
    return {"single": Trainer, "ddp": DDPTrainer, "fsdp2": FSDP2Trainer}[scenario.trainer]


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=2e-2, momentum=0.9)


TWO_OPTIMIZERS = {
    "attention": {"regex": r"self_attn", "factory": momentum},
    "norms": {"regex": r"norm", "config": {"weight_decay": 0.0}},
}


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """Return the exact final state of a run, under names that identify a difference."""
    model = trainer.unwrapped_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": exact(value)
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state = trainer.state
    return {
        "weights": {name: exact(value) for name, value in model.state_dict().items()},
        "buffers": {name: exact(value) for name, value in model.named_buffers()},
        "moments": moments,
        "groups": [exact({**group, "params": len(group["params"])}) for group in trainer.optimizer.param_groups],
        "schedule": exact(trainer.lr_scheduler.state_dict()),
        "random": {
            "python": exact([version, list(internal), gauss]),
            "numpy": exact([kind, torch.tensor(keys.astype(np.int64)), *rest]),
            "torch": exact(torch.get_rng_state()),
        },
        "loss scale": exact(trainer.amp_context.state_dict()),
        "counters": exact([state.global_step, state.epoch, state.raw_epoch, state.num_input_tokens_seen]),
        "best": exact([state.best_metric, os.path.basename(state.best_model_checkpoint or "")]),
        "log": logged(state.log_history),
        "checkpoints": sorted(os.listdir(os.path.join(trainer.args.output_dir, "checkpoints"))),
    }


def logged(history: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{key: exact(record[key]) for key in LOGGED if key in record} for record in history]


def exact(value: Any) -> str:
    """Return text that is equal exactly if the values are: all digits of floats, a digest for tensors or shards."""
    if isinstance(value, Tensor):
        content = local_part(value.detach()).cpu().contiguous()
        data = content.flatten().view(torch.uint8).numpy().tobytes() if content.numel() else b""
        return f"{content.dtype} {tuple(content.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {exact(inner)}" for key, inner in sorted(value.items(), key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(exact, value)) + "]"
    return repr(value)


def run_start(scenario: Scenario, number: int, directory: str, build: BuildT, find_facts: FactsT) -> None:
    """Run one start in this process, which ends with it; its output goes to a file."""
    os.setpgid(0, 0)
    output = os.open(f"{directory}/output{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    rank = 0 if scenario.num_ranks == 1 else fork_ranks(scenario.num_ranks, scenario.ends_survivors)
    # A new process starts with its own random numbers, which must not matter.
    random.seed()
    np.random.seed()
    torch.seed()
    callbacks: list[Any] = [Notes(f"{directory}/notes{number}" if rank == 0 else os.devnull)]
    if number < len(scenario.stops) and rank in scenario.stops[number].ranks:
        callbacks.append(Stopper(scenario.stops[number]))
    trainer = build(scenario, f"{directory}/output", callbacks)
    trainer.train()
    Path(f"{directory}/facts{number}.{rank}").write_text(json.dumps(find_facts(trainer)))
    if scenario.num_ranks > 1:
        # A rank that exits before the others would close their connections.
        dist.barrier()


def fork_ranks(num_ranks: int, ends_survivors: bool = False) -> int:
    """Fork the ranks and return the rank of this child; the caller waits for the ranks and exits with their code."""
    port = free_port()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(rank_variables(rank, num_ranks, port))
            return rank
        children.append(child)
    if ends_survivors:
        end_survivors(children)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    code = next((code for code in codes if code), 0)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_survivors(children: Sequence[int]) -> None:
    """Wait until a child has failed or all have ended; kill the others a little later."""
    deadline = math.inf
    while time.monotonic() < deadline:
        # The children stay waitable: their exit codes are read later.
        ended = [os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children]
        if all(ended):
            return
        if any(one is not None and one.si_status for one in ended):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)


def run_plan(scenarios: Sequence[Scenario], directory: str) -> tuple[Scenario, int] | None:
    """Run all scenarios, `NUM_LANES` at a time; in a child, return the start that it has to run."""
    waiting = list(scenarios)
    running: dict[int, tuple[Scenario, int]] = {}

    def enter(scenario: Scenario, number: int) -> bool:
        child = os.fork()
        running[child] = (scenario, number)
        return child == 0

    while waiting or running:
        if waiting and len(running) < NUM_LANES:
            scenario = waiting.pop(0)
            os.makedirs(f"{directory}/{scenario.name}")
            if enter(scenario, 0):
                return scenario, 0
            continue
        child, status = os.wait()
        scenario, number = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        Path(f"{directory}/{scenario.name}/code{number}").write_text(str(code))
        if number < len(scenario.stops) and enter(scenario, number + 1):
            return scenario, number + 1
    return None


def run_scenarios(
    scenarios: Sequence[Scenario], directory: Path, module: str = "tests.support.train_job"
) -> dict[str, list[Start]]:
    """Run scenarios in a subprocess, and return the starts of each scenario by name.

    `module` calls `main` with its class of scenarios.
    """
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names), "scenario names must be unique"
    (directory / "plan.json").write_text(json.dumps([asdict(scenario) for scenario in scenarios]))
    process = RankProcess(0, WarmProgram(module, (str(directory),)), {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    code = process.wait(LAUNCH_SECONDS)
    assert code == 0, process.output
    return {scenario.name: starts_of(scenario, directory / scenario.name) for scenario in scenarios}


def starts_of(scenario: Scenario, directory: Path) -> list[Start]:
    return [_read_start(directory, number, scenario.num_ranks) for number in range(len(scenario.stops) + 1)]


def _read_start(directory: Path, number: int, num_ranks: int) -> Start:
    notes_path = directory / f"notes{number}"
    facts = {path.suffix: json.loads(path.read_text()) for path in directory.glob(f"facts{number}.*")}
    all_facts = {
        f"{part} of rank {rank[1:]}": fact for rank, one in sorted(facts.items()) for part, fact in one.items()
    }
    notes = [json.loads(line) for line in notes_path.read_text().splitlines()] if notes_path.exists() else []
    began = [step for kind, step in notes if kind == "began"]
    return Start(
        exit_code=int((directory / f"code{number}").read_text()),
        output=(directory / f"output{number}").read_text(errors="replace"),
        began_at=began[0] if began else None,
        saved=[step for kind, step in notes if kind == "saved"],
        evaluated=[step for kind, step in notes if kind == "evaluated"],
        facts=(facts[".0"] if len(facts) == 1 else all_facts) if len(facts) == num_ranks else None,
    )


def as_stop(values: dict[str, Any]) -> Stop:
    return Stop(**{**values, "ranks": tuple(values["ranks"])})


def main(
    scenario_class: type[Scenario] = Scenario, build: BuildT = build_trainer, find_facts: FactsT = facts_of
) -> None:
    torch.set_num_threads(1)
    directory = sys.argv[1]
    plan = json.loads(Path(directory, "plan.json").read_text())
    scenarios = [scenario_class(**{**one, "stops": tuple(map(as_stop, one["stops"]))}) for one in plan]
    # Use everything once here, so that the starts do not pay for imports on first use.
    default_callbacks()
    with tempfile.TemporaryDirectory() as warm_up:
        build_trainer(Scenario("warm-up", {"max_steps": 1}), warm_up, []).train()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    sys.stdout.flush()
    # A garbage collection in a child would write to, and so copy, all pages that were imported here.
    gc.collect()
    gc.freeze()
    started = time.monotonic()
    mine = run_plan(scenarios, directory)
    if mine is None:
        print(f"{len(scenarios)} scenarios took {time.monotonic() - started:.1f} s")
        return
    scenario, number = mine
    run_start(scenario, number, f"{directory}/{scenario.name}", build, find_facts)
    sys.stdout.flush()
    # The results are written. Shutting the interpreter down would take longer than the run.
    os._exit(0)


if __name__ == "__main__":
    main()
