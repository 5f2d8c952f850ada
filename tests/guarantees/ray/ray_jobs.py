"""Training functions that Ray calls on its workers, and a cluster of two nodes on this machine."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forgather.ml.trainer.callbacks import RayReportCallback
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.support.elastic_callback import NotesSteps
from tests.support.pipelines import llama
from tests.support.rank_nursery import REPOSITORY
from tests.support.tiny_models import quiet_trainer, token_samples

NUM_STEPS = 24
SAVE_STEPS = 5
GLOBAL_BATCH = 8
KINDS: dict[str, tuple[type[Trainer], int, dict[str, Any]]] = {
    "single": (Trainer, 1, {}),
    "ddp": (DDPTrainer, 2, {}),
    "fsdp2": (FSDP2Trainer, 2, {}),
    "pipeline": (PipelineTrainer, 2, {"per_device_train_batch_size": 8, "n_microbatches": 2}),
}
"""Trainer class, number of workers and further arguments."""
POLL_SECONDS = 0.1
VARIABLES = {
    "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY))),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class HoldsAtSteps(TrainerCallback):
    """Stops the last rank after some steps until the test releases it, so that the test can kill a worker there.

    `steps` maps a number of ranks to a step. The rank writes its process id to `held-<ranks>` and waits for
    `released-<ranks>`, both beside the output directory.
    """

    def __init__(self, steps: dict[int, int]) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        folder = Path(args.output_dir).parent
        if rank != size - 1 or state.global_step != self._steps.get(size):
            return
        (folder / f"held-{size}.part").write_text(str(os.getpid()))
        (folder / f"held-{size}.part").rename(folder / f"held-{size}")
        while not (folder / f"released-{size}").exists():
            time.sleep(POLL_SECONDS)


def build_trainer(kind: str, output_dir: str, *callbacks: Any, **more: Any) -> Trainer:
    trainer_class, _, arguments = KINDS[kind]
    options = {"pipe_schedule_factory": "1f1b"} if kind == "pipeline" else {}
    options |= more.pop("trainer_options", {})
    settings: dict[str, Any] = {
        "max_steps": NUM_STEPS,
        "global_batch_size": GLOBAL_BATCH,
        "per_device_train_batch_size": 4,
        "shuffle": True,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "learning_rate": 0.05,
        "momentum": 0.9,
        "max_grad_norm": 0.5,
    }
    return quiet_trainer(
        Path(output_dir),
        None,
        token_samples(60),
        *callbacks,
        trainer_class=trainer_class,
        trainer_options={"model_init": lambda: llama(4), **options},
        **{**settings, **arguments, **more},
    )


def train(settings: dict[str, Any]) -> None:
    """Train on a worker of Ray: kind, output directory, `hold`, options of the callback, further arguments."""
    callbacks: list[Any] = [RayReportCallback(**settings.get("report", {}))]
    if settings["kind"] == "ddp":
        callbacks += [NotesSteps(), HoldsAtSteps(settings.get("hold", {}))]
    build_trainer(settings["kind"], settings["output_dir"], *callbacks, **settings.get("arguments", {})).train()


def train_on_rank(kind: str, output_dir: str) -> None:
    """Train the same on a rank without Ray."""
    from tests.support.data_parallel import environment

    options = {} if kind == "single" else {"distributed_env": environment()}
    build_trainer(kind, output_dir, trainer_options=options).train()


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a cluster of Ray with two nodes of one processor, and connect to it."""
    import ray
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=True, runtime_env={"env_vars": VARIABLES})
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
