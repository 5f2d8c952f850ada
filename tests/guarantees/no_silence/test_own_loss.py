"""Loss resolution without compute_loss_func: the model's own loss, unless it is the shifted causal one."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, XLNetConfig, XLNetLMHeadModel

from forgather.ml.loss import CausalLoss, LinearCrossEntropyLoss
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from tests.support.data_parallel import ddp_trainer
from tests.support.faults.hostile import change_state
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, quiet_trainer, tiny_llama, token_samples, weights


class Tagger(TokenModel):
    """Model with an own loss over one label per token, which it does not declare."""

    smoothing, term, only_in_training, shift = 0.0, 0.0, False, 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids)
        if labels is None:
            return {"logits": logits}
        cut, targets = (logits, labels) if not self.shift else (logits[:, : -self.shift], labels[:, self.shift :])
        loss = functional.cross_entropy(cut.flatten(0, 1), targets.flatten(), label_smoothing=self.smoothing)
        if self.training or not self.only_in_training:
            loss = loss + self.term * self.head.weight.square().mean()
        return {"loss": loss, "logits": logits}


def tagger(zero_head: bool = False, **options: Any) -> nn.Module:
    model = Tagger()
    if zero_head:
        nn.init.zeros_(model.head.weight)
    for name, value in options.items():
        setattr(model, name, value)
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=8, n_layer=1, n_head=2, n_positions=8))


def xlnet() -> nn.Module:
    torch.manual_seed(0)
    return XLNetLMHeadModel(XLNetConfig(vocab_size=VOCAB_SIZE, d_model=8, n_layer=1, n_head=2, d_inner=8))


def smoothed_llama() -> nn.Module:
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **_: functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )
    return model


CHOICES: dict[str, tuple[Callable[[], nn.Module], bool, int]] = {
    # Builder, whether the model's own loss is used, and the number of targets among 2 x 6 labels.
    "gpt2": (gpt2, False, 10),
    "llama": (tiny_llama, False, 10),
    "causal": (lambda: tagger(shift=1), False, 10),
    "takes no labels": (TokenModel, False, 10),
    "tagger": (tagger, True, 12),
    "tagger with a head of zeros": (lambda: tagger(zero_head=True), True, 12),
    "xlnet": (xlnet, True, 12),
    "added term": (lambda: tagger(shift=1, term=1.0), True, 10),
    "term of training": (lambda: tagger(shift=1, term=1.0, only_in_training=True), True, 10),
    "smoothing": (lambda: tagger(shift=1, smoothing=0.1), True, 10),
    "smoothing, head of zeros": (lambda: tagger(True, shift=1, smoothing=0.1), True, 10),
    "another loss_function": (smoothed_llama, True, 10),
}


@pytest.mark.parametrize("name", CHOICES)
def test_first_batch_resolves_the_loss_without_side_effects(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, is_own, num_targets = CHOICES[name]
    model = build().train()
    tokens = torch.randint(0, VOCAB_SIZE, (2, 6), generator=torch.Generator().manual_seed(1))
    before, generator = weights(model), torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        for labels in (tokens, torch.full_like(tokens, -100)):
            model_loss = ModelLoss(None, token_weighted=True)
            model_loss.adopt(model_loss.look(model, {"input_ids": tokens}, labels))
            assert model_loss.state_dict() is not None and model_loss.state_dict()["own"] is is_own
            assert model_loss.count(tokens, {"labels": tokens}) == num_targets
    assert caplog.text.count("Loss: the model's own" if is_own else "Loss: shifted causal cross entropy") == 2
    assert torch.equal(generator, torch.get_rng_state()) and all(one.training for one in model.modules())
    assert all(torch.equal(before[key], value) for key, value in weights(model).items())
    assert all(parameter.grad is None for parameter in model.parameters())


def samples(num: int = 32) -> list[dict[str, Tensor]]:
    rows = torch.randint(0, VOCAB_SIZE, (num, 6), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row % 4} for row in rows]


def test_token_tagger_learns_its_labels(tmp_path: Path) -> None:
    model, data = tagger(), samples()
    quiet_trainer(tmp_path, model, data, per_device_train_batch_size=8, num_train_epochs=60, learning_rate=2.0).train()
    tokens = torch.stack([one["input_ids"] for one in data])
    assert (model(tokens)["logits"].argmax(-1) == tokens % 4).float().mean() == 1.0


def test_loss_resolution_does_not_change_dropout(tmp_path: Path) -> None:
    results = []
    for loss in (None, CausalLoss()):
        model = gpt2()
        quiet_trainer(tmp_path, model, token_samples(8), trainer_options={"compute_loss_func": loss}).train()
        results.append(weights(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def run(output_dir: Path, steps: int, loss: Any = None) -> dict[str, Tensor]:
    model = tagger()
    options = {"compute_loss_func": loss}
    settings: dict[str, Any] = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2}
    quiet_trainer(output_dir, model, samples(), trainer_options=options, momentum=0.9, **settings).train()
    return weights(model)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resumed_run_keeps_its_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    with caplog.at_level(logging.INFO):
        assert_equal(run(tmp_path / "resumed", 4), straight)
    assert "Loss: the model's own, as in the checkpoint." in caplog.text


def test_older_checkpoint_resumes_with_the_causal_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = run(tmp_path / "straight", 6, CausalLoss())
    run(tmp_path / "old", 2, CausalLoss())
    change_state(
        tmp_path / "old/checkpoints/checkpoint-2", "trainer_state.pt", lambda state: state.pop("loss") and None
    )
    run(tmp_path / "old", 4)
    assert_equal(run(tmp_path / "old", 6), straight)
    assert caplog.text.count("This run continues with shifted causal cross entropy") == 1


def test_fused_loss_rejects_a_model_with_its_own_loss(tmp_path: Path) -> None:
    options = {"fused_loss_factory": LinearCrossEntropyLoss}
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, which computes its own loss.*compute_loss_func"):
        quiet_trainer(tmp_path, smoothed_llama(), token_samples(4), trainer_options=options).train()


def _train_on_two(output_dir: Path, num: int) -> dict[str, Tensor]:
    trainer = ddp_trainer(output_dir, tagger(), samples(num), max_steps=3)
    trainer.train()
    return weights(trainer.unwrapped_model())


@pytest.mark.parametrize("num", [6, 1], ids=["even", "one rank has a stand-in"])
def test_ranks_resolve_the_same_loss(tmp_path: Path, num: int) -> None:
    model = tagger()
    quiet_trainer(tmp_path / "one", model, samples(num), per_device_train_batch_size=2, max_steps=3).train()
    for result in run_on_ranks(_train_on_two, 2, tmp_path / "two", num):
        for name, tensor in weights(model).items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)
