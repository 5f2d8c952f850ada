"""Hybrid (DP x PP) trainer: checkpoint files, comparison of replicas, and rejected settings."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from forgather.ml.checkpoint.coordinator import ReplicationError
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.manifest import CheckpointManifest, read_manifest
from forgather.ml.trainer.hybrid import HybridTrainer, HybridTrainingArguments
from forgather.ml.trainer.pipeline import PipelineTrainer
from tests.support.pipelines import joined, llama, pipeline_trainer, tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, saved_steps, token_samples, weights
from tests.support.tiny_parallel import captured_logs

NUM_STEPS = 20
TIED = ("transformer.wte.weight", "lm_head.weight")
PROMPT = torch.arange(12).reshape(2, 6)
ADAMW: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2})}
SETTINGS: dict[str, Any] = {
    "save_strategy": "steps",
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 4,
    "n_microbatches": 2,
    "max_grad_norm": 1.0,
}


def hybrid_trainer(output_dir: Path, model_init: Any, *callbacks: Any, **settings: Any) -> HybridTrainer:
    options = {"pp_size": 2, **SETTINGS, **settings}
    trainer = trainer_of(
        HybridTrainer, output_dir, model_init, token_samples(22), *callbacks, trainer_options=ADAMW, **options
    )
    assert isinstance(trainer, HybridTrainer)
    return trainer


class Saved(NamedTuple):
    """Result of a tied GPT-2 run on one rank."""

    groups: list[str]
    weights: dict[str, Tensor]
    """Weights of all ranks."""
    tied: tuple[Tensor, ...] | None
    """This rank's copy of the tied weight with its moments, if it has one."""


def tied_copy(trainer: PipelineTrainer) -> tuple[Tensor, ...] | None:
    parameters = dict(trainer.pipeline.part.named_parameters())
    own = next((parameters[name] for name in TIED if name in parameters), None)
    if own is None:
        return None
    state = trainer.optimizer.state[own]
    return own.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()


def train_and_save(output_dir: Path, is_hybrid: bool) -> Saved:
    model_init = functools.partial(tied_gpt2, 4)
    if is_hybrid:
        trainer: PipelineTrainer = hybrid_trainer(output_dir, model_init)
    else:
        trainer = pipeline_trainer(output_dir, model_init, token_samples(22), trainer_options=ADAMW, **SETTINGS)
    trainer.train()
    trainer.save_model(str(output_dir / "exported"))
    return Saved(sorted(trainer.get_process_groups()), joined(weights(trainer.pipeline.part)), tied_copy(trainer))


class Run(NamedTuple):
    """Results of all ranks, with the output directory."""

    ranks: list[Saved]
    output_dir: Path

    @property
    def checkpoint(self) -> Path:
        return self.output_dir / "checkpoints" / f"checkpoint-{NUM_STEPS}"

    @property
    def manifest(self) -> CheckpointManifest:
        return read_manifest(str(self.checkpoint))

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.checkpoint.glob(pattern))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output_dir = tmp_path_factory.mktemp("hybrid")
    return Run(run_on_ranks(train_and_save, 4, output_dir, True), output_dir)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Pipeline run on three ranks; the second rank has no copy of the tied weight."""
    output_dir = tmp_path_factory.mktemp("pipeline")
    return Run(run_on_ranks(train_and_save, 3, output_dir, False), output_dir)


@pytest.fixture(params=["hybrid", "pipeline"])
def either(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


# --- files


def test_stages_are_written_once_for_any_number_of_pipelines(hybrid: Run) -> None:
    assert hybrid.files("optimizer*") == ["optimizer_state_group_dp_group_0.pt", "optimizer_state_group_dp_group_1.pt"]
    assert hybrid.files("*.safetensors") == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert hybrid.files("rng*") == [f"rng_state_rank_{rank}.pt" for rank in range(4)]
    assert hybrid.files("[dst]*_state.pt") == ["dataset_state.pt", "scheduler_state.pt", "trainer_state.pt"]


def test_every_stage_of_a_pipeline_has_its_files(pipeline: Run) -> None:
    assert pipeline.files("optimizer*") == [f"optimizer_state_rank_{rank}.pt" for rank in range(3)]
    assert pipeline.files("*.safetensors") == [f"model-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]


def test_manifest_records_sharing_patterns(hybrid: Run, pipeline: Run) -> None:
    shared: dict[str, Any] = {
        "scheduler": ("replicated", None),
        "trainer": ("replicated", None),
        "dataset": ("global", None),
    }
    own = {"rng": ("per_rank", None)}
    parts: dict[str, dict[str, Any]] = {
        "hybrid": dict.fromkeys(("model", "optimizer"), ("per_group", "dp_group")),
        "pipeline": dict.fromkeys(("model", "optimizer"), ("per_rank", None)),
    }
    for name, run in (("hybrid", hybrid), ("pipeline", pipeline)):
        components = run.manifest.components
        found = {key: (one.sharing_pattern, one.group_name) for key, one in components.items()}
        assert found == {**shared, **own, **parts[name]}, name
        assert components["model"].required
    for key in ("model", "optimizer"):
        assert hybrid.manifest.components[key].metadata["replication"] == "verified"


def test_manifest_records_the_mesh(hybrid: Run, pipeline: Run) -> None:
    assert hybrid.manifest.mesh == {"shape": [2, 2], "axis_names": ["data_parallel", "pipeline_parallel"]}
    assert pipeline.manifest.mesh == {"shape": [3], "axis_names": ["pipeline_parallel"]}
    assert hybrid.manifest.world_size == 4 and hybrid.manifest.trainer_class == "HybridTrainer"


def test_process_groups_are_named(hybrid: Run, pipeline: Run) -> None:
    assert {tuple(rank.groups) for rank in hybrid.ranks} == {("dp_group", "pp_group")}
    assert {tuple(rank.groups) for rank in pipeline.ranks} == {("pp_group",)}


def test_tied_weight_is_stored_once(either: Run) -> None:
    names: list[str] = []
    for file in either.files("*.safetensors"):
        with safe_open(either.checkpoint / file, "pt") as stored:
            names += stored.keys()
    assert len(names) == len(set(names))
    assert sum(name in TIED for name in names) == 1


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_transformers_loads_the_trained_model(either: Run, kind: str) -> None:
    directory = either.checkpoint if kind == "checkpoint" else either.output_dir / "exported"
    loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    trained = tied_gpt2(4).eval()
    trained.load_state_dict(either.ranks[0].weights)
    assert torch.equal(logits(loaded), logits(trained))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=PROMPT).logits
    return found


def test_copies_of_a_tied_weight_stay_bitwise_equal(either: Run) -> None:
    copies = [rank.tied for rank in either.ranks]
    held = [copy for copy in copies if copy is not None]
    assert [copy is None for copy in copies] == ([False] * 4 if len(copies) == 4 else [False, True, False])
    for weight, average, squares in held[1:]:
        for one, other in zip(held[0], (weight, average, squares), strict=True):
            assert torch.equal(one, other) and bool(one.any())


# --- copies that differ


CHANGED = "model.layers.1.mlp.up_proj.weight"
"""Of the last stage, which ranks 1 and 3 have."""


def change_element(tensor: Tensor) -> None:
    if dist.get_rank() == 3:
        tensor[3, 5] += 1e-6


def save_changed_weight(output_dir: Path) -> str:
    trainer = hybrid_trainer(output_dir, functools.partial(llama, 2), max_steps=1)
    trainer.train()
    if dist.get_rank() % 2:
        change_element(trainer.pipeline.part.get_parameter(CHANGED).data)
    with pytest.raises(ReplicationError) as failure:
        trainer.save_checkpoint(str(output_dir / "diverged"))
    return str(failure.value)


def test_changed_copy_of_a_weight_is_named_on_every_rank(tmp_path: Path) -> None:
    messages = run_on_ranks(save_changed_weight, 4, tmp_path)
    assert len(set(messages)) == 1
    assert "Replication validation failed: the copies of component 'model' differ" in messages[0]
    assert f"{CHANGED}: rank 3 differs from rank 1" in messages[0]
    assert messages[0].count("differs") == 1, "only one rank may be named"
    assert saved_steps(tmp_path) == [1] and not (tmp_path / "diverged").exists()


def save_changed_moment(output_dir: Path) -> list[str]:
    trainer = hybrid_trainer(output_dir, functools.partial(llama, 2), max_steps=1, save_strategy="no")
    trainer.train()
    if dist.get_rank() % 2:
        change_element(trainer.optimizer.state[trainer.pipeline.part.get_parameter(CHANGED)]["exp_avg"])
    with captured_logs() as lines:
        trainer.save_checkpoint()
    return lines


def test_changed_copy_of_a_moment_is_reported_and_marked(tmp_path: Path) -> None:
    """Training can continue without the moments, so the checkpoint is still useful."""
    for lines in run_on_ranks(save_changed_moment, 4, tmp_path):
        assert any(
            "'optimizer'" in line and f"state.{CHANGED}.exp_avg: rank 3 differs from rank 1" in line for line in lines
        )
    components = read_manifest(str(tmp_path / "checkpoints" / "checkpoint-1")).components
    replication = {key: components[key].metadata["replication"] for key in ("model", "optimizer")}
    assert replication == {"model": "verified", "optimizer": "diverged"}


# --- positions of pipelines that read for themselves


def train_sharded(output_dir: Path, max_steps: int, resume: bool) -> dict[str, Tensor]:
    trainer = hybrid_trainer(
        output_dir,
        functools.partial(llama, 2),
        dispatch_batches=False,
        shuffle=True,
        max_steps=max_steps,
        resume_from_checkpoint=resume,
    )
    trainer.train()
    return joined(weights(trainer.pipeline.part))


def straight_and_resumed(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    straight = train_sharded(directory / "straight", 5, resume=False)
    train_sharded(directory / "stopped", 2, resume=False)
    return straight, train_sharded(directory / "stopped", 5, resume=True)


def test_pipelines_with_their_own_data_resume_exactly(tmp_path: Path) -> None:
    for straight, resumed in run_on_ranks(straight_and_resumed, 4, tmp_path):
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], tensor) for name, tensor in resumed.items())
    path = tmp_path / "stopped" / "checkpoints" / "checkpoint-2"
    dataset = read_manifest(str(path)).components["dataset"]
    assert (dataset.sharing_pattern, dataset.group_name) == ("per_group", "pp_group")
    files = sorted(file.name for file in path.glob("dataset*"))
    assert files == [f"dataset_state_group_pp_group_{number}.pt" for number in (0, 1)]


def save_position_and_be_refused(output_dir: Path) -> list[str]:
    model_init = functools.partial(llama, 4)
    hybrid_trainer(output_dir, model_init, dispatch_batches=False, max_steps=2).train()
    messages = []
    for dispatches in (True, False):
        with pytest.raises(CheckpointLoadError) as refusal:
            hybrid_trainer(output_dir, model_init, pp_size=4, dispatch_batches=dispatches).train()
        messages.append(str(refusal.value))
    return messages


def test_dataset_positions_are_rejected_by_another_number_of_pipelines(tmp_path: Path) -> None:
    results = run_on_ranks(save_position_and_be_refused, 4, tmp_path)
    assert results == [results[0]] * 4
    for message in results[0]:
        for part in ("'dataset'", "per_group", 'skip_checkpoint_components=["dataset"]', "dispatch_batches=True"):
            assert part in message


# --- the best model


def train_to_the_best(output_dir: Path) -> tuple[str | None, list[float], dict[str, Tensor]]:
    """Train three steps; the third increases the loss."""
    recorder = Recorder()
    recorder.changes_control = False  # type: ignore[attr-defined]
    trainer = pipeline_trainer(
        output_dir,
        functools.partial(llama, 2),
        token_samples(16),
        recorder,
        trainer_options={
            "eval_dataset": token_samples(7),
            "lr_scheduler_factory": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 if step < 2 else -4.0),
        },
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    losses = [metrics["eval_loss"] for metrics in recorder.details("on_evaluate", "metrics")]
    return trainer.state.best_model_checkpoint, losses, joined(weights(trainer.pipeline.part))


def test_pipeline_ends_with_the_best_weights(tmp_path: Path) -> None:
    for path, losses, found in run_on_ranks(train_to_the_best, 2, tmp_path):
        assert path is not None and Path(path).name == "checkpoint-2"
        assert min(losses) == losses[1]
        best = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert best.keys() == found.keys()
        assert all(torch.equal(best[name], tensor) for name, tensor in found.items())


# --- sizes


def test_dp_size_and_pp_size_follow_from_each_other() -> None:
    def sizes(world_size: int, **settings: Any) -> tuple[int, int]:
        return HybridTrainingArguments(output_dir="unused", **settings).sizes(world_size)

    assert sizes(8, pp_size=2) == sizes(8, dp_size=4) == sizes(8, dp_size=4, pp_size=2) == (4, 2)
    assert sizes(2, pp_size=2) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "world_size", "told"),
    [
        ({}, 4, ["Neither dp_size nor pp_size", "4 ranks", "Set pp_size"]),
        ({"pp_size": 3}, 4, ["pp_size=3", "dp_size=None", "4 ranks", "--nproc"]),
        ({"dp_size": 3}, 4, ["dp_size=3", "4 ranks"]),
        ({"dp_size": 2, "pp_size": 3}, 4, ["dp_size=2", "pp_size=3"]),
        ({"dp_size": 4}, 4, ["dp_size=4", "at least two ranks per pipeline"]),
        ({"pp_size": 8}, 4, ["pp_size=8", "4 ranks"]),
    ],
)
def test_sizes_that_contradict_the_world_size_are_explained(
    settings: dict[str, Any], world_size: int, told: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        HybridTrainingArguments(output_dir="unused", **settings).sizes(world_size)
    for part in told:
        assert part in str(refusal.value)


@pytest.mark.parametrize("settings", [{"pp_size": 1}, {"dp_size": 0}], ids=str)
def test_invalid_sizes_are_rejected_at_once(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value} cannot be used"):
        HybridTrainingArguments(output_dir="unused", **settings)


# --- groups that not all ranks are in


def evaluate_tied(output_dir: Path) -> float:
    trainer = pipeline_trainer(
        output_dir,
        functools.partial(tied_gpt2, 3),
        token_samples(8),
        trainer_options={"eval_dataset": token_samples(6)},
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=1,
    )
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def test_tied_model_is_evaluated_if_some_ranks_have_no_copy(tmp_path: Path) -> None:
    """Ranks in different numbers of groups must still agree on the next group."""
    losses = run_on_ranks(evaluate_tied, 3, tmp_path)
    assert len(set(losses)) == 1
