"""`param_precision`: bfloat16 weights that learn like float32 ones, with float32 updates, and resume bit for bit."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from forgather.ml.checkpoint.state.update_precision import MASTER, ROUNDING
from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.ddp.ddp_arguments import DDPTrainingArguments
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer, TrainingArguments
from tests.support.data_parallel import run
from tests.support.pipelines import joined, llama, tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search, sampled
from tests.support.tiny_models import Recorder, quiet_trainer, tiny_llama, token_samples, weights

PRECISIONS = ["bf16_master", "bf16_stochastic"]
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True})
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 8, "trainer_options": {}}
FINAL = "checkpoints/checkpoint-8"


def trainer_for(output_dir: Path, model: nn.Module | None = None, *callbacks: Any, **settings: Any) -> Trainer:
    settings = {**SETTINGS, **settings}
    options = {"optimizer_cls_and_kwargs": ADAMW, **settings.pop("trainer_options")}
    model = tiny_llama() if model is None and "model_init" not in options else model
    return quiet_trainer(output_dir, model, token_samples(40), *callbacks, trainer_options=options, **settings)


def states_of(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Copies of weights and optimizer state of this rank, by FQN."""
    assert trainer.optimization is not None
    states: dict[str, dict[str, Any]] = copy.deepcopy(trainer.optimization.state.state_dict()["state"])
    named = dict(trainer._named_parameters())
    return {name: {"weight": named[name].detach().clone(), **state} for name, state in states.items()}


def assert_same(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> None:
    assert one.keys() == other.keys() and len(one) > 5
    for name, state in one.items():
        assert state.keys() == other[name].keys(), name
        for key, value in state.items():
            found = other[name][key]
            same = torch.equal(value, found) if isinstance(value, Tensor) else value == found
            assert same, f"{key} of {name}"


# --- learning


def loss_drop(output_dir: Path, rate: float, **precision: str) -> float:
    """Return the decrease of the loss in 150 steps."""
    # A function, so that default_dtype may build the model.
    model_init = functools.partial(tiny_llama, hidden_size=32, num_hidden_layers=1)
    options = {"model_init": model_init, "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": rate})}
    data = token_samples(64, length=12, seed=3)
    settings = {**SETTINGS, "max_steps": 150, "logging_strategy": "steps", "logging_steps": 1, **precision}
    losses = run(quiet_trainer(output_dir, None, data, **{**settings, "trainer_options": options})).losses
    return sum(losses[:8]) / 8 - sum(losses[-8:]) / 8


@long_search
@pytest.mark.parametrize(("rate", "tolerance"), [(3e-5, 0.03), (1e-3, 0.05)])
def test_bfloat16_weights_learn_like_float32_weights(rate: float, tolerance: float, tmp_path: Path) -> None:
    expected = loss_drop(tmp_path, rate)
    for precision in PRECISIONS:
        assert loss_drop(tmp_path, rate, param_precision=precision) == pytest.approx(expected, rel=tolerance)
    if rate == 3e-5:
        assert loss_drop(tmp_path, rate, default_dtype="bfloat16") < 0.5 * expected, "plain bfloat16 stalls"


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp32", 4 + 4 + 8), ("bf16_master", 2 + 2 + 4 + 8), ("bf16_stochastic", 2 + 2 + 8)]
)
def test_bytes_per_parameter_are_as_documented(precision: str, expected: int, tmp_path: Path) -> None:
    held: list[float] = []

    def measure(**_: Any) -> None:
        parameters = list(trainer.unwrapped_model().parameters())
        states = [value for one in parameters for value in trainer.optimizer.state[one].values()]
        tensors = [*parameters, *(one.grad for one in parameters), *states]
        found = sum(one.nbytes for one in tensors if isinstance(one, Tensor) and one.ndim)
        held.append(found / sum(one.numel() for one in parameters))

    trainer = trainer_for(tmp_path, None, Recorder(on_optimizer_step=measure), param_precision=precision, max_steps=1)
    trainer.train()
    assert held == [expected]


class Normed(nn.Module):
    """A model with a layer norm, a batch norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 32)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.layer_norm(self.embedding(input_ids))
        hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2) * self.scale.to(hidden.dtype)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batch_norms_and_buffers_stay_float32(precision: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, Normed(), param_precision=precision)
    trainer.train()
    for name, tensor in trainer.unwrapped_model().state_dict().items():
        kept = name.startswith("batch_norm") or name == "scale"
        assert tensor.dtype == (torch.int64 if "num_batches" in name else torch.float32 if kept else torch.bfloat16), (
            name
        )
    keys = {name: set(state) for name, state in states_of(trainer).items()}
    assert not any(MASTER in found or ROUNDING in found for name, found in keys.items() if "batch_norm" in name)
    assert sum(MASTER in found or ROUNDING in found for found in keys.values()) == 5


# --- exact resume


def multiopt(parameters: Any) -> Multiopt:
    matrices = [one for _, one in parameters if one.ndim == 2]
    others = [one for _, one in parameters if one.ndim != 2]
    return Multiopt([torch.optim.Adagrad(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.9)])


class Own(torch.optim.AdamW):
    """An optimizer of the user: all of its parameters are stepped at once."""


CASES: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
    "skip": {"nonfinite_grad": "skip", "ema_decay": 0.9},
    "multiopt": {"trainer_options": {"optimizer_factory": multiopt, "optimizer_cls_and_kwargs": None}},
    "own": {"trainer_options": {"optimizer_cls_and_kwargs": (Own, {"lr": 1e-2})}},
    "in backward": {"fuse_optim_with_backward": True},
}


PAIRS = [(case, precision) for case in CASES for precision in PRECISIONS]


# Each case with one precision, in turn.
@pytest.mark.parametrize(("case", "precision"), sampled(PAIRS, [*PAIRS[::4], *PAIRS[3::4]]))
def test_resume_is_bit_exact(case: str, precision: str, tmp_path: Path) -> None:
    settings = {"param_precision": precision, "save_strategy": "steps", "save_steps": 5, **CASES[case]}
    straight = trainer_for(tmp_path / "straight", **settings)
    straight.train()
    stop = Recorder(
        on_step_end=lambda state, control, **_: setattr(control, "should_training_stop", state.global_step == 5)
    )
    trainer_for(tmp_path / "resumed", None, stop, **settings).train()
    # Another seed: the seed of the roundings comes from the checkpoint.
    resumed = trainer_for(tmp_path / "resumed", tiny_llama(seed=1), seed=1, **settings)
    assert resumed.train(resume_from_checkpoint=True).global_step == 8
    assert_same(states_of(straight), states_of(resumed))
    if straight.recipes.average is not None and resumed.recipes.average is not None:
        averages = [one.recipes.average.state_dict()["averages"] for one in (straight, resumed)]
        assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_in_backward_trains_like_the_normal_step(precision: str, tmp_path: Path) -> None:
    trainers = [
        trainer_for(tmp_path, param_precision=precision, fuse_optim_with_backward=fused) for fused in (False, True)
    ]
    for trainer in trainers:
        trainer.train()
    assert_same(*map(states_of, trainers))


def test_ema_averages_master_weights(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, param_precision="bf16_master", ema_decay=0.0, eval_ema=True)
    trainer.train()
    assert trainer.recipes.average is not None
    averages = trainer.recipes.average.state_dict()["averages"]
    for name, state in states_of(trainer).items():
        assert torch.equal(averages[name], state[MASTER]), name
        assert not torch.equal(state["weight"].float(), state[MASTER]) or state["weight"].ndim < 2


def test_weights_changed_between_steps_replace_master_weights(tmp_path: Path) -> None:
    def edit(state: Any, model: nn.Module, **_: Any) -> None:
        head = model.get_parameter("lm_head.weight")
        with torch.no_grad():
            if state.global_step == 4:
                head[0] = 100.0
            # A write that changes nothing leaves the masters alone.
            embedding = model.get_parameter("model.embed_tokens.weight")
            embedding.copy_(embedding.clone())

    plain, edited = (
        trainer_for(tmp_path, param_precision="bf16_master"),
        trainer_for(tmp_path, None, Recorder(on_step_end=edit), param_precision="bf16_master", max_steps=5),
    )
    plain.train()
    edited.train()
    assert (states_of(edited)["lm_head.weight"]["weight"][0] > 90).all()
    embedding = states_of(edited)["model.embed_tokens.weight"]
    assert not torch.equal(embedding["weight"].float(), embedding[MASTER])


# --- several ranks

TRAINERS: dict[str, tuple[type[Trainer], int, dict[str, Any]]] = {
    "one device": (Trainer, 1, {}),
    "ddp": (DDPTrainer, 2, {"per_device_train_batch_size": 4}),
    "pipeline": (PipelineTrainer, 2, {"schedule": "1f1b"}),
    "hybrid": (HybridTrainer, 4, {"per_device_train_batch_size": 4, "pp_size": 2}),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: llama(2), "gpt2": lambda: tied_gpt2(2)}


def parallel_trainer(kind: str, directory: Path, model: str, *callbacks: Any, **settings: Any) -> Trainer:
    trainer_class, _, own = TRAINERS[kind]
    options = {"optimizer_cls_and_kwargs": ADAMW}
    common = {**SETTINGS, "save_strategy": "steps", "save_steps": 4, "trainer_options": options, **own, **settings}
    return trainer_of(trainer_class, directory, MODELS[model], token_samples(40), *callbacks, **common)


def all_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the states of all ranks; copies must be equal, bit for bit."""
    flat = {f"{name}/{key}": value for name, state in states_of(trainer).items() for key, value in state.items()}
    counts = {key: torch.tensor([value["seed"], value["count"]]) for key, value in flat.items() if ROUNDING in key}
    whole = joined({**flat, **counts}) if torch.distributed.is_initialized() else {**flat, **counts}
    states: dict[str, dict[str, Any]] = {}
    for path, value in whole.items():
        name, _, key = path.rpartition("/")
        states.setdefault(name, {})[key] = value
    return states


def train_and_resume(kind: str, directory: Path, model: str, precision: str) -> tuple[Any, Any]:
    """Train straight, and with a stop and a resume; return the states of both."""
    straight = parallel_trainer(kind, directory / "straight", model, param_precision=precision)
    straight.train()
    parallel_trainer(kind, directory / "resumed", model, param_precision=precision, max_steps=4).train()
    resumed = parallel_trainer(
        kind, directory / "resumed", model, param_precision=precision, resume_from_checkpoint=True
    )
    resumed.train()
    return all_states(straight), all_states(resumed)


def load_and_train(kind: str, directory: Path, model: str, precision: str, source: str) -> tuple[Any, float, Any]:
    """Load a checkpoint of another kind of ranks, train the rest, and return the loaded state, the loss and the end."""
    loaded: list[Any] = []
    recorder = Recorder(on_train_begin=lambda **_: loaded.append(all_states(trainer)))
    settings = {"param_precision": precision, "resume_from_checkpoint": source, "logging_strategy": "steps"}
    trainer = parallel_trainer(kind, directory, model, recorder, logging_steps=1, **settings)
    trainer.train()
    loss = recorder.logs[0][1]["loss"] if recorder.logs else 0.0
    return loaded[0], loss, all_states(trainer)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_resume_exactly_with_equal_replicas(precision: str, tmp_path: Path) -> None:
    for straight, resumed in run_on_ranks(train_and_resume, 2, "ddp", tmp_path, "llama", precision):
        assert_same(straight, resumed)


@long_search
@pytest.mark.parametrize(("precision", "model"), [("bf16_master", "gpt2"), ("bf16_stochastic", "llama")])
def test_checkpoints_move_between_trainers(precision: str, model: str, tmp_path: Path) -> None:
    start = parallel_trainer("one device", tmp_path / "start", model, param_precision=precision, max_steps=4)
    start.train()
    source = str(tmp_path / "start/checkpoints/checkpoint-4")
    expected, losses = all_states(start), {}
    for kind, (_, num_ranks, _) in TRAINERS.items():
        directory = tmp_path / kind
        if num_ranks == 1:
            told = [load_and_train(kind, directory, model, precision, source)]
        else:
            told = run_on_ranks(load_and_train, num_ranks, kind, directory, model, precision, source)
        for loaded, loss, _ in told:
            assert_same(expected, loaded)
            losses[kind] = loss
        # And back to one device.
        back, _, _ = load_and_train(
            "one device", tmp_path / f"back from {kind}", model, precision, str(directory / FINAL)
        )
        assert_same(told[0][2], back)
    assert list(losses.values()) == pytest.approx([losses["one device"]] * len(TRAINERS), rel=1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accelerate_trains_like_trainer(precision: str, tmp_path: Path) -> None:
    options = {"accelerator": Accelerator(cpu=True), "model_init": MODELS["llama"]}
    accelerated = trainer_for(
        tmp_path / "accelerate", trainer_class=AccelTrainer, param_precision=precision, trainer_options=options
    )
    accelerated.train()
    plain = trainer_for(tmp_path / "plain", param_precision=precision, trainer_options={"model_init": MODELS["llama"]})
    plain.train()
    assert_same(states_of(accelerated), states_of(plain))


# --- another precision


@pytest.mark.parametrize("after", ["fp32", *PRECISIONS])
@pytest.mark.parametrize("before", ["fp32", *PRECISIONS])
def test_checkpoint_resumes_with_another_precision(before: str, after: str, tmp_path: Path) -> None:
    first = trainer_for(tmp_path, param_precision=before, save_strategy="steps", save_steps=8)
    first.train()
    saved, loaded = states_of(first), {}
    recorder = Recorder(on_train_begin=lambda **_: loaded.update(states_of(second)))
    second = trainer_for(tmp_path, tiny_llama(seed=1), recorder, param_precision=after, max_steps=10)
    second.train(resume_from_checkpoint=True)
    for name, state in saved.items():
        found = loaded[name]
        source = state.get(MASTER, state["weight"]) if after == "fp32" else state["weight"]
        assert torch.equal(found["weight"], source.to(found["weight"].dtype)), name
        assert (MASTER in found) == (before == after == "bf16_master")
        assert (ROUNDING in found) == (before == after == "bf16_stochastic")
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert found[key].dtype == torch.float32 and torch.equal(found[key], state[key]), key


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_files_are_bfloat16(precision: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, param_precision=precision)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    reloaded = type(trainer.unwrapped_model()).from_pretrained(tmp_path / "model", dtype="auto")
    for name, tensor in weights(reloaded).items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, trainer.unwrapped_model().state_dict()[name])


# --- refused


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (TrainingArguments, {"default_dtype": "bfloat16"}, "both set the dtype of the weights. Remove default_dtype"),
        (TrainingArguments, {"mixed_precision": "fp16"}, "Use mixed_precision='bf16' or None"),
        (DDPTrainingArguments, {"post_local_sgd": {"enabled": True}}, "Turn one of the two off"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_invalid_combinations_are_rejected(
    arguments: Any, settings: dict[str, Any], message: str, precision: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        arguments(output_dir="out", param_precision=precision, **settings)
    assert f"param_precision={precision!r}" in str(error.value)
    arguments(output_dir="out", **settings)


def test_unknown_precision_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"param_precision='bf16'.*'bf16_master'"):
        TrainingArguments(output_dir="out", param_precision="bf16")


def test_several_optimizers_cannot_step_in_backward(tmp_path: Path) -> None:
    options = {"optimizer_factory": multiopt, "optimizer_cls_and_kwargs": None}
    settings = {"fuse_optim_with_backward": True, "param_precision": "bf16_master", "trainer_options": options}
    with pytest.raises(ValueError, match="several optimizers"):
        trainer_for(tmp_path, **settings).train()


class Holding(torch.optim.SGD):
    """An optimizer that keeps the parameters outside of its groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self._held = [one for _, one in parameters]
        super().__init__(self._held, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._held:
            if one.grad is not None:
                one.sub_(one.grad * 0.1)


def test_optimizer_that_ignores_its_groups_is_rejected(tmp_path: Path) -> None:
    options = {"optimizer_cls_and_kwargs": (Holding, {"lr": 0.1})}
    with pytest.raises(ValueError, match="param_precision cannot be used with Holding: it keeps references"):
        trainer_for(tmp_path, param_precision="bf16_stochastic", trainer_options=options).train()
