"""Activation offloading: only large activations go to the CPU, and they return unchanged."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.ml.trainer.recipes import Recipes
from forgather.ml.trainer.recipes.activation_offloading import OffloadedActivations
from tests.support.data_parallel import run
from tests.support.tiny_models import TokenModel, quiet_trainer, tiny_llama, token_samples

LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


class Everything(OffloadedActivations):
    """Offloads CPU tensors too, as if they were on another device."""

    def _stays(self, tensor: Tensor) -> bool:
        return False


def test_offloading_has_no_effect_on_the_cpu_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_steps": 3, **LOGGED}
    plain = run(quiet_trainer(tmp_path / "plain", tiny_llama(), token_samples(8), **settings))
    with caplog.at_level(logging.WARNING):
        offloaded = run(
            quiet_trainer(
                tmp_path / "offloaded", tiny_llama(), token_samples(8), enable_activation_offloading=True, **settings
            )
        )
    assert offloaded.losses == plain.losses
    assert "enable_activation_offloading=True has no effect" in caplog.text


def test_large_activations_are_offloaded_but_not_weights() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty((64, 64), device="cuda")
        small = torch.empty((4,), device="cuda")
        offloading = OffloadedActivations([weight])
        # Compiled graphs save such tensors, and their backward passes require the same strides.
        activation = torch.empty((64, 32), device="cuda").t()
        packed = [offloading._pack(tensor) for tensor in (activation, weight, weight.t(), small)]
        assert packed[0].copy.device.type == "cpu"
        assert offloading.unpack_hook(packed[0]).device.type == "cuda"
        assert offloading.unpack_hook(packed[0]).shape == activation.shape
        assert offloading.unpack_hook(packed[0]).stride() == activation.stride()
        assert all(isinstance(one, Tensor) and one.device.type == "cuda" for one in packed[1:])


SAVED = {
    "dense": lambda: torch.randn(4, 6, 8),
    "transposed": lambda: torch.randn(4, 6, 8).transpose(0, 2),
    "a slice of a product": lambda: torch.randn(4, 6, 24).split(8, dim=2)[1],
    "every other row": lambda: torch.randn(8, 6)[::2],
    "a mask for all heads": lambda: torch.randn(4, 1, 6, 6).expand(4, 8, 6, 6),
    "one number": lambda: torch.randn(()).expand(3, 5),
    "windows": lambda: torch.randn(12).unfold(0, 4, 2),
    "nothing": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("name", SAVED)
def test_offloaded_tensors_return_with_values_and_strides(name: str) -> None:
    tensor = SAVED[name]()
    offloading = Everything([])
    back = offloading.unpack_hook(offloading.pack_hook(tensor))
    assert torch.equal(back, tensor)
    assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)


def test_expanded_tensor_is_offloaded_at_its_storage_size() -> None:
    packed: Any = Everything([]).pack_hook(torch.randn(2, 1, 64).expand(2, 16, 64))
    assert packed.copy.untyped_storage().nbytes() == 2 * 64 * 4


def test_offloading_does_not_change_gradients() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 32, (2, 16))
    mask = torch.ones_like(tokens)
    mask[0, -4:] = 0

    def gradients(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain, offloaded = gradients(torch.enable_grad()), gradients(Everything([]))
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))


def test_loss_runs_outside_of_activation_offloading(tmp_path: Path) -> None:
    inside: list[str] = []

    class Watched(Recipes):
        def use_device(self, device: torch.device) -> None:
            self.offloads = True

        @contextmanager
        def activations(self, model: Any) -> Iterator[None]:
            inside.append("begin")
            yield
            inside.append("end")

    class Model(TokenModel):
        def forward(self, input_ids: Tensor) -> Tensor:
            inside.append("model")
            return super().forward(input_ids)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        inside.append("loss")
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    options = {"loss_fn": loss}
    trainer = quiet_trainer(tmp_path, Model(), token_samples(2), max_steps=2, trainer_options=options)
    trainer.recipes = Watched(trainer.args)
    trainer.train()
    # The first step also tries the loss.
    assert inside[-4:] == ["begin", "model", "end", "loss"]
