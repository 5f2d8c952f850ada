"""Deferred initialisation: every value equals a plain build bit for bit, and no rank holds the full model."""

import copy
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from forgather.ml.checkpoint.weights.module_weights import create_sharing_metadata
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.trainer.fsdp2.deferred_init import DEFAULT_MIN_BYTES, DeferredInit, build_deferred
from forgather.ml.utils import default_dtype
from tests.support.sampling import long_search

Builder = Callable[[], nn.Module]
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def hugging_face(kind: str, **options: Any) -> nn.Module:
    architecture = getattr(transformers, kind)
    model: nn.Module = architecture(architecture.config_class(**options))
    return model


def initialised(module: nn.Module, initialise: Callable[[Tensor], Any]) -> nn.Module:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            initialise(parameter)
    return module


class Assigned(nn.Module):
    """Parameters and buffers that are made in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.scaled = nn.Parameter(torch.randn(12, 5) * 0.02)
        self.own_generator = nn.Parameter(torch.empty(7, 4).normal_(generator=generator))
        self.own_generator_again = nn.Parameter(torch.rand(7, 4, generator=generator))
        self.from_numpy = nn.Parameter(torch.from_numpy(np.arange(12.0).reshape(3, 4)))
        self.legacy = nn.Parameter(torch.Tensor(3, 4).fill_(0.25))
        self.frozen = nn.Parameter(torch.ones(3, 4).t().cumsum(0), requires_grad=False)
        self.rounded = nn.Parameter(torch.randn(6, 4).to(torch.bfloat16))
        self.eye = nn.Parameter(torch.empty(5, 5))
        nn.init.eye_(self.eye)
        self.register_buffer("mask", torch.tril(torch.ones(9, 9, dtype=torch.bool)))
        self.register_buffer("angles", torch.outer(torch.arange(9.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8)).cos())
        self.register_buffer("like", torch.zeros(4, device=self.scaled.device) + self.scaled.new_tensor([1, 2, 3, 4]))
        self.register_buffer("halves", torch.ones(4, dtype=torch.int64) * 0.5)


class Edited(nn.Module):
    """A weight that is edited row by row, by masks, through views, and from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 6))
        self.other = nn.Parameter(torch.zeros(6, 8))
        self.copied = nn.Parameter(torch.empty(8, 6))
        with torch.no_grad():
            for row in self.weight:
                row.normal_()
            self.weight[2] = 0
            self.weight[torch.tensor([4, 5]), 1] = torch.tensor([7.0, 8.0])
            self.weight[self.weight > 1.5] = 1.5
            self.weight[:, 3].uniform_(-1, 1)
            self.weight.data.t()[0].clamp_(-0.5, 0.5)
            self.other.copy_(self.weight.t())
            self.weight.div_(self.weight.norm(dim=1, keepdim=True) + 1)
            self.copied.copy_(self.other.t()).mul_(self.weight)
            self.other[0].copy_(self.other[1])
            self.other.bernoulli_(0.5).masked_fill_(torch.eye(6, 8, dtype=torch.bool), -1)
            self.weight.data = self.weight.data + float(self.copied.sum())


class Tied(nn.Module):
    """Tied embedding and output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.output = nn.Linear(8, 12, bias=False)
        self.output.weight = self.embedding.weight


def converted() -> nn.Module:
    """Return a tied model after conversions and moves of the full model."""
    return Tied().to("cpu").to(torch.bfloat16).cpu().float()


def filled_later() -> nn.Module:
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")
    return initialised(model, nn.init.xavier_uniform_)


def moved_copies() -> nn.Module:
    model = nn.Linear(6, 6)
    same, apart = model.weight.data.to("cpu"), model.weight.data.to("cpu", copy=True)
    same.mul_(2)
    apart.zero_()
    return model


def in_bfloat16() -> nn.Module:
    with default_dtype(torch.bfloat16):
        return initialised(nn.TransformerEncoderLayer(8, 2, 16), nn.init.trunc_normal_)


def deep_copies() -> nn.Module:
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    layers = nn.ModuleList([layer, copy.deepcopy(layer)])
    nn.init.zeros_(layer[0].weight)
    return layers


def loaded() -> nn.Module:
    model = nn.Linear(6, 6)
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    for value in state.values():
        value.zero_()
    return model


MODELS: dict[str, Builder] = {
    "linear": lambda: nn.Linear(8, 8),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 3, 3)),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "lstm": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "orthogonal": lambda: initialised(nn.Linear(6, 9), nn.init.orthogonal_),
    "truncated": lambda: initialised(nn.Linear(40, 30), lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03)),
    "truncated far": lambda: initialised(nn.Linear(8, 8), lambda w: nn.init.trunc_normal_(w, a=1.5, b=2.5)),
    "sparse": lambda: initialised(nn.Linear(6, 9), lambda w: nn.init.sparse_(w, 0.4)),
    "dirac": lambda: initialised(nn.Conv1d(3, 3, 3), nn.init.dirac_),
    "kaiming": lambda: initialised(nn.LSTM(4, 4), nn.init.kaiming_normal_),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 5)),
    "orthogonal parametrisation": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "tied": Tied,
    "converted": converted,
    "filled later": filled_later,
    "moved": moved_copies,
    "bfloat16": in_bfloat16,
    "deep copies": deep_copies,
    "loaded": loaded,
    "assigned": Assigned,
    "edited": Edited,
    "llama": lambda: hugging_face("LlamaForCausalLM", **SMALL),
    "tied llama": lambda: hugging_face("LlamaForCausalLM", **SMALL, tie_word_embeddings=True),
    "gpt2": lambda: hugging_face("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32),
    "bert": lambda: hugging_face("BertForMaskedLM", **SMALL),
    "t5": lambda: hugging_face("T5ForConditionalGeneration", d_model=16, d_ff=32, num_layers=2, vocab_size=64),
    "qwen2": lambda: hugging_face("Qwen2ForCausalLM", **SMALL, num_key_value_heads=1),
    "mixtral": lambda: hugging_face("MixtralForCausalLM", **SMALL, num_key_value_heads=1, num_local_experts=4),
    "mpt": lambda: hugging_face("MptForCausalLM", d_model=16, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=32),
    "vit": lambda: hugging_face("ViTForImageClassification", **SMALL, image_size=32, patch_size=8),
    "llama in bfloat16": lambda: hugging_face("LlamaForCausalLM", **SMALL).to(torch.bfloat16),
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def assert_same_model(plain: nn.Module, model: nn.Module, deferred: DeferredInit) -> None:
    values = deferred.initial_values(model)
    expected, built = tensors_of(plain), tensors_of(model)
    assert list(values) == list(expected) == list(built)
    for name, tensor in expected.items():
        value = values[name]()
        assert value.device == torch.device("cpu") and not isinstance(value, nn.Parameter)
        assert torch.equal(value, tensor.detach()), name
        assert torch.equal(deferred.value(built[name]), tensor.detach()), name
        for one in (value, built[name]):
            assert (one.dtype, one.shape, one.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert built[name].requires_grad == tensor.requires_grad, name
        assert type(built[name]) is type(tensor), name
    assert create_sharing_metadata(model) == create_sharing_metadata(plain)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("min_bytes", [1, DEFAULT_MIN_BYTES])
@pytest.mark.parametrize("name", MODELS)
def test_values_equal_a_plain_build(name: str, min_bytes: int) -> None:
    torch.manual_seed(5)
    plain = MODELS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with DeferredInit(min_bytes) as deferred:
        model = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_model(plain, model, deferred)
    assert torch.equal(torch.get_rng_state(), state)
    if min_bytes == 1 and name != "loaded":
        assert any(deferred.is_deferred(parameter) and parameter.is_meta for parameter in model.parameters())


def test_large_parameters_are_deferred_and_small_ones_are_real() -> None:
    torch.manual_seed(0)
    with DeferredInit() as deferred:
        model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    assert [name for name, tensor in tensors_of(model).items() if deferred.is_deferred(tensor)] == ["0.weight"]
    torch.manual_seed(0)
    assert_same_model(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)), model, deferred)


@pytest.mark.parametrize(
    "compute",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.clone,
        lambda weight: weight.new_empty(600, 600),
        lambda weight: weight * 2,
        lambda weight: torch.where(weight > 0, weight, 0.0),
        lambda weight: torch.linalg.qr(weight)[0],
    ],
)
def test_large_results_stay_deferred(compute: Callable[[Tensor], Tensor]) -> None:
    with DeferredInit() as deferred:
        result = compute(torch.eye(600))
    assert deferred.is_deferred(result)


def test_tied_names_have_one_handle() -> None:
    with DeferredInit(1) as deferred:
        values = deferred.initial_values(Tied())
    assert values["embedding.weight"] is values["output.weight"]


def test_handles_keep_the_initial_value() -> None:
    torch.manual_seed(0)
    with DeferredInit(1) as deferred:
        model = nn.Linear(4, 4)
        handle = deferred.initial_values(model)["weight"]
        inside = deferred.value(model.weight)
        nn.init.zeros_(model.weight)
    torch.manual_seed(0)
    assert torch.equal(handle(), nn.Linear(4, 4).weight)
    assert torch.equal(inside, handle())
    assert torch.equal(deferred.value(model.weight), torch.zeros(4, 4))


def test_uninitialised_weights_can_be_replayed() -> None:
    state = torch.get_rng_state()
    with no_init_weights(), DeferredInit(1) as deferred:
        model = MODELS["llama"]()
    assert torch.equal(torch.get_rng_state(), state)
    values = deferred.initial_values(model)
    assert all(values[name]().shape == tensor.shape for name, tensor in tensors_of(model).items())


def test_a_model_on_the_meta_device_has_no_values() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return initialised(nn.Embedding(9, 4, padding_idx=1), nn.init.normal_)

    state = torch.get_rng_state()
    model, deferred = build_deferred(on_meta, min_bytes=1)
    assert deferred is not None and model.weight.is_meta and not deferred.is_deferred(model.weight)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="no initial value"):
        deferred.initial_values(model)["weight"]()


@pytest.mark.parametrize("min_bytes", [1, DEFAULT_MIN_BYTES])
def test_pretrained_weights_are_kept(tmp_path: Path, min_bytes: int) -> None:
    saved = hugging_face("LlamaModel", **SMALL)
    saved.save_pretrained(tmp_path)

    def from_pretrained() -> nn.Module:
        # The saved model lacks the output layer, which is initialised.
        model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        return model

    torch.manual_seed(1)
    plain = from_pretrained()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model, deferred = build_deferred(from_pretrained, min_bytes)
    assert torch.equal(torch.get_rng_state(), state)
    if deferred is None:
        assert all(torch.equal(tensor, tensors_of(plain)[name]) for name, tensor in tensors_of(model).items())
    else:
        assert_same_model(plain, model, deferred)


class ReadsNumpy(nn.Module):
    """Model that reads a weight through NumPy, after drawing from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * random.random() + float(np.random.rand()))
        self.total = float(self.weight.detach().numpy().sum())


def test_fallback_builds_the_same_model(caplog: pytest.LogCaptureFixture) -> None:
    def seed() -> None:
        torch.manual_seed(2)
        random.seed(2)
        np.random.seed(2)

    seed()
    plain = ReadsNumpy()
    seed()
    with caplog.at_level(logging.INFO):
        model, deferred = build_deferred(ReadsNumpy, min_bytes=1)
    assert deferred is None and isinstance(model, ReadsNumpy)
    assert torch.equal(model.weight, plain.weight) and model.total == plain.total
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "numpy" in record.getMessage()


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.resize_(100),
        lambda weight: torch._foreach_mul_([weight, weight.clone()], 2.0),
        lambda weight: torch.tensor([1.0]).to(weight),
        lambda weight: weight.copy_(torch.empty(8, 8, device="meta")),
    ],
)
def test_what_cannot_be_recorded_is_refused(change: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError), DeferredInit(1):
        change(torch.zeros(8, 8))


def test_errors_of_the_model_reach_the_user() -> None:
    def broken() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight.data.add_(torch.ones(3))
        return model

    with pytest.raises(RuntimeError, match="must match the size"):
        build_deferred(broken, min_bytes=1)
    assert not torch.empty(1).is_meta and "device" not in vars(Tensor)


def test_lazy_modules_are_left_to_their_first_forward() -> None:
    model, _ = build_deferred(lambda: nn.LazyLinear(4), min_bytes=1)
    torch.manual_seed(0)
    output = model(torch.ones(2, 3))
    torch.manual_seed(0)
    assert torch.equal(output, nn.LazyLinear(4)(torch.ones(2, 3)))


MEMORY_SCRIPT = """
import re, time, torch
from torch import nn
from forgather.ml.trainer.fsdp2.deferred_init import DeferredInit

def build(width, depth):
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=0.02)
    for layer in layers[1::2]:
        layer.weight = nn.Parameter(torch.randn(width, width) * 0.02)
    return layers

def visit(width, depth):
    with DeferredInit() as deferred:
        model = build(width, depth)
    for value in deferred.initial_values(model).values():
        value()

def status(field):
    with open("/proc/self/status") as file:
        return int(re.search(field + r":\\s+(\\d+) kB", file.read())[1]) / 1024

def growth(action):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before, start = status("VmRSS"), time.perf_counter()
    action(2048, 13)
    print(status("VmHWM") - before, time.perf_counter() - start)

visit(300, 1)
growth(visit)
growth(build)
"""


@long_search
def test_only_one_tensor_is_in_memory_at_a_time() -> None:
    """Build a model of 218 MB, with tensors of 16 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    growth, _, plain_growth, _ = map(float, run.stdout.split())
    assert growth < 64
    assert plain_growth > 150
