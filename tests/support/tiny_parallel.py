"""Stand-ins for trainers: a small model in every topology, with the state components that its trainer declares."""

import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.manifest import MANIFEST_NAME
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.weights.module_weights import create_sharing_metadata, make_shard_index
from forgather.ml.distributed import from_env

NUM_LAYERS = 4
WIDTH = 4
VOCABULARY = 8
SAVED_SEED = 7
NUM_STEPS = 3
LEARNING_RATE = 0.01

# Values that a test compares: weights and AdamW state, by parameter name.
Memory = dict[str, dict[str, Tensor]]

# Type and message of an error, both empty without an error.
Outcome = tuple[str, str]


class Box:
    """Minimal stateful object: a dictionary."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Failing(Box):
    """Stateful object that fails on one rank when its state is saved or loaded."""

    def __init__(self, rank: int, on: str) -> None:
        super().__init__(value=1)
        self._rank = rank
        self._on = on

    def state_dict(self) -> dict[str, Any]:
        self._maybe_fail("save")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._maybe_fail("load")
        super().load_state_dict(state_dict)

    def _maybe_fail(self, when: str) -> None:
        if when == self._on and dist.get_rank() == self._rank:
            raise ArithmeticError(f"the iterator of rank {self._rank} is broken")


class TinyModel(nn.Module):
    """Model with an embedding, a few layers with one buffer each, and a head that may be tied to the embedding.

    Layers are kept in a ModuleDict, so that a stage with some of the layers keeps the names of the full model.
    """

    def __init__(self, seed: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(NUM_LAYERS)})
        for layer in self.layers.values():
            layer.register_buffer("scale", torch.rand(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Stage(nn.Module):
    """Stage with the layers `first` to `last` - 1 of a model, plus the embedding or the head at the ends."""

    def __init__(self, model: TinyModel, first: int, last: int) -> None:
        super().__init__()
        if first == 0:
            self.embed = model.embed
        self.layers = nn.ModuleDict({str(number): model.layers[str(number)] for number in range(first, last)})
        if last == NUM_LAYERS:
            # A stage on another rank has separate memory, tied or not.
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = nn.Parameter(model.head.weight.detach().clone())


def split(model: TinyModel, boundaries: Sequence[int]) -> list[nn.Module]:
    """Split a model into pipeline stages before each layer in `boundaries`."""
    edges = [0, *boundaries, NUM_LAYERS]
    return [Stage(model, first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class Topology:
    """Division of a model: `boundaries` cut it into stages, and the ranks hold `num_replicas` copies of it."""

    num_replicas: int = 1
    boundaries: tuple[int, ...] = ()
    pattern: SharingPattern = SharingPattern.GLOBAL
    mesh_ranks: tuple[tuple[int, ...], ...] | None = None
    """Ranks of the pipeline of each replica; by default in order."""
    stages_per_rank: int = 1
    """More than one for interleaved schedules: with four stages on two ranks, rank 0 has stages 0 and 2."""

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) + 1

    @property
    def pipeline_size(self) -> int:
        return self.num_stages // self.stages_per_rank

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.pipeline_size

    def make_mesh(self) -> DeviceMesh | None:
        if self.world_size == 1:
            return None
        ranks = self.mesh_ranks or torch.arange(self.world_size).view(self.num_replicas, self.pipeline_size).tolist()
        return DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp"))


SINGLE = Topology()
REPLICATED = Topology(2, pattern=SharingPattern.REPLICATED)
PIPELINE = Topology(1, (2,), SharingPattern.PER_RANK)
PIPELINE_CUT_ELSEWHERE = Topology(1, (3,), SharingPattern.PER_RANK)
PIPELINE_SWAPPED = Topology(1, (2,), SharingPattern.PER_RANK, ((1, 0),))
PIPELINE_INTERLEAVED = Topology(1, (1, 2, 3), SharingPattern.PER_RANK, stages_per_rank=2)
LONG_PIPELINE = Topology(1, (1, 2, 3), SharingPattern.PER_RANK)
HYBRID = Topology(2, (2,), SharingPattern.PER_GROUP)
HYBRID_CUT_ELSEWHERE = Topology(2, (1,), SharingPattern.PER_GROUP)
HYBRID_SWAPPED = Topology(2, (2,), SharingPattern.PER_GROUP, ((1, 0), (3, 2)))
HYBRID_PERMUTED = Topology(2, (2,), SharingPattern.PER_GROUP, ((3, 1), (2, 0)))


@dataclass
class TinyTrainer:
    """Objects that one rank of a job holds, with the declarations of its state."""

    topology: Topology
    tied: bool = False
    seed: int = 0
    shuffled: bool = False
    """Pass the parameters to the optimizer in another order and in two groups."""
    with_index: bool = True
    """Pass a shard index for stages, like a trainer that knows the full model; otherwise the ranks build one."""
    mesh: DeviceMesh | None = field(init=False)
    parts: list[nn.Module] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = self.topology.make_mesh()
        model = TinyModel(self.seed, self.tied)
        self.sharing = create_sharing_metadata(model)
        self.stages: list[nn.Module] = (
            split(model, self.topology.boundaries) if self.topology.num_stages > 1 else [model]
        )
        coordinate = self.mesh.get_coordinate() if self.mesh else None
        self.parts = self.stages[coordinate[1] if coordinate else 0 :: self.topology.pipeline_size]
        self.optimizer = torch.optim.AdamW(self._param_groups(), lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.progress = Box(step=0)

    def _param_groups(self) -> Any:
        parameters = [parameter for _, parameter in self.named_parameters()]
        if not self.shuffled:
            return parameters
        parameters.reverse()
        return [{"params": parameters[1::2]}, {"params": parameters[::2]}]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for part in self.parts for named in part.named_parameters()]

    def train(self) -> None:
        """Run real optimizer steps with gradients that depend only on the parameter's name.

        So every topology reaches the same weights and moments, and every parameter reaches different ones.
        """
        for step in range(NUM_STEPS):
            for name, parameter in self.named_parameters():
                parameter.grad = _gradient(self._canonical(name), step, parameter)
            self.optimizer.step()
            self.scheduler.step()
        self.progress.state["step"] = NUM_STEPS

    def _canonical(self, name: str) -> str:
        return next((group[0] for group in self.sharing if name in group), name)

    @property
    def groups(self) -> dict[str, ProcessGroup]:
        if self.mesh is None:
            return {}
        return {"dp_group": self.mesh.get_group("dp"), "pp_group": self.mesh.get_group("pp")}

    def components(self) -> list[StateComponent]:
        pattern = self.topology.pattern
        shared = SharingPattern.GLOBAL if pattern is SharingPattern.GLOBAL else SharingPattern.REPLICATED
        has_copies = pattern in (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)
        family = "dp_group" if pattern is SharingPattern.PER_GROUP else None
        return [
            StateComponent("model", self.parts[0], pattern, family, validate_replication=has_copies),
            StateComponent("optimizer", self.optimizer, pattern, family, False, validate_replication=has_copies),
            StateComponent("scheduler", self.scheduler, shared, required=False),
            StateComponent("trainer", self.progress, shared, required=False),
            StateComponent("rng", RNGState(SAVED_SEED), SharingPattern.PER_RANK, required=False),
        ]

    def coordinator(self, output_dir: str, **options: Any) -> CheckpointCoordinator:
        index = None
        if self.topology.num_stages > 1 and self.with_index:
            size = self.topology.pipeline_size
            states = [
                {name: tensor for stage in self.stages[place::size] for name, tensor in stage.state_dict().items()}
                for place in range(size)
            ]
            index = make_shard_index(
                states,
                safetensors=options.get("save_safetensors", True),
                param_sharing_metadata=self.sharing,
            )
        return make_coordinator(
            output_dir,
            self.components(),
            self.groups,
            model_parts=self.parts,
            shard_index=index,
            mesh=self.mesh,
            **options,
        )

    def memory(self) -> Memory:
        """Return copies of this rank's weights, buffers and moments by name."""
        held = {name: {"value": tensor.clone()} for part in self.parts for name, tensor in part.state_dict().items()}
        for name, parameter in self.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            held[name].update({key: value.clone() for key, value in moments.items()})
        return held


def _gradient(name: str, step: int, parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(parameter.shape, generator=generator)


def make_coordinator(
    output_dir: str,
    components: Sequence[StateComponent],
    groups: Mapping[str, ProcessGroup] | None = None,
    **options: Any,
) -> CheckpointCoordinator:
    """Build a coordinator for the environment of this process."""
    return CheckpointCoordinator(components, groups or {}, from_env(), output_dir, **options)


def reference(tied: bool) -> Memory:
    """Return the values that every topology holds after `train`, computed in one process without saving."""
    trainer = TinyTrainer(SINGLE, tied, SAVED_SEED)
    trainer.train()
    held = trainer.memory()
    if tied:
        held["head.weight"] = held["embed.weight"]
    return held


def save_trained(output_dir: str, topology: Topology, tied: bool, with_index: bool = True) -> str:
    """Train on ranks, save, and return the path."""
    trainer = TinyTrainer(topology, tied, SAVED_SEED, with_index=with_index)
    trainer.train()
    return trainer.coordinator(output_dir).save_checkpoint(checkpoint_id=NUM_STEPS)


def load_fresh(path: str, topology: Topology, tied: bool, shuffled: bool = False) -> dict[str, Any]:
    """Load on ranks into a job with other initial values, and return the loaded values."""
    trainer = TinyTrainer(topology, tied, seed=1000 + _rank(), shuffled=shuffled)
    trainer.coordinator(str(Path(path).parents[1])).load_checkpoint(path)
    return {
        "memory": trainer.memory(),
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "scheduler": trainer.scheduler.last_epoch,
        "trainer": trainer.progress.state,
        "is_tied": create_sharing_metadata(trainer.parts[0]) == trainer.sharing,
    }


def load_and_save(path: str, output_dir: str, topology: Topology, tied: bool) -> str:
    """Load a checkpoint on ranks into a job of another topology, and save it again."""
    trainer = TinyTrainer(topology, tied, seed=2000 + _rank(), shuffled=True)
    coordinator = trainer.coordinator(output_dir)
    coordinator.load_checkpoint(path)
    return coordinator.save_checkpoint(checkpoint_id=NUM_STEPS)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def captured_logs(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the messages that the package logs in this process."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Collector(level), logging.getLogger("forgather")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def raised(action: Callable[[], Any]) -> Outcome:
    """Return type and message of the error that `action` raises, or empty strings."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
        return type(error).__name__, str(error)
    return "", ""


def entries(directory: str | Path) -> list[str]:
    """Return all names in a directory, hidden ones included, or nothing if it does not exist."""
    path = Path(directory)
    return sorted(entry.name for entry in path.iterdir()) if path.exists() else []


def box_of_rank() -> Box:
    """Return state that identifies its rank."""
    return Box(tensor=torch.arange(3) + 10 * dist.get_rank(), rank=dist.get_rank(), nested={"list": [1, "a"]})


def save_box(output_dir: str, pattern: SharingPattern, box: Box, step: int = 5, key: str = "part") -> str:
    """Save on ranks a checkpoint of one component."""
    component = StateComponent(key, box, pattern)
    return make_coordinator(output_dir, [component]).save_checkpoint(checkpoint_id=step)


def load_box(path: str, pattern: SharingPattern, key: str = "part") -> Any:
    """Load on ranks the same component of a checkpoint."""
    box = Box()
    make_coordinator("unused", [StateComponent(key, box, pattern)]).load_checkpoint(path)
    return box.state


def file_names(path: str) -> set[str]:
    """Return the files of a checkpoint without its manifest."""
    return set(os.listdir(path)) - {MANIFEST_NAME}


def mesh_groups(ranks: list[list[int]]) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return a mesh for a list of pipelines, and its process groups by name."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp"))
    return mesh, {"dp_group": mesh.get_group("dp"), "pp_group": mesh.get_group("pp")}
