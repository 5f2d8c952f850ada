"""FSDP2Trainer beyond the step: precision, buffers, exported models, optimizers, user components, rejected models."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer.callbacks.parameter_norms import GradLogger, WeightNormLogger
from forgather.ml.trainer.fsdp2 import FSDP2Trainer
from tests.support.data_parallel import (
    Result,
    assert_same_training,
    ddp_trainer,
    environment,
    fsdp2_trainer,
    run,
    whole_moments,
    whole_weights,
)
from tests.support.launch import finish_all, start_ranks
from tests.support.pipelines import tied_gpt2
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search, sampled, sampled_keys
from tests.support.tiny_models import (
    VOCAB_SIZE,
    Recorder,
    TokenModel,
    quiet_trainer,
    saved_steps,
    tiny_llama,
    token_samples,
)
from tests.support.tiny_parallel import Box, Outcome, raised

SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "max_grad_norm": 1.0,
}


def test_one_process_trains_exactly_like_trainer(tmp_path: Path) -> None:
    results = []
    for kind in ({}, {"trainer_class": FSDP2Trainer}):
        trainer = quiet_trainer(tmp_path / str(len(kind)), tiny_llama(), token_samples(20), **kind, **SETTINGS)
        results.append(run(trainer))
    one, other = results
    assert one.losses == other.losses and one.norms == other.norms
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


# --- precision

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "mixed": {"mixed_precision": "bf16"},
    "param_dtype": {"fsdp2": {"param_dtype": "bfloat16"}},
    "reduced in bfloat16": {"fsdp2": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
}


def train_in_precisions(output_dir: Path) -> dict[str, tuple[list[float], set[torch.dtype]]]:
    found = {}
    for name, settings in PRECISIONS.items():
        trainer = fsdp2_trainer(output_dir / name, tiny_llama, token_samples(20), **SETTINGS, **settings)
        losses = run(trainer).losses
        found[name] = (losses, {parameter.dtype for parameter in trainer.unwrapped_model().parameters()})
    return found


def test_low_precision_is_for_compute_only(tmp_path: Path) -> None:
    (first, second) = run_on_ranks(train_in_precisions, 2, tmp_path)
    assert first == second
    precise = first.pop("float32")[0]
    for name, (losses, dtypes) in first.items():
        assert dtypes == {torch.float32}, "the optimizer updates weights of the dtype of the model"
        assert losses == pytest.approx(precise, rel=2e-2) and losses != precise, name
    assert first["mixed"] == first["param_dtype"], "two names of one setting"


# --- buffers


class Normed(nn.Module):
    """Model with running statistics, which each rank computes from its own batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


def train_normed(output_dir: Path) -> list[tuple[Result, float, dict[str, Any]]]:
    found = []
    for name, build in {"ddp": ddp_trainer, "fsdp2": fsdp2_trainer}.items():
        options = {"eval_dataset": token_samples(5, seed=3)}
        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer = build(output_dir / name, Normed(), token_samples(20), trainer_options=options, **SETTINGS, **saving)
        result, loss = run(trainer), trainer.evaluate()["eval_loss"]
        path = output_dir / name / "checkpoints" / "checkpoint-4"
        found.append((result, loss, read_manifest(str(path)).components["model"].metadata))
    return found


def test_batch_norm_trains_and_is_saved_as_under_ddp(tmp_path: Path) -> None:
    for (ddp, ddp_loss, _), (fsdp2, fsdp2_loss, metadata) in run_on_ranks(train_normed, 2, tmp_path):
        assert_same_training(fsdp2, ddp)
        assert fsdp2_loss == pytest.approx(ddp_loss, rel=1e-6)
        assert metadata["sharding"] == {"num_shards": 2, "placement": "Shard(0)"}


# --- initial weights

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: tiny_llama(None), "tied gpt2": lambda: tied_gpt2(2)}


def initial_weights(trainer_of: Callable[..., Any], output_dir: Path, model: str, **settings: Any) -> dict[str, Tensor]:
    """Return the weights at the start of training."""
    found: dict[str, Tensor] = {}
    note = Recorder(on_train_begin=lambda **_: found.update(whole_weights(trainer.unwrapped_model())))
    trainer = trainer_of(output_dir, MODELS[model], token_samples(8), note, max_steps=1, seed=11, **settings)
    trainer.train()
    return found


def begin_sharded(output_dir: Path) -> dict[str, list[dict[str, Tensor]]]:
    from forgather.ml.trainer.fsdp2 import fsdp2_trainer as module

    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in MODELS}
    build, patch = module.build_deferred, pytest.MonkeyPatch()
    for min_bytes in (None, 0):
        if min_bytes is not None:
            patch.setattr(module, "build_deferred", lambda model_init: build(model_init, min_bytes=0))
        for name in MODELS:
            found[name].append(initial_weights(fsdp2_trainer, output_dir / f"{name} {min_bytes}", name))
    patch.undo()
    return found


def test_training_starts_from_the_weights_of_one_device(tmp_path: Path) -> None:
    def single(output_dir: Path, model_init: Any, train: Any, *callbacks: Any, **settings: Any) -> Any:
        options = {"model_init": model_init}
        return quiet_trainer(output_dir, None, train, *callbacks, trainer_options=options, **settings)

    expected = {name: initial_weights(single, tmp_path / name, name) for name in MODELS}
    for found in run_on_ranks(begin_sharded, 2, tmp_path):
        for name, wanted in expected.items():
            for weights in found[name]:
                assert weights.keys() == wanted.keys()
                assert all(torch.equal(weights[key], tensor) for key, tensor in wanted.items()), name


# --- saved models


def save_models(output_dir: Path, model: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    trainer = fsdp2_trainer(
        output_dir,
        MODELS[model],
        token_samples(20),
        **SETTINGS,
        momentum=0.9,
        save_strategy="steps",
        save_steps=4,
        **settings,
    )
    trainer.train()
    trainer.save_model(str(output_dir / "exported"))
    return whole_weights(trainer.unwrapped_model())


@pytest.mark.parametrize(
    ("model", "settings"),
    sampled(
        [("llama", {}), ("tied gpt2", {}), ("tied gpt2", {"save_safetensors": False})],
        [("llama", {}), ("tied gpt2", {"save_safetensors": False})],
    ),
)
def test_from_pretrained_loads_checkpoint_and_exported_model(
    model: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    expected = run_on_ranks(save_models, 2, tmp_path, model, settings)[0]
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    for folder in (checkpoint, tmp_path / "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), folder
        kind = "LlamaForCausalLM" if model == "llama" else "GPT2LMHeadModel"
        assert json.loads((folder / "config.json").read_text())["architectures"] == [kind], "not the sharded class"
    manifest = read_manifest(str(checkpoint))
    weight_files = [file for file in manifest.files if file.component == "model" and "model-" in file.path]
    assert {file.writer_rank for file in weight_files} == {0, 1}, "the ranks write side by side"
    assert manifest.components["optimizer"].metadata["sharding"]["num_shards"] == 2
    assert store.verify_checkpoint(str(checkpoint)) == []


# --- optimizers

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": False}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.001, "eps": 1e-3, "momentum": 0.9}),
    "muon": (torch.optim.Muon, {"lr": 0.01}),
}
OPTIMIZERS = sampled_keys(OPTIMIZERS, "sgd", "adamw foreach", "adamw fused", "adagrad", "muon")


def optimize(build: Callable[..., Any], output_dir: Path, name: str, batch: int) -> tuple[Result, list[float]]:
    """Train, and train again with a resume in the middle; return the first result and the losses of the second."""
    options = {"optimizer_cls_and_kwargs": OPTIMIZERS[name]}
    settings = {**SETTINGS, "per_device_train_batch_size": batch, "save_strategy": "steps", "save_steps": 2}
    result = run(build(output_dir, TokenModel, token_samples(20), trainer_options=dict(options), **settings))
    resumed = build(
        output_dir / "again",
        TokenModel,
        token_samples(20),
        trainer_options=dict(options),
        resume_from_checkpoint=str(output_dir / "checkpoints" / "checkpoint-2"),
        **settings,
    )
    return result, run(resumed).losses


def optimize_shards(output_dir: Path) -> dict[str, tuple[Outcome, Any]]:
    found = {}
    for name in OPTIMIZERS:
        result: list[Any] = []
        outcome = raised(lambda: result.append(optimize(fsdp2_trainer, output_dir / name, name, 2)))  # noqa: B023
        found[name] = (outcome, result[0] if result else (None, None))
    return found


def test_optimizers_work_on_shards(tmp_path: Path) -> None:
    def single(output_dir: Path, model: Any, train: Any, **settings: Any) -> Any:
        return quiet_trainer(output_dir, model(), train, **settings)

    # Two runs for each optimizer: on a busy machine they take longer than the usual limit.
    by_rank = run_on_ranks(optimize_shards, 2, tmp_path / "shards", timeout=60.0 * len(OPTIMIZERS))
    for name in OPTIMIZERS:
        expected, _ = optimize(single, tmp_path / name, name, 4)
        for found in by_rank:
            outcome, (result, resumed) = found[name]
            assert outcome == ("", ""), name
            # Muon orthogonalises in bfloat16, where another order of sums matters.
            assert_same_training(result, expected, tolerance=1e-2 if name == "muon" else 1e-6)
            assert resumed == result.losses[2:], name


# --- components of users


class WithComponent(FSDP2Trainer):
    """Trainer that also saves a sharded tensor of its own."""

    pattern = SharingPattern.PER_RANK

    def get_state_components(self) -> list[StateComponent]:
        box = Box(count=3, own=None if self.mesh is None else self._sharded())
        return [*super().get_state_components(), StateComponent("mine", box, self.pattern)]

    def _sharded(self) -> Any:
        model = self.model
        if model is None:
            return None
        return next(iter(self.unwrapped_model().parameters())).detach()


def save_component(output_dir: Path, pattern: str) -> Outcome:
    WithComponent.pattern = SharingPattern[pattern]
    trainer = quiet_trainer(
        output_dir,
        None,
        token_samples(20),
        trainer_class=WithComponent,
        trainer_options={"distributed_env": environment(), "model_init": TokenModel},
        **SETTINGS,
        save_strategy="steps",
        save_steps=4,
    )
    return raised(trainer.train)


def test_sharded_tensor_in_a_replicated_component_is_saved_whole(tmp_path: Path) -> None:
    assert run_on_ranks(save_component, 2, tmp_path, "REPLICATED") == [("", "")] * 2
    folder = tmp_path / "checkpoints" / "checkpoint-4"
    state = torch.load(folder / "mine_state.pt", weights_only=True)
    assert state["count"] == 3 and state["own"].shape == (VOCAB_SIZE, 8)
    assert store.verify_checkpoint(str(folder)) == []


@pytest.mark.parametrize("pattern", ["PER_RANK", "GLOBAL", "PER_NODE"])
def test_sharded_tensor_in_another_component_is_refused(pattern: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(save_component, 2, tmp_path, pattern)
    assert first == second
    assert first[0] == "CheckpointSaveError"
    assert f"'mine' is {pattern}" in first[1] and "such as own" in first[1] and "Declare it REPLICATED" in first[1]
    assert saved_steps(tmp_path) == []


# --- rejected models and settings


class WithScalar(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Turned(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 4).t())


class MixedTypes(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.bfloat16()


class Failing(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            raise RuntimeError("no such file")


def with_optimizer(kind: type) -> dict[str, Any]:
    return {"trainer_options": {"optimizer_cls_and_kwargs": (kind, {"lr": 0.1})}}


REJECTED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "replicas that do not fit": (
        TokenModel,
        {"fsdp2": {"replicate_size": 3}},
        r"fsdp2.replicate_size=3 does not fit the 2 ranks",
    ),
    "only replicas": (TokenModel, {"fsdp2": {"replicate_size": 2}}, r"or use DDPTrainer"),
    "shards after forward": (
        tiny_llama,
        {"fsdp2": {"reshard_after_forward": 3}},
        r"fsdp2.reshard_after_forward=3 does not fit 2 shards",
    ),
    "unknown path": (
        tiny_llama,
        {"fsdp2": {"transformer_layers_path": "layers"}},
        r"transformer_layers_path='layers'.*Module lists that it has: model.layers",
    ),
    "path without layers": (
        tiny_llama,
        {"fsdp2": {"transformer_layers_path": "lm_head"}},
        r"transformer_layers_path='lm_head'.*model.layers",
    ),
    "scalar": (WithScalar, {}, r"Parameter 'scale' is a scalar \(shape \[\]\).*Give it shape \[1\]"),
    "not contiguous": (Turned, {}, r"'turned' of shape \[4, 3\] is not contiguous"),
    "two dtypes": (MixedTypes, {}, r"'head.weight' has dtype torch.bfloat16, and 'embedding.weight' has torch.float32"),
    "one rank fails": (Failing, {}, r"rank 1 failed while building the model.*no such file"),
    "adafactor": (
        TokenModel,
        with_optimizer(torch.optim.Adafactor),
        r"Adafactor cannot update sharded parameters.*AdamW",
    ),
}


def try_rejected(output_dir: Path) -> dict[str, Outcome]:
    found = {}
    for name, (model_init, settings, _) in REJECTED.items():

        def start(name: str = name, model_init: Any = model_init, settings: Any = settings) -> None:
            fsdp2_trainer(output_dir / name, model_init, token_samples(20), **SETTINGS, **settings).train()

        found[name] = raised(start)
    return found


def test_models_and_settings_that_cannot_work_are_named_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(try_rejected, 2, tmp_path)
    assert first == second
    for name, (_, _, message) in REJECTED.items():
        assert first[name][0] in ("ValueError", "DistributedError"), name
        assert re.search(message, first[name][1].splitlines()[0]), first[name]


# --- parameters without a gradient


class WithUnused(TokenModel):
    """Model with parameters that no batch uses, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8, bias=False)
        self.head.weight.requires_grad_(False)


def train_unused(output_dir: Path) -> Result:
    adamw = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.5})}
    build, model = (fsdp2_trainer, WithUnused) if dist.is_initialized() else (quiet_trainer, WithUnused())
    settings = {**SETTINGS, "per_device_train_batch_size": 2 if dist.is_initialized() else 4}
    return run(build(output_dir, model, token_samples(20), trainer_options=adamw, **settings))


def test_unused_and_frozen_parameters_stay_as_they_are(tmp_path: Path) -> None:
    expected, before = train_unused(tmp_path / "whole"), WithUnused().state_dict()
    for found in run_on_ranks(train_unused, 2, tmp_path / "parts"):
        assert_same_training(found, expected)
        for name in ("unused.weight", "head.weight"):
            assert torch.equal(found.weights[name], before[name]), name


class TakesPaths(TokenModel):
    def forward(self, input_ids: Tensor, paths: list[Path]) -> Tensor:
        assert [path.name for path in paths] == ["sample"] * len(input_ids)
        return super().forward(input_ids)


def train_with_paths(output_dir: Path) -> Result:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {**default_collate(samples), "paths": [Path("sample")] * len(samples)}

    options = {"data_collator": collate}
    settings = {**SETTINGS, "dispatch_batches": False}
    return run(fsdp2_trainer(output_dir, TakesPaths, token_samples(20), trainer_options=options, **settings))


def test_batches_may_have_objects_that_stay_on_their_rank(tmp_path: Path) -> None:
    for found in run_on_ranks(train_with_paths, 2, tmp_path):
        assert len(found.losses) == SETTINGS["max_steps"]


@long_search
def test_model_init_may_import_transformers_first(tmp_path: Path) -> None:
    ranks = start_ranks(["-m", "tests.support.fsdp2_import_job", str(tmp_path)], 2)
    codes = finish_all(ranks, timeout=120)
    assert codes == [0, 0], ranks[0].output
    assert all("equal: True" in rank.output for rank in ranks), ranks[0].output


# --- calls in an unusual order


def call_in_any_order(output_dir: Path) -> dict[str, Any]:
    """Evaluate and export before training, train twice, and load the first checkpoint again."""
    options = {"eval_dataset": token_samples(5, seed=3)}
    saving = {"save_strategy": "steps", "save_steps": 2, "momentum": 0.9}
    trainer = fsdp2_trainer(output_dir, tiny_llama, token_samples(20), trainer_options=options, **SETTINGS, **saving)
    found: dict[str, Any] = {"first": trainer.evaluate()["eval_loss"]}
    trainer.save_model(str(output_dir / "before"))
    trainer.train()
    found["last"] = trainer.evaluate()["eval_loss"]
    trainer.load_checkpoint(str(output_dir / "checkpoints" / "checkpoint-2"))
    found["step 2"] = trainer.evaluate()["eval_loss"]
    trainer.load_checkpoint(str(output_dir / "checkpoints" / "checkpoint-4"))
    found["step 4"] = trainer.evaluate()["eval_loss"]
    return found


def test_calls_in_an_unusual_order_see_the_current_weights(tmp_path: Path) -> None:
    first, second = run_on_ranks(call_in_any_order, 2, tmp_path / "parts")
    assert first == second
    assert first["step 4"] == first["last"] and len(set(first.values())) == 3
    trainer = quiet_trainer(
        tmp_path / "whole", tiny_llama(), token_samples(20), trainer_options={"eval_dataset": token_samples(5, seed=3)}
    )
    assert first["first"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    trainer.load_checkpoint(str(tmp_path / "parts" / "checkpoints" / "checkpoint-2"))
    assert first["step 2"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "before").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tiny_llama().state_dict().items())


def evaluate_nothing(output_dir: Path) -> Outcome:
    options = {"eval_dataset": token_samples(1)}
    settings = {
        **SETTINGS,
        "dispatch_eval_batches": False,
        "dataloader_drop_last": True,
        "per_device_eval_batch_size": 4,
    }
    trainer = fsdp2_trainer(output_dir, TokenModel, token_samples(20), trainer_options=options, **settings)
    return raised(trainer.evaluate)


def test_evaluation_without_any_batch_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(evaluate_nothing, 2, tmp_path)
    assert first == second and first[0]
    assert "across all 2 ranks" in first[1] and "dispatch_eval_batches" in first[1]


# --- norms by parameter, and a second process group


ADAM = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})}


def log_norms(trainer: Any) -> dict[str, float]:
    """Train and return the last logged norms by parameter."""
    recorder = Recorder()
    for callback in (GradLogger(), WeightNormLogger(), recorder):
        trainer.add_callback(callback)
    trainer.train()
    return {name: value for name, value in recorder.logs[-1][1].items() if "norm/" in name}


def log_norms_in_two_groups(output_dir: Path, settings: dict[str, Any]) -> tuple[list[dict[str, float]], set[str]]:
    found = []
    # Torch numbers groups. Without these, the groups of both attempts would have the same names.
    for _ in range(3):
        dist.new_group()
    for attempt in range(2):
        if attempt:
            joined = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.FileStore(str(output_dir / "second_store"), 4), **joined)
        trainer = fsdp2_trainer(
            output_dir / str(attempt), tiny_llama, token_samples(40), trainer_options=ADAM, **SETTINGS, fsdp2=settings
        )
        found.append(log_norms(trainer))
    return found, set(whole_moments(trainer))


def test_norms_of_shards_equal_one_device_also_in_a_second_process_group(tmp_path: Path) -> None:
    """DTensor caches results of operations with their mesh, and the process group of that mesh may be destroyed."""
    model = tiny_llama()
    settings = {**SETTINGS, "per_device_train_batch_size": 8}
    one = quiet_trainer(tmp_path / "one", tiny_llama(), token_samples(40), trainer_options=ADAM, **settings)
    expected = log_norms(one)
    assert len(expected) == 2 * len(dict(model.named_parameters()))
    for found, moments in run_on_ranks(log_norms_in_two_groups, 4, tmp_path, {"replicate_size": 2}):
        assert found == [pytest.approx(expected, rel=1e-5)] * 2
        assert len(moments) == 3 * len(dict(model.named_parameters()))
