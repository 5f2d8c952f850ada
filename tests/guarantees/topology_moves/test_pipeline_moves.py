"""A run that moves between trainers and topologies ends like a run on one device."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import whole_moments, whole_weights
from tests.support.pipelines import llama, tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import IGNORED

# Batches of 8, the last of an epoch with 4: five steps per epoch. Epochs end within a leg and at the end of a leg.
NUM_SAMPLES = 36
STEPS_PER_LEG = 2
TOLERANCE = 1e-6
# Momentum sums gradients, which differ by the order of float32 additions.
MOMENT_TOLERANCE = 5e-6


class Noting(Trainer):
    """Trainer that records the sample numbers of each batch; an empty batch has none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples: list[list[int]] = []
        self.state_at_start: State | None = None

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        batch = self.window.batches[self.window.number]
        is_empty = isinstance(batch, EmptyBatch)
        self.samples.append([] if is_empty else (batch["input_ids"][:, :2] @ torch.tensor([32, 1])).tolist())
        return super()._forward_backward_step(input_dict, labels)


class NotingDDP(Noting, DDPTrainer):
    pass


class NotingFSDP2(Noting, FSDP2Trainer):
    pass


class NotingPipeline(Noting, PipelineTrainer):
    pass


class NotingHybrid(Noting, HybridTrainer):
    pass


class Leg(NamedTuple):
    """Section of a run with one trainer class and world size."""

    trainer_class: type[Noting]
    settings: dict[str, Any]
    num_ranks: int
    readers: tuple[int, ...]
    """Ranks that together see every sample once, in their order within a step."""


SINGLE = Leg(Noting, {"per_device_train_batch_size": 8}, 1, (0,))
PIPELINE = Leg(NotingPipeline, {"per_device_train_batch_size": 8, "schedule": "1f1b"}, 2, (0,))
HYBRID = Leg(NotingHybrid, {"per_device_train_batch_size": 4, "pp_size": 2, "n_microbatches": 2}, 4, (0, 2))
SHARDED = HYBRID._replace(settings={**HYBRID.settings, "dp_strategy": "shard", "schedule": "1f1b"})
SHARDED_V = SHARDED._replace(settings={**SHARDED.settings, "schedule": "zbv"})
DDP = Leg(NotingDDP, {"per_device_train_batch_size": 4}, 2, (0, 1))
FSDP2 = Leg(NotingFSDP2, {"per_device_train_batch_size": 4}, 2, (0, 1))
FSDP2_OF_FOUR = Leg(NotingFSDP2, {"per_device_train_batch_size": 2}, 4, (0, 1, 2, 3))
HSDP = Leg(NotingFSDP2, {"per_device_train_batch_size": 2, "fsdp2": {"replicate_size": 2}}, 4, (0, 1, 2, 3))
ROUTES: dict[str, list[Leg]] = {
    "all kinds": [
        SINGLE,
        PIPELINE,
        HYBRID,
        DDP,
        Leg(NotingPipeline, {"per_device_train_batch_size": 8}, 4, (3,)),
        SINGLE,
    ],
    # The model is divided differently over the same ranks.
    "layouts": [
        PIPELINE,
        Leg(NotingPipeline, {"per_device_train_batch_size": 8, "schedule": "zbv"}, 2, (1,)),
        PIPELINE,
        HYBRID,
        Leg(NotingHybrid, {"per_device_train_batch_size": 8, "pp_size": 4}, 4, (0,)),
        HYBRID,
    ],
    "sharded stages": [SINGLE, SHARDED, HYBRID, SHARDED_V, FSDP2, SHARDED],
    "sharded stages, pipelines": [PIPELINE, SHARDED, FSDP2, SHARDED_V, PIPELINE, SHARDED],
    "sharded": [FSDP2, HSDP, PIPELINE, FSDP2_OF_FOUR, DDP, SINGLE],
    "sharded, other way": [SINGLE, FSDP2_OF_FOUR, HYBRID, FSDP2, DDP, HSDP],
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(llama, 4),
    "tied gpt2": functools.partial(tied_gpt2, 4),
}
# A large epsilon: where gradients are noise, Adam would otherwise step by the sign of the noise.
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
KINDS = [
    *(("all kinds", model, optimizer) for model in MODELS for optimizer in OPTIMIZERS),
    *((route, model, "adamw") for route in ("layouts", "sharded") for model in MODELS),
    ("sharded, other way", "tied gpt2", "adamw"),
    ("sharded, other way", "llama", "momentum"),
    ("sharded stages", "llama", "adamw"),
    ("sharded stages, pipelines", "tied gpt2", "adamw"),
]
# Every kind of leg, model and optimizer at least once.
SAMPLE = [
    ("all kinds", "tied gpt2", "momentum"),
    ("sharded stages", "llama", "adamw"),
]
KindT = tuple[str, str, str]
"""Route, model, optimizer."""
Order = list[list[int]]


class State(NamedTuple):
    """Weights and moments of a checkpoint."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


class Numbered:
    """Dataset with the sample number in the first two tokens, and varying numbers of targets."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([*divmod(index, 32), *((torch.arange(6) * (index + 3)) % 31).tolist()])
        labels = tokens.clone()
        labels[: index % 5] = IGNORED
        return {"input_ids": tokens, "labels": labels}


def train(leg: Leg, kind: KindT, output_dir: Path, resume: Path | None, max_steps: int) -> tuple[Order, Noting]:
    trainer = trainer_of(
        leg.trainer_class,
        output_dir,
        MODELS[kind[1]],
        Numbered(),
        trainer_options={"optimizer_cls_and_kwargs": OPTIMIZERS[kind[2]]},
        **{
            "shuffle": True,
            "max_steps": max_steps,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 7,
            "save_strategy": "steps",
            "resume_from_checkpoint": False if resume is None else str(resume),
            **leg.settings,
        },
    )
    assert isinstance(trainer, Noting)
    trainer.add_callback(AtStart(trainer))
    trainer.train()
    return trainer.samples, trainer


class AtStart:
    """Callback that keeps the state of a trainer before its first step."""

    changes_control = False

    def __init__(self, trainer: Noting) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.state_at_start = state_of(self._trainer)


def checkpoint_of(directory: Path, number: int, kind: KindT) -> Path:
    return output_of(directory, number, kind) / "checkpoints" / f"checkpoint-{(number + 1) * STEPS_PER_LEG}"


def output_of(directory: Path, number: int, kind: KindT) -> Path:
    return directory / f"leg {number}" / " ".join(kind)


def run_leg(number: int, kind: KindT, directory: Path) -> tuple[Order, State]:
    """Run one leg, and return the samples that this rank saw, with its state before the first step."""
    resume = checkpoint_of(directory, number - 1, kind) if number else None
    leg, output_dir = ROUTES[kind[0]][number], output_of(directory, number, kind)
    samples, trainer = train(leg, kind, output_dir, resume, (number + 1) * STEPS_PER_LEG)
    assert trainer.state_at_start is not None
    return samples, trainer.state_at_start


def in_order(leg: Leg, ranks: list[Order]) -> list[int]:
    """Return the samples of a leg in single-device order."""
    seen = [ranks[rank] for rank in leg.readers]
    return [number for batches in zip(*seen, strict=True) for batch in batches for number in batch]


def loaded(checkpoint: Path, kind: KindT, output_dir: Path) -> State:
    """Load a checkpoint on a single device, and return its state."""
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    _, trainer = train(SINGLE, kind, output_dir, checkpoint, step)
    assert trainer.state.global_step == step and trainer.samples == []
    return state_of(trainer)


def state_of(trainer: Trainer) -> State:
    return State(whole_weights(trainer.unwrapped_model()), whole_moments(trainer))


class Journey:
    """Run that moves between topologies, with a reference run on one device."""

    def __init__(self, kind: KindT, directory: Path) -> None:
        self.kind = kind
        legs = ROUTES[kind[0]]
        self.order: list[int] = []
        self.checkpoints = [checkpoint_of(directory, number, kind) for number in range(len(legs))]
        self.starts: list[list[State]] = []
        """State of all ranks at the start of each leg."""
        for number, leg in enumerate(legs):
            if leg.num_ranks == 1:
                ranks = [run_leg(number, kind, directory)]
            else:
                ranks = run_on_ranks(run_leg, leg.num_ranks, number, kind, directory)
            self.order += in_order(leg, [samples for samples, _ in ranks])
            self.starts.append([state for _, state in ranks])
        samples, trainer = train(SINGLE, kind, directory / "stayed", None, len(legs) * STEPS_PER_LEG)
        self.expected_order = in_order(SINGLE, [samples])
        self.expected = state_of(trainer)


@pytest.fixture(scope="module", params=sampled(KINDS, SAMPLE), ids=" ".join)
def journey(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    return Journey(request.param, tmp_path_factory.mktemp("journey"))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys() and found
    for name, tensor in expected.items():
        difference = float((found[name].double() - tensor.double()).norm() / tensor.double().norm())
        assert difference <= tolerance, f"{name}: {difference:.2e}"


def test_moved_run_ends_like_a_single_device_run(journey: Journey, tmp_path: Path) -> None:
    found = loaded(journey.checkpoints[-1], journey.kind, tmp_path)
    assert_close(found.weights, journey.expected.weights)
    assert_close(found.moments, journey.expected.moments, MOMENT_TOLERANCE)


def test_no_sample_is_repeated_or_skipped(journey: Journey) -> None:
    assert journey.order == journey.expected_order
    first, second = journey.order[:NUM_SAMPLES], journey.order[NUM_SAMPLES : 2 * NUM_SAMPLES]
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES)) and first != second
    assert len(journey.order) == 2 * NUM_SAMPLES + 2 * 8, "the third epoch has begun"


def test_loaded_weights_and_moments_are_bit_equal_to_the_saved_ones(journey: Journey, tmp_path: Path) -> None:
    for number, (checkpoint, ranks) in enumerate(zip(journey.checkpoints, journey.starts[1:], strict=False)):
        expected = loaded(checkpoint, journey.kind, tmp_path / str(number))
        for part in ("weights", "moments"):
            found = {name: tensor for state in ranks for name, tensor in getattr(state, part).items()}
            wanted = getattr(expected, part)
            assert found.keys() >= wanted.keys() and wanted
            for state in ranks:
                for name, tensor in getattr(state, part).items():
                    # A tied weight with a separate stage has separate moments.
                    assert name not in wanted or torch.equal(tensor, wanted[name]), f"leg {number + 1}: {name}"
