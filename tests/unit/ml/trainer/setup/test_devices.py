"""Devices: train/eval mode, memory clean-up, activation checkpointing and device choice."""

import pytest
import torch
from torch import nn

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.setup.devices import choose_device, maybe_cleanup_memory
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing, set_train


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_submodules_in_eval_mode_stay_so_after_an_evaluation() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model[1].eval()
    before = modes(model)
    with set_train(model, False):
        assert not any(modes(model))
    assert modes(model) == before == [True, True, False, False, False]


def test_mode_is_restored_after_an_error() -> None:
    model = nn.Linear(2, 2).eval()
    with pytest.raises(KeyError), set_train(model, True):
        assert model.training
        raise KeyError
    assert not model.training


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fake device of 100 bytes with 70 reserved and 30 used; the list grows when its cache is emptied."""
    calls: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (30, 100))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 70)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 30)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize(("threshold", "pays"), [(0.0, True), (0.39, True), (0.4, False), (1.0, False)])
def test_cache_is_emptied_if_enough_of_it_is_unused(emptied: list[bool], threshold: float, pays: bool) -> None:
    maybe_cleanup_memory(threshold)
    assert bool(emptied) == pays


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_cleanup_on_the_cpu_does_nothing() -> None:
    maybe_cleanup_memory(0.0)


def test_hugging_face_models_use_non_reentrant_checkpointing() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    enable_hf_activation_checkpointing(0, model)
    assert model.is_gradient_checkpointing
    assert model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"] is False


def test_gradient_checkpointing_kwargs_can_be_set() -> None:
    class Model(nn.Linear):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, object]) -> None:
            self.chosen = gradient_checkpointing_kwargs

    model = Model(2, 2)
    enable_hf_activation_checkpointing(0, model, gradient_checkpointing_kwargs={"preserve_rng_state": False})
    assert model.chosen == {"use_reentrant": False, "preserve_rng_state": False}
    enable_hf_activation_checkpointing(0, model, {"use_reentrant": True})
    assert model.chosen == {"use_reentrant": True}


def test_other_models_are_rejected_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"Linear \(rank 3\).*enable_activation_checkpoint_fn"):
        enable_hf_activation_checkpointing(3, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("asked", "kind", "device"),
    [
        (None, "cuda", "cuda:5"),
        ("cuda", "cuda", "cuda:5"),
        ("cuda:5", "cuda", "cuda:5"),
        ("xpu", "xpu", "xpu:2"),
        ("cuda:1", "cpu", "cpu"),
    ],
)
def test_device_comes_from_the_environment(asked: str | None, kind: str, device: str) -> None:
    env = StaticDistributedEnvironment(local_rank=2, local_world_size=4, device="cuda:5", device_type="cuda")
    assert choose_device(asked, kind, env) == torch.device(device)


def test_single_process_may_choose_any_device() -> None:
    alone = StaticDistributedEnvironment()
    assert choose_device(None, "cuda", alone) == torch.device("cuda:0")
    assert choose_device("cuda:1", "cuda", alone) == torch.device("cuda:1")
    unnumbered = StaticDistributedEnvironment(local_rank=1, local_world_size=2, device="cuda", device_type="cuda")
    assert (
        choose_device(None, "cuda", unnumbered) == choose_device("cuda:1", "cuda", unnumbered) == torch.device("cuda:1")
    )


def test_one_device_for_several_processes_is_rejected() -> None:
    env = StaticDistributedEnvironment(local_rank=2, local_world_size=4, device="cuda:2", device_type="cuda")
    with pytest.raises(ValueError, match=r"device='cuda:0' cannot be used by local rank 2: its device is cuda:2"):
        choose_device("cuda:0", "cuda", env)
