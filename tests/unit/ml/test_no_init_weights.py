"""`no_init_weights`: models are built without random initialisation; nothing else changes."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import normal_

from forgather.ml.no_init_weights import no_init_weights


class OwnModule(nn.Module):
    """Module that imports an initialiser by name, as user code does, and has a non-persistent buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal_(nn.Parameter(torch.empty(3))).detach())
        self.register_buffer("table", nn.init.ones_(torch.empty(3)), persistent=False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "embedding": lambda: nn.Embedding(3, 3, padding_idx=0),
    "norm": lambda: nn.LayerNorm(3),
    "convolution": lambda: nn.Conv1d(2, 2, 1),
    "recurrent": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "own": OwnModule,
}


@pytest.fixture(autouse=True)
def _marked_memory() -> Iterator[None]:
    """Make torch fill new memory with NaN, so that uninitialised weights are recognisable."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def is_initialised(module: nn.Module) -> bool:
    return not any(parameter.isnan().any() for parameter in module.parameters())


def random_state_after(build: Callable[[], nn.Module]) -> Tensor:
    torch.manual_seed(0)
    build()
    return torch.get_rng_state()


@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_not_initialised(kind: str) -> None:
    before = random_state_after(nn.Identity)
    with no_init_weights():
        assert torch.equal(random_state_after(MODULES[kind]), before)
        assert not is_initialised(MODULES[kind]())
    assert is_initialised(MODULES[kind]())


def test_every_initialiser_is_skipped_for_parameters_and_returns_them() -> None:
    weight = nn.Parameter(torch.full((4, 4), 7.0))
    with no_init_weights():
        for initialise in (nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_, nn.init.kaiming_normal_):
            assert initialise(weight) is weight
        assert nn.init.sparse_(tensor=weight, sparsity=0.5) is weight
    assert torch.equal(weight, torch.full((4, 4), 7.0))


def test_buffers_are_initialised() -> None:
    with no_init_weights():
        assert OwnModule().table.tolist() == [1.0, 1.0, 1.0]


def test_initialisation_is_restored_after_an_error() -> None:
    original = nn.init.kaiming_uniform_
    with pytest.raises(KeyError), no_init_weights():
        raise KeyError
    assert nn.init.kaiming_uniform_ is original
    assert is_initialised(nn.Linear(3, 3))


def test_contexts_can_be_nested() -> None:
    original = nn.init.kaiming_uniform_
    with no_init_weights():
        with no_init_weights():
            pass
        assert not is_initialised(nn.Linear(3, 3))
    assert nn.init.kaiming_uniform_ is original
    assert is_initialised(nn.Linear(3, 3))


def test_other_threads_initialise_their_models() -> None:
    built: list[nn.Module] = []
    with no_init_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
    assert is_initialised(built[0])


def test_weights_can_be_loaded_inside_the_context() -> None:
    source = nn.Linear(3, 3)
    with no_init_weights():
        target = nn.Linear(3, 3)
        target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)


def test_hugging_face_models_keep_tied_weights_and_buffers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    usual = LlamaForCausalLM(config)
    before = random_state_after(nn.Identity)
    with no_init_weights():
        assert torch.equal(random_state_after(lambda: LlamaForCausalLM(config)), before)
        model = LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, usual.model.rotary_emb.inv_freq)
    assert not is_initialised(model)
    assert is_initialised(LlamaForCausalLM(config))
