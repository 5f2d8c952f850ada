"""EMA weights (`ema_decay`): exact averages, exact resume, evaluation, export and moves between trainers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.recipes.weight_average import WeightAverage
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer
from tests.support.pipelines import joined, tied_gpt2, trainer_of
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import Recorder, Stream, TokenModel, quiet_trainer, tiny_llama, token_samples, weights

DECAY = 0.8
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "ema_decay": DECAY,
    "save_strategy": "steps",
    "save_steps": 3,
    "momentum": 0.9,
    "learning_rate": 0.02,
}


def trainer_for(output_dir: Path, model: nn.Module | None, *callbacks: Any, **settings: Any) -> Trainer:
    options = {"eval_dataset": token_samples(6, seed=9), **settings.pop("trainer_options", {})}
    merged = {**SETTINGS, **settings}
    return quiet_trainer(output_dir, model, token_samples(40), *callbacks, trainer_options=options, **merged)


def averages(trainer: Trainer) -> dict[str, Tensor]:
    with trainer.averaged_weights():
        return weights(trainer.unwrapped_model())


class Weights:
    """Callback that records the weights after each step."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, Tensor]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.of_steps.append(weights(model))


def test_ema_equals_the_closed_form(tmp_path: Path) -> None:
    model = tiny_llama()
    initial, noted = weights(model), Weights()
    trainer = trainer_for(tmp_path, model, noted)
    trainer.train()
    final = weights(model)
    steps = len(noted.of_steps)
    for name, average in averages(trainer).items():
        expected = DECAY**steps * initial[name].double()
        for number, after in enumerate(noted.of_steps, start=1):
            expected += (1 - DECAY) * DECAY ** (steps - number) * after[name].double()
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights(model).items()), "the weights are restored"


def test_resumed_ema_is_bit_identical(tmp_path: Path) -> None:
    straight = trainer_for(tmp_path / "straight", tiny_llama())
    straight.train()
    trainer_for(tmp_path / "resumed", tiny_llama(), max_steps=3).train()
    resumed = trainer_for(tmp_path / "resumed", tiny_llama(seed=1))
    resumed.train()
    expected = averages(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in averages(resumed).items())
    manifest = json.loads((tmp_path / "resumed/checkpoints/checkpoint-6/checkpoint_manifest.json").read_text())
    assert "ema" in manifest["components"]


def test_ema_weights_are_evaluated_on_request(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_for(tmp_path, tiny_llama(), recorder, eval_ema=True, eval_strategy="steps", eval_steps=6)
    trainer.train()
    (in_training,) = recorder.details("on_evaluate", "metrics")
    present, averaged = trainer.evaluate(), trainer.evaluate(use_ema=True)
    assert present["eval_loss"] == in_training["eval_loss"] != averaged["eval_loss"]
    assert present["eval_ema_loss"] == in_training["eval_ema_loss"] == averaged["eval_loss"]
    # Three evaluations of six batches: callbacks do not see the batches of the extra EMA pass.
    assert len(recorder.details("on_prediction_step", "loss")) == 3 * 6
    reference = quiet_trainer(
        tmp_path, tiny_llama(seed=3), None, trainer_options={"eval_dataset": trainer.eval_dataset}
    )
    assert reference.model is not None
    reference.model.load_state_dict(averages(trainer))
    assert reference.evaluate()["eval_loss"] == averaged["eval_loss"]


def test_best_model_can_be_chosen_by_ema_loss(tmp_path: Path) -> None:
    settings = {"eval_ema": True, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_for(tmp_path, tiny_llama(), metric_for_best_model="ema_loss", **settings)
    trainer.train()
    evaluations = [record for record in trainer.state.log_history if "eval_ema_loss" in record]
    assert trainer.state.best_metric == min(record["eval_ema_loss"] for record in evaluations)
    assert trainer.evaluate(use_ema=True)["eval_loss"] == trainer.state.best_metric


def test_loading_the_best_model_restores_its_ema(tmp_path: Path) -> None:
    # The loss on random tokens rises in the end, so the first evaluation is the best.
    settings = {"eval_ema": True, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_for(tmp_path, tiny_llama(), metric_for_best_model="ema_loss", **settings)
    trainer.train()
    first = next(record for record in trainer.state.log_history if "eval_ema_loss" in record)
    best = min(record["eval_ema_loss"] for record in trainer.state.log_history if "eval_ema_loss" in record)
    assert first["eval_ema_loss"] == best, "the test needs an evaluation after the best one"
    assert trainer.evaluate(use_ema=True)["eval_loss"] == best


def test_best_checkpoint_without_ema_starts_it_from_its_weights(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_for(tmp_path, tiny_llama(), checkpoint_components=["model", "trainer"], **settings)
    trainer.train()
    torch.testing.assert_close(averages(trainer), weights(trainer.unwrapped_model()), rtol=0, atol=0)


def test_averaged_weights_restores_weights_after_an_error(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tiny_llama(), max_steps=3)
    trainer.train()
    raw, expected = weights(trainer.unwrapped_model()), averages(trainer)
    with pytest.raises(ZeroDivisionError), trainer.averaged_weights():
        raise ZeroDivisionError
    torch.testing.assert_close(weights(trainer.unwrapped_model()), raw, rtol=0, atol=0)
    torch.testing.assert_close(averages(trainer), expected, rtol=0, atol=0)


def test_ema_works_with_step_in_backward(tmp_path: Path) -> None:
    found = []
    for fused in (False, True):
        trainer = trainer_for(tmp_path / str(fused), tiny_llama(), fuse_optim_with_backward=fused)
        trainer.train()
        found.append(averages(trainer))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_nested_averaged_weights_has_no_further_effect(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tiny_llama(), eval_ema=True)
    trainer.train()
    expected, raw = averages(trainer), weights(trainer.unwrapped_model())
    with trainer.averaged_weights():
        assert trainer.evaluate(use_ema=True)["eval_loss"] == trainer.evaluate()["eval_loss"]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in averages(trainer).items())
        with pytest.raises(ValueError, match=r"cannot be saved inside averaged_weights\(\).*save_model\(\) exports"):
            trainer.save_checkpoint()
        with pytest.raises(ValueError, match=r"cannot start inside averaged_weights\(\)"):
            trainer.train()
    assert all(torch.equal(tensor, raw[name]) for name, tensor in weights(trainer.unwrapped_model()).items())


def test_rejected_training_inside_averaged_weights_changes_nothing(tmp_path: Path) -> None:
    options = {"model_init": tiny_llama}
    trainer = trainer_for(tmp_path, None, save_strategy="no", max_steps=2, trainer_options=options)
    trainer.train()
    model, before = trainer.unwrapped_model(), weights(trainer.unwrapped_model())
    with (
        trainer.averaged_weights(),
        pytest.raises(ValueError, match=r"Training cannot start inside averaged_weights\(\)"),
    ):
        trainer.train()
    assert trainer.model is model
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer.unwrapped_model()).items())


def test_exhausted_evaluation_stream_is_an_error_for_eval_ema(tmp_path: Path) -> None:
    recorder = Recorder()
    once = iter(token_samples(4))
    stream = Stream(once)  # type: ignore[arg-type]
    trainer = trainer_for(tmp_path, tiny_llama(), recorder, eval_ema=True, trainer_options={"eval_dataset": stream})
    trainer.args.eval_strategy = "no"
    trainer.train()
    with pytest.raises(RuntimeError, match=r"no batches in its second pass for eval_ema=True"):
        trainer.evaluate()
    num_before = len(recorder.details("on_prediction_step", "loss"))
    trainer.evaluate(token_samples(4))
    assert len(recorder.details("on_prediction_step", "loss")) == num_before + 4, "callbacks see every batch again"


def test_ema_may_be_named_in_checkpoint_components(tmp_path: Path) -> None:
    trainer_for(tmp_path / "skipped", tiny_llama(), ema_decay=None, skip_checkpoint_components=["ema"]).train()
    components = ["model", "ema"]
    trainer_for(tmp_path / "some", tiny_llama(), checkpoint_components=components).train()
    with pytest.raises(ValueError, match=r"checkpoint_components contains 'ema', .*Set ema_decay, or remove 'ema'"):
        trainer_for(tmp_path / "none", tiny_llama(), ema_decay=None, checkpoint_components=components).train()


def test_ema_weights_are_exported_on_request(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "run", tiny_llama())
    trainer.train()
    trainer.save_model(str(tmp_path / "averaged"), use_ema=True)
    trainer.save_model(str(tmp_path / "present"))
    for folder, expected in (("averaged", averages(trainer)), ("present", weights(trainer.unwrapped_model()))):
        exported = weights(AutoModelForCausalLM.from_pretrained(tmp_path / folder))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())


def test_ema_of_bfloat16_weights_is_float32() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = WeightAverage([("one", parameter)], 0.999)
    average.begin()
    with torch.no_grad():
        parameter.add_(1.0)
    for _ in range(3):
        average.update()
    torch.testing.assert_close(average.state_dict()["averages"]["one"], torch.full((3,), 2 - 0.999**3))
    with average.in_model():
        assert torch.equal(parameter, torch.full((3,), 1.0, dtype=torch.bfloat16))
    assert torch.equal(parameter, torch.full((3,), 2.0, dtype=torch.bfloat16))
    torch.testing.assert_close(average.state_dict()["averages"]["one"], torch.full((3,), 2 - 0.999**3))


def test_ema_does_not_depend_on_the_copy_buffer_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def averages_with(room: int) -> dict[str, Tensor]:
        monkeypatch.setattr("forgather.ml.trainer.recipes.weight_average._COPIED_AT_ONCE", room)
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16]
        parameters = {f"{number}": nn.Parameter(torch.ones(4, dtype=dtype)) for number, dtype in enumerate(dtypes)}
        average = WeightAverage(parameters.items(), 0.75)
        average.begin()
        with torch.no_grad():
            for number, parameter in enumerate(parameters.values()):
                parameter.add_(number)
        average.update()
        return average.state_dict()["averages"]

    expected = {f"{number}": torch.full((4,), 0.75 + 0.25 * (1 + number)) for number in range(5)}
    for room in (1, 4, 8, 100):
        found = averages_with(room)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_checkpoint_without_ema_starts_it_from_its_weights(tmp_path: Path) -> None:
    first = trainer_for(tmp_path, tiny_llama(), ema_decay=None, max_steps=3)
    first.train()
    loaded = weights(first.unwrapped_model())
    trainer = trainer_for(tmp_path, tiny_llama(seed=1), max_steps=3)
    trainer.load_checkpoint()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in averages(trainer).items())


def test_untied_weights_both_get_the_tied_ema(tmp_path: Path) -> None:
    trainer_for(tmp_path, tied_gpt2(2), max_steps=3).train()
    config: Any = tied_gpt2(2).config
    config.tie_word_embeddings = False
    trainer = trainer_for(tmp_path, GPT2LMHeadModel(config), max_steps=3)
    trainer.load_checkpoint()
    found, present = averages(trainer), weights(trainer.unwrapped_model())
    assert torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])
    assert not torch.equal(found["lm_head.weight"], present["lm_head.weight"])


def test_ema_of_another_shape_is_rejected() -> None:
    average = WeightAverage(TokenModel(width=4).named_parameters(), 0.9)
    other = WeightAverage(TokenModel(width=8).named_parameters(), 0.9)
    other.begin()
    with pytest.raises(
        Exception, match=r'averaged weights of .* have the shape .*skip_checkpoint_components=\["ema"\]'
    ):
        average.load_state_dict(other.state_dict())


def two_averages() -> WeightAverage:
    return WeightAverage([(name, nn.Parameter(torch.rand(4, 3))) for name in ("one", "other")], 0.9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda good: torch.zeros(1).expand(4, 3), "the average of 'one' has strides"),
        (lambda good: torch.zeros(3, 4).t(), "the average of 'one' has strides"),
        (lambda good: torch.zeros(4, 3, dtype=torch.int64), "has dtype torch.int64, expected a floating one"),
        (lambda good: torch.zeros(4, 3, dtype=torch.complex64), "has dtype torch.complex64"),
        (lambda good: torch.zeros(4, 3).to_sparse(), "layout torch.sparse_coo"),
        (lambda good: torch.zeros(4, 3, device="meta"), "without data"),
        (lambda good: good["other"], "'other' shares its memory with the average of 'one'"),
        (lambda good: torch.zeros(5), r"averaged weights of 'one' have the shape \(5,\)"),
        (lambda good: 1.0, "one is 1.0, expected a tensor"),
    ],
)
def test_malformed_ema_is_rejected_without_changes(make: Any, message: str) -> None:
    average = two_averages()
    average.begin()
    before = average.state_dict()["averages"]
    good = {name: tensor.clone() for name, tensor in before.items()}
    spoiled = {"averages": {**good, "one": make(good)}}
    for load in (average.check_state_dict, average.load_state_dict):
        with pytest.raises(CheckpointLoadError, match=rf'{message}.*skip_checkpoint_components=\["ema"\]'):
            load(spoiled)
    after = average.state_dict()["averages"]
    assert all(after[name] is tensor for name, tensor in before.items())


def test_ema_views_of_one_buffer_get_separate_storage() -> None:
    flat, average = torch.rand(24), two_averages()
    average.load_state_dict({"averages": {"one": flat[:12].view(4, 3), "other": flat[12:].view(4, 3)}})
    for name, expected in (("one", flat[:12]), ("other", flat[12:])):
        found = average.state_dict()["averages"][name]
        assert torch.equal(found.flatten(), expected) and found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize(
    "state", [None, [], {}, {"averages": None}, {"averages": {0: 1}}, {"averages": {"one": [1.0]}}]
)
def test_every_ema_reader_rejects_a_malformed_state(state: Any) -> None:
    average = two_averages()
    readers = [
        average.check_state_dict,
        average.load_state_dict,
        average.missing_names,
        lambda bad: average.add_tied_names(bad, []),
        lambda bad: WeightAverage.merge_state_dicts([bad]),
    ]
    for read in readers:
        with pytest.raises(CheckpointLoadError, match="saved averages"):
            read(state)
    with pytest.raises(CheckpointLoadError, match="tied"):
        average.add_tied_names({"averages": {}}, [[1]])  # type: ignore[list-item]


# --- moves

KINDS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "ddp": (DDPTrainer, {"per_device_train_batch_size": 2}),
    "pipeline": (PipelineTrainer, {"schedule": "1f1b"}),
    "hybrid": (HybridTrainer, {"pp_size": 2, "per_device_train_batch_size": 2, "n_microbatches": 2}),
}


def go_on(output_dir: Path, kind: str, build: Any, max_steps: int) -> dict[str, Tensor]:
    trainer_class, own = KINDS[kind]
    settings = {**SETTINGS, **own, "max_steps": max_steps}
    trainer = trainer_of(trainer_class, output_dir, build, token_samples(80), **settings)
    trainer.train()
    with trainer.averaged_weights():
        return joined(weights(trainer.unwrapped_model()))


def straight_run(output_dir: Path, build: Any, max_steps: int) -> dict[str, Tensor]:
    trainer = trainer_of(Trainer, output_dir, build, token_samples(80), **{**SETTINGS, "max_steps": max_steps})
    trainer.train()
    return averages(trainer)


def test_ema_moves_between_trainers(tmp_path: Path) -> None:
    build, moving = functools.partial(tied_gpt2, 4), tmp_path / "moving"
    straight_run(moving, build, 3)
    run_on_ranks(go_on, 2, moving, "pipeline", build, 6)
    run_on_ranks(go_on, 4, moving, "hybrid", build, 9)
    run_on_ranks(go_on, 2, moving, "ddp", build, 12)
    moved = straight_run(moving, build, 15)
    expected = straight_run(tmp_path / "straight", build, 15)
    for name, tensor in expected.items():
        assert (moved[name] - tensor).norm() / tensor.norm() < 1e-6, name


class SpoilsItsModel:
    """Callback that adds a parameter to the model of one rank after the last save, so no checkpoint has it."""

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == SETTINGS["max_steps"]:
            model.register_parameter("unknown", nn.Parameter(torch.zeros(1)))


def best_on_ranks(output_dir: Path) -> None:
    settings = {**SETTINGS, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    options = {"eval_dataset": token_samples(4)}
    ddp_trainer(
        output_dir, tiny_llama(), token_samples(40), SpoilsItsModel(), trainer_options=options, **settings
    ).train()


def test_all_ranks_fail_if_one_cannot_load_the_best_weights(tmp_path: Path) -> None:
    for outcome in outcomes_on_ranks(best_on_ranks, 2, tmp_path):
        assert outcome.error_type == "DistributedError"
        assert "loading the best model" in str(outcome.error_message) and "unknown" in str(outcome.error_message)


# --- rejected


@pytest.mark.parametrize(
    ("trainer_class", "settings", "message"),
    [
        (Trainer, {"ema_decay": 1.0}, r"ema_decay=1.0 cannot be used: it must be at least 0 and less than 1"),
        (
            Trainer,
            {"eval_ema": True},
            r"eval_ema=True evaluates the averaged weights, but ema_decay=None keeps no average",
        ),
        (
            DDPTrainer,
            {"ema_decay": 0.9, "post_local_sgd": {"enabled": True}},
            r"ema_decay=0.9 cannot be combined with post_local_sgd.enabled=True: .*EMA weights would differ",
        ),
    ],
)
def test_invalid_settings_are_rejected(
    trainer_class: type[Trainer], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_class(
            args={"output_dir": str(tmp_path), **settings}, model=TokenModel(), train_dataset=token_samples(4)
        )


@pytest.mark.parametrize(("decay", "reason"), [(None, "keeps none"), (0.9, "has not trained yet, nor loaded")])
def test_requesting_missing_ema_weights_is_an_error(decay: float | None, reason: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, tiny_llama(), ema_decay=decay)
    with pytest.raises(ValueError, match=rf"averaged weights were requested, but this trainer {reason}.*ema_decay"):
        trainer.save_model(use_ema=True)
