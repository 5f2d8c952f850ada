"""Search for the repeated layers of a model, and forward passes without a KV cache."""

import pytest
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from forgather.ml.trainer.pipeline.splitters.hugging_face_stages import find_anatomy, hugging_face_stages
from forgather.ml.trainer.setup.layers import avoid_cache, repeated_layers
from tests.support.tiny_models import TokenModel, tiny_llama


class Layer(nn.Linear):
    """Layer of a model that is not from transformers."""

    def __init__(self) -> None:
        super().__init__(2, 2)


class Stacked(nn.Module):
    """Model of the pipeline protocol, with a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = Layer()
        self.layer_stack = nn.ModuleList([Layer(), shared, shared])


class Declared(nn.Module):
    """Model that names the class of its layers."""

    _no_split_modules = ("Layer", "Embedding")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 2)
        self.blocks = nn.Sequential(Layer(), Layer(), nn.Tanh())


def test_layers_are_found_in_transformers_the_protocol_and_declared_classes() -> None:
    llama = tiny_llama(num_hidden_layers=3)
    assert repeated_layers(llama, "x") == list(llama.model.layers)
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)
    bert = BertForMaskedLM(config)
    # As for a model of transformers that declares no classes: the list of config.num_hidden_layers modules.
    bert._no_split_modules = None
    assert repeated_layers(bert, "x") == list(bert.bert.encoder.layer)
    stacked, declared = Stacked(), Declared()
    assert repeated_layers(stacked, "x") == list(stacked.layer_stack)[:2]
    assert repeated_layers(declared, "x") == list(declared.blocks)[:2]


def test_layers_of_pipeline_stages_are_found() -> None:
    llama = tiny_llama(num_hidden_layers=3).to("meta")
    stages = hugging_face_stages(find_anatomy(llama), [range(1), range(1, 3)])
    found = [repeated_layers(stage, "x") for stage in stages]
    assert found == [[llama.model.layers[0]], list(llama.model.layers[1:])]


def test_model_without_recognisable_layers_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"setting=1 works on .*TokenModel shows none.*layer_stack.*_no_split_modules = "
    ):
        repeated_layers(TokenModel(), "setting=1")


def test_no_kv_cache_is_built_unless_requested() -> None:
    model = tiny_llama()
    tokens: Tensor = model.dummy_inputs["input_ids"][:1] % 4
    assert model(tokens).past_key_values is not None
    for _ in range(2):
        avoid_cache(model)
    assert len(model._forward_pre_hooks) == 1
    assert model(tokens).past_key_values is None
    cache = model(tokens, use_cache=True).past_key_values
    assert cache.get_seq_length() == tokens.shape[1]
    assert model(tokens, past_key_values=cache).past_key_values.get_seq_length() == 2 * tokens.shape[1]
    avoid_cache(TokenModel())
