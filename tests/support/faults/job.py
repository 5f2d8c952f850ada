"""Training job that is small enough to start hundreds of times, with components of every sharing pattern."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.files.layout import IN_FOLDER, TRAINER_STATE_NAME
from forgather.ml.checkpoint.foreign.trainer_state import trainer_state_bytes
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager, RNGState
from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.weights.module_weights import create_sharing_metadata, make_shard_index
from forgather.ml.distributed import StaticDistributedEnvironment
from tests.support.warm_up import get_ready_to_fork

VOCABULARY, WIDTH = 96, 32
MAX_SHARD_BYTES = 16 * 1024


class TinyConfig:
    """Minimal Hugging Face configuration for a checkpoint."""

    def save_pretrained(self, folder: str) -> None:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({"model_type": "tiny", "width": WIDTH}, file)


class TinyModel(nn.Module):
    """Model with tied embeddings and one layer; its weights fill more than one shard."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TinyConfig()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.layer(self.embed(tokens))))
        return logits


class Tally:
    """Stateful counter that also accumulates random draws."""

    def __init__(self) -> None:
        self.count = 0
        self.drawn = torch.zeros(3)

    def add(self, count: int) -> None:
        self.count += count
        self.drawn += torch.rand(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "drawn": self.drawn.clone()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.count = state_dict["count"]
        self.drawn = state_dict["drawn"].clone()


class Progress:
    """Trainer state: the global step."""

    def __init__(self, state: SimpleNamespace) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self._state.global_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state.global_step = state_dict["global_step"]


class Job:
    """One rank of the job. All ranks compute the same model; each has its own tallies and random state.

    With `sharded`, each rank holds only its shard of the model and of the moments.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], limit: int | None = None, seed: int = 0, **options: Any
    ) -> None:
        self.rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        self.state = SimpleNamespace(global_step=0)
        self.model = TinyModel()
        self.is_sharded = options.pop("sharded", False)
        if self.is_sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        torch.manual_seed(seed + self.rank)
        self.tallies = {key: Tally() for key in ("node", "group", "dataset", "notes")}
        self.tallies["node"].count, self.tallies["group"].count = 1, 2
        safetensors = options.pop("save_safetensors", True)
        self.layout = options.pop("layout", IN_FOLDER)
        self.manager = CheckpointManager(
            CheckpointConfig(
                output_dir=os.fspath(output_dir),
                save_total_limit=limit,
                save_safetensors=safetensors,
                checkpoint_layout=self.layout,
            ),
            StaticDistributedEnvironment(
                rank=self.rank, local_rank=self.rank, world_size=world_size, local_world_size=world_size
            ),
            self,
            self.model,
            # Ranks that shard a model divide it into files themselves.
            shard_index=None
            if self.is_sharded
            else make_shard_index(
                [self.model.state_dict()],
                safetensors=safetensors,
                max_shard_size=options.pop("max_shard_size", MAX_SHARD_BYTES),
                param_sharing_metadata=create_sharing_metadata(self.model),
            ),
            **options,
        )

    def checkpoint_files(self) -> dict[str, bytes]:
        return {} if self.layout == IN_FOLDER else {TRAINER_STATE_NAME: trainer_state_bytes(self.state, 3, ())}

    def get_state_components(self) -> list[StateComponent]:
        pattern = SharingPattern
        return [
            *self._components_of_model(),
            StateComponent("trainer", Progress(self.state), pattern.GLOBAL),
            StateComponent("node", self.tallies["node"], pattern.PER_NODE),
            StateComponent("group", self.tallies["group"], pattern.PER_GROUP, "everyone"),
            StateComponent("dataset", self.tallies["dataset"], pattern.PER_RANK),
            StateComponent("notes", self.tallies["notes"], pattern.PER_RANK, required=False),
            StateComponent("rng", RNGState(), pattern.PER_RANK),
        ]

    def _components_of_model(self) -> list[StateComponent]:
        if self.is_sharded:
            moments = OptimizerState(self.optimizer, self.model.named_parameters())
            return [
                StateComponent("model", self.model, SharingPattern.PER_RANK),
                StateComponent("optimizer", moments, SharingPattern.PER_RANK),
            ]
        return [
            StateComponent(key, stateful, SharingPattern.REPLICATED, validate_replication=True)
            for key, stateful in (("model", self.model), ("optimizer", self.optimizer))
        ]

    def get_process_groups(self) -> dict[str, ProcessGroup | None]:
        return {"everyone": dist.group.WORLD if dist.is_initialized() else None}

    def train(self, num_steps: int = 1, count: bool = True) -> None:
        """Train on data that depends on the step only; `count=False` keeps the step number."""
        for _ in range(num_steps):
            data = torch.Generator().manual_seed(self.state.global_step)
            tokens = torch.randint(VOCABULARY, (16,), generator=data)
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.state.global_step += int(count)
            for key in ("dataset", "notes"):
                self.tallies[key].add(self.rank + 1)

    def save(self) -> str:
        return self.manager.save_checkpoint()

    def digest(self) -> str:
        """Return a hash of all state that this rank must get back."""
        hasher = hashlib.sha256()
        for name, value in self._content():
            hasher.update(name.encode())
            content = local_part(value.detach()) if isinstance(value, Tensor) else None
            hasher.update(repr(value).encode() if content is None else content.numpy().tobytes())
        return hasher.hexdigest()

    def weights_digest(self) -> str:
        hasher = hashlib.sha256()
        for value in self.model.state_dict().values():
            hasher.update(local_part(value).numpy().tobytes())
        return hasher.hexdigest()

    def _content(self) -> Iterator[tuple[str, Any]]:
        yield from self.model.state_dict().items()
        for number, state in sorted(self.optimizer.state_dict()["state"].items()):
            yield from ((f"optimizer.{number}.{name}", value) for name, value in sorted(state.items()))
        for key, tally in self.tallies.items():
            yield from ((f"{key}.{name}", value) for name, value in tally.state_dict().items())
        yield "global_step", self.state.global_step
        yield "rng", torch.get_rng_state()


def debris(output_dir: str | os.PathLike[str]) -> list[str]:
    """Return hidden names anywhere below the output directory, except the lock file."""
    names = [name for _, folders, files in os.walk(output_dir) for name in (*folders, *files)]
    return sorted(name for name in names if name.startswith(".") and name != ".forgather.lock")


def warm_up() -> None:
    """Run every code path once before jobs are forked, so that no fork pays the start-up cost."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(directory)
        job.train()
        job.save()
        job.manager.load_checkpoint()
        job.manager.close()
    get_ready_to_fork()
