"""Global torch settings (SDPA backend, matmul precision, ...) apply while a trainer runs, and are restored afterwards."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from tests.support.data_parallel import Result, assert_same_training, run
from tests.support.pipelines import llama, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, Recorder, TokenModel, quiet_trainer, token_samples

LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
MATH = "aten::_scaled_dot_product_attention_math"
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    """Model with attention only, which reveals the SDPA backend."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 16)
        self.head = nn.Linear(16, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids).unflatten(-1, (2, 8)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        logits: Tensor = self.head(attended.transpose(1, 2).flatten(2))
        return logits


def attention_operations(work: Any) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as record:
        work()
    names = {event.key for event in record.key_averages()}
    return {name for name in names if "attention" in name and name != "aten::scaled_dot_product_attention"}


@pytest.mark.parametrize(
    ("backend", "operation"),
    [
        ("math", MATH),
        ("flash", FLASH),
    ],
)
def test_sdpa_backend_selects_the_attention_kernel(backend: str, operation: str, tmp_path: Path) -> None:
    options = {"eval_dataset": token_samples(2)}
    settings = {"sdpa_backend": backend, "max_steps": 1}
    trainer = quiet_trainer(tmp_path, Attention(), token_samples(4), trainer_options=options, **settings)
    for work in (trainer.train, trainer.evaluate):
        used = attention_operations(work)
        assert operation in used
        assert not any("math" in name for name in used) or backend == "math"


def test_sdpa_priority_follows_the_list(tmp_path: Path) -> None:
    settings = {"sdpa_backend": ["math", "flash"], "sdpa_set_priority": True, "max_steps": 1}
    orders: list[list[int]] = []
    recorder = Recorder(on_step_begin=lambda **_: orders.append(torch._C._get_sdp_priority_order()[:2]))
    quiet_trainer(tmp_path, Attention(), token_samples(4), recorder, **settings).train()
    assert orders == [[int(torch.nn.attention.SDPBackend.MATH), int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)]]


def test_torch_settings_are_restored(tmp_path: Path) -> None:
    before = functorch_config.activation_memory_budget, torch.backends.cuda.flash_sdp_enabled()
    seen: list[Any] = []
    recorder = Recorder(
        on_step_begin=lambda **_: seen.append(
            (functorch_config.activation_memory_budget, torch.backends.cuda.flash_sdp_enabled())
        )
    )
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "activation_memory_budget": 0.3}
    quiet_trainer(
        tmp_path, TokenModel(), token_samples(2), recorder, max_steps=1, sdpa_backend="math", **settings
    ).train()
    assert seen == [(0.3, False)]
    assert (functorch_config.activation_memory_budget, torch.backends.cuda.flash_sdp_enabled()) == before


def test_matmul_precision_and_recompile_limit_reach_torch(tmp_path: Path) -> None:
    from torch._dynamo import config as dynamo_config

    before = torch.get_float32_matmul_precision(), dynamo_config.recompile_limit
    settings = {"float32_matmul_precision": "medium", "dynamo_recompile_limit": 17, "max_steps": 1}
    try:
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), **settings).train()
        assert (torch.get_float32_matmul_precision(), dynamo_config.recompile_limit) == ("medium", 17)
    finally:
        torch.set_float32_matmul_precision(before[0])
        dynamo_config.recompile_limit = before[1]


def test_detect_anomaly_names_the_operation_that_failed(tmp_path: Path) -> None:
    class Root(TokenModel):
        def forward(self, input_ids: Tensor) -> Tensor:
            # The gradient of a square root is not finite at zero.
            return super().forward(input_ids) + torch.sqrt(self.embedding.weight.sum() * 0.0) * 0.0

    with pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan"):
        quiet_trainer(tmp_path, Root(), token_samples(2), max_steps=1, detect_anomaly=True).train()


# --- on pipelines


def on_pipeline(output_dir: Path) -> list[set[str]]:
    """Return the attention kernels without and with the setting."""
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, **LOGGED}
    results: list[Result] = []
    used = []
    for number, options in enumerate(({}, {"enable_activation_offloading": True, "sdpa_backend": "math"})):
        trainer = trainer_of_pipeline(output_dir / str(number), **options, **settings)
        used.append(attention_operations(lambda trainer=trainer: results.append(run(trainer))))
    assert_same_training(*results, tolerance=1e-5)
    return used


def trainer_of_pipeline(output_dir: Path, **settings: Any) -> Any:
    from forgather.ml.trainer.pipeline import PipelineTrainer

    # Small, because every operation is recorded.
    build = functools.partial(llama, 2)
    return trainer_of(PipelineTrainer, output_dir, build, token_samples(8), schedule="1f1b", **settings)


def test_sdpa_backend_applies_to_every_pipeline_stage(tmp_path: Path) -> None:
    for by_default, by_math in run_on_ranks(on_pipeline, 2, tmp_path):
        assert FLASH in by_default and FLASH not in by_math
        assert MATH in by_math


# --- rejected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sdpa_backend": "fast"}, r"sdpa_backend='fast' cannot be used: choose from 'math', 'flash'"),
        ({"sdpa_backend": ["math", "fast"]}, r"sdpa_backend=\['math', 'fast'\] cannot be used"),
        ({"sdpa_backend": []}, r"sdpa_backend=\[\] cannot be used: name at least one backend"),
        ({"sdpa_set_priority": True}, r"sdpa_set_priority=True needs a list of backends .* sdpa_backend is None"),
        ({"activation_memory_budget": 0.5}, r"activation_memory_budget=0.5 needs torch_compile=True"),
        (
            {"activation_memory_budget": 1.5, "torch_compile": True},
            r"activation_memory_budget=1.5 cannot be used: .* from 0 to 1",
        ),
        ({"float32_matmul_precision": "low"}, r"float32_matmul_precision='low' cannot be used"),
        (
            {"default_dtype": "bfloat16"},
            r"default_dtype='bfloat16' has no effect on a finished model",
        ),
        ({"construct_model_on": "meta"}, r"construct_model_on='meta' has no effect .*pass model_init"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), **settings)
