"""Optimizer step in backward (`fuse_optim_with_backward`): the same training with a fraction of gradient memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.optim.step_in_backward import StepInBackward
from forgather.ml.trainer.accelerate import AccelTrainer
from forgather.ml.trainer.callbacks import GradLogger
from forgather.ml.trainer.ddp import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.memory import peak_bytes
from tests.support.pipelines import llama, tied_gpt2, trainer_of, whole_result
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import Recorder, TokenModel, quiet_trainer, tiny_llama, token_samples

SETTINGS: dict[str, Any] = {
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
}
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
GROUPS = {"no_decay": {"regex": r"norm|bias", "config": {"weight_decay": 0.0, "lr": 0.05}}}


def trainer_for(output_dir: Path, model: nn.Module | None, fused: bool, *callbacks: Any, **settings: Any) -> Trainer:
    options = settings.pop("trainer_options", {})
    return quiet_trainer(
        output_dir,
        model,
        token_samples(40),
        *callbacks,
        trainer_options={"optimizer_cls_and_kwargs": ADAMW, **options},
        fuse_optim_with_backward=fused,
        **{**SETTINGS, **settings},
    )


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (tiny_llama, {"optimizer_cls_and_kwargs": ADAMW}),
        (tiny_llama, {"optimizer_cls_and_kwargs": SGD, "optimizer_groups": GROUPS}),
        (tied_gpt2, {"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 1e-2, "eps": 1e-3, "foreach": True})}),
    ],
)
def test_step_in_backward_trains_like_the_normal_optimizer(build: Any, options: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        results.append(run(trainer_for(tmp_path / str(fused), build(), fused, trainer_options=options)))
    assert_same(*results)


def assert_same(normal: Result, fused: Result) -> None:
    """Assert equal training to 1e-6; norms to 1e-5, because their squares are summed in another order."""
    assert_same_training(normal._replace(norms=fused.norms), fused, tolerance=1e-6)
    assert fused.norms == pytest.approx(normal.norms, rel=1e-5)


def test_gradients_take_less_than_a_quarter_of_their_memory() -> None:
    model = tiny_llama(num_hidden_layers=12, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    all_gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    tokens = torch.arange(4)[None]

    def backward() -> None:
        model(tokens).logits.square().mean().backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    normal = peak_bytes(backward)
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with StepInBackward(optimizer):
        fused = peak_bytes(backward)
    assert normal > all_gradients
    # The count includes the activations of these few tokens.
    assert fused < all_gradients / 4
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_each_parameter_gets_one_separate_step(tmp_path: Path) -> None:
    stepped: list[list[Tensor]] = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            stepped.append([parameter for group in self.param_groups for parameter in group["params"]])
            return super().step(closure)

    model = tiny_llama()
    options = {"optimizer_cls_and_kwargs": (Counted, {"lr": 0.1}), "optimizer_groups": GROUPS}
    trainer_for(tmp_path, model, True, max_steps=2, trainer_options=options).train()
    assert [len(one) for one in stepped] == [1] * 2 * len(list(model.parameters()))
    half = len(stepped) // 2
    assert (
        {id(one[0]) for one in stepped[:half]}
        == {id(one[0]) for one in stepped[half:]}
        == {id(parameter) for parameter in model.parameters()}
    )


@pytest.mark.parametrize("first", [False, True])
def test_resume_can_switch_to_or_from_step_in_backward(first: bool, tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "constant_with_warmup", "save_strategy": "steps", "save_steps": 5}
    straight = run(trainer_for(tmp_path / "straight", tiny_llama(), False, **settings))
    run(trainer_for(tmp_path / "moved", tiny_llama(), first, **{**settings, "max_steps": 5}))
    resumed = run(trainer_for(tmp_path / "moved", tiny_llama(seed=1), not first, **settings))
    for name, tensor in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], tensor, rtol=1e-6, atol=1e-7)


def test_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "constant_with_warmup", "save_strategy": "steps", "save_steps": 5}
    straight = run(trainer_for(tmp_path / "straight", tiny_llama(), True, **settings))
    run(trainer_for(tmp_path / "resumed", tiny_llama(), True, **{**settings, "max_steps": 5}))
    resumed = run(trainer_for(tmp_path / "resumed", tiny_llama(seed=1), True, **settings))
    assert resumed.losses == straight.losses[5:]
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in straight.weights.items())


def test_backward_after_training_does_not_change_weights(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer_for(tmp_path, model, True, max_steps=1).train()
    before = model.lm_head.weight.detach().clone()
    model(torch.arange(4)[None]).logits.sum().backward()
    assert torch.equal(before, model.lm_head.weight)
    assert model.lm_head.weight.grad is not None


class Fails:
    """Callback that ends training with an error."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise ZeroDivisionError


def test_backward_after_failed_training_does_not_change_weights(tmp_path: Path) -> None:
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError):
        trainer_for(tmp_path, model, True, Fails()).train()
    before = model.lm_head.weight.detach().clone()
    model(torch.arange(4)[None]).logits.sum().backward()
    assert torch.equal(before, model.lm_head.weight)


def test_passed_optimizer_may_have_frozen_parameters(tmp_path: Path) -> None:
    model = tiny_llama()
    embedding = model.model.embed_tokens.weight.requires_grad_(False)
    before = embedding.clone(), model.lm_head.weight.detach().clone()
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    trainer_for(tmp_path, model, True, max_steps=1, warmup_steps=0, trainer_options=options).train()
    assert torch.equal(embedding, before[0]) and not torch.equal(model.lm_head.weight, before[1])


def test_norm_of_bfloat16_gradients_is_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    gradient = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.bfloat16)
    with StepInBackward(torch.optim.SGD([parameter], lr=0.1)) as step_in_backward:
        (parameter * gradient).sum().backward()
    norm = step_in_backward()
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_backward_after_load_checkpoint_does_not_change_weights(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer_for(tmp_path, tiny_llama(), True, **saving).train()
    trainer = trainer_for(tmp_path, tiny_llama(seed=1), True, **saving)
    trainer.load_checkpoint()
    model: Any = trainer.model
    before = model.lm_head.weight.detach().clone()
    model(torch.arange(4)[None]).logits.sum().backward()
    assert torch.equal(before, model.lm_head.weight)


def test_only_the_euclidean_norm_is_supported(tmp_path: Path) -> None:
    step_in_backward = StepInBackward(torch.optim.SGD(TokenModel().parameters()))
    with pytest.raises(ValueError, match=r"norm_type=1.0 cannot be used with fuse_optim_with_backward=True"):
        step_in_backward(1.0)


def test_grad_logger_warns_that_there_are_no_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_for(tmp_path, tiny_llama(), True, GradLogger(), max_steps=1).train()
    assert "GradLogger logs nothing" in caplog.text


def on_pipeline(output_dir: Path) -> None:
    options: dict[str, Any] = {"schedule": "gpipe", "n_microbatches": 1, "momentum": 0.9, **SETTINGS}
    results = [
        whole_result(
            trainer_of(
                PipelineTrainer,
                output_dir / str(fused),
                llama,
                token_samples(40),
                fuse_optim_with_backward=fused,
                **options,
            )
        )
        for fused in (False, True)
    ]
    assert_same(*results)


def test_pipeline_with_one_micro_batch_trains_like_the_normal_optimizer(tmp_path: Path) -> None:
    run_on_ranks(on_pipeline, 2, tmp_path)


# --- rejected

FUSED = "fuse_optim_with_backward=True cannot be combined with "


@pytest.mark.parametrize(
    ("trainer_class", "settings", "options", "message"),
    [
        (Trainer, {"max_grad_norm": 1.0}, {}, r"max_grad_norm=1.0: .*before the total norm is known"),
        (Trainer, {"gradient_accumulation_steps": 2}, {}, r"gradient_accumulation_steps=2: .*applied and freed"),
        (Trainer, {"mixed_precision": "fp16"}, {}, r"mixed_precision='fp16': GradScaler must see all gradients"),
        (
            Trainer,
            {},
            {"optimizer_groups": {"matrices": {"regex": "weight", "factory": torch.optim.SGD}}},
            r"several optimizers \(optimizer_groups matrices have factories\).*Give all groups the same",
        ),
        (
            Trainer,
            {},
            {"optimizer": Multiopt([torch.optim.SGD(TokenModel().parameters())])},
            r"several optimizers \(Multiopt was given\)",
        ),
        (DDPTrainer, {}, {}, r"DDP: .*before its gradient is reduced over the ranks"),
        (AccelTrainer, {}, {}, r"Accelerate: the accelerator reduces"),
        (PipelineTrainer, {"n_microbatches": 4}, {}, r"n_microbatches=4: .*Set n_microbatches=1"),
        (
            PipelineTrainer,
            {"n_microbatches": 1},
            {"pipe_schedule_factory": "zbv", "model": None, "model_init": llama},
            r"schedule='zbv': it computes gradients of weights separately",
        ),
        (HybridTrainer, {"n_microbatches": 1, "pp_size": 2}, {}, r"several pipelines: .*summed over all pipelines"),
    ],
)
def test_invalid_combinations_are_rejected_at_construction(
    trainer_class: type[Trainer], settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keywords: dict[str, Any] = {"args": {"output_dir": str(tmp_path), "fuse_optim_with_backward": True, **settings}}
    keywords["args"]["use_cpu"] = True
    if trainer_class is AccelTrainer:
        # Made here, because other tests reset the state that all accelerators of a process share.
        keywords["accelerator"] = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=FUSED + message):
        trainer_class(**{**keywords, "model": TokenModel(), "train_dataset": token_samples(4), **options})


class CountsInGroup(torch.optim.SGD):
    """Optimizer with state that would be lost."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        return super().step(closure)


class CountsInPlace(torch.optim.SGD):
    """Optimizer with state that would change once for each parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([{"params": list(parameters), "num_steps": torch.zeros(())}], lr=lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] += 1
        return super().step(closure)


class CountsItself(torch.optim.SGD):
    """Optimizer with such state in an attribute."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [CountsInGroup, CountsInPlace, CountsItself])
def test_optimizer_with_state_shared_by_all_parameters_is_rejected(optimizer: Any, tmp_path: Path) -> None:
    options = {"optimizer_cls_and_kwargs": (optimizer, {"lr": 0.1})}
    with pytest.raises(ValueError, match=FUSED + r"Counts\w+: it keeps num_steps for all parameters together"):
        trainer_for(tmp_path, tiny_llama(), True, trainer_options=options).train()


def tied_between_stages(output_dir: Path) -> None:
    settings: dict[str, Any] = {"n_microbatches": 1, "schedule": "gpipe", **SETTINGS}
    trainer_of(
        PipelineTrainer, output_dir, tied_gpt2, token_samples(8), fuse_optim_with_backward=True, **settings
    ).train()


def test_weights_tied_between_stages_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=FUSED + "weights that are tied between stages.*tie_word_embeddings=False"):
        run_on_ranks(tied_between_stages, 2, tmp_path)


def test_gradient_norm_is_reported_to_callbacks(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer_for(tmp_path, tiny_llama(), True, recorder, max_steps=3).train()
    norms = recorder.details("on_train_metrics", "grad_norm")
    assert len(norms) == 3 and all(float(norm) > 0 for norm in norms)
