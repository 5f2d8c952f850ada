"""torch.compile: compiled models equal eager ones and compile once each for training and evaluation at any batch size."""

import functools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import register_backend
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from forgather._watch.judge import IN_COMPILER, RUNNING
from forgather.ml.distributed.watch.stacks import activity_of
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.setup.torch_settings import cuda_graphs_problem
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import run
from tests.support.pipelines import trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search
from tests.support.tiny_models import VOCAB_SIZE, TokenModel, quiet_trainer, token_samples

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "learning_rate": 0.05,
}


class Layer(nn.Module):
    """Attention layer with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.out(mixed.squeeze(1))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Model that can be split into stages, with few kernels because each takes the C++ compiler a second."""

    def __init__(self, num_layers: int = 1, width: int = 16) -> None:
        super().__init__()
        self.input_encoder = nn.Embedding(VOCAB_SIZE, width)
        self.layer_stack = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.output_decoder = nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.input_encoder(input_ids)
        for layer in self.layer_stack:
            hidden = layer(hidden)
        logits: Tensor = self.output_decoder(hidden)
        return logits


class Losses(NamedTuple):
    """Losses of a run in this process, and the number of compiled graphs."""

    training: list[float]
    evaluation: list[float]
    num_graphs: int


def losses_of(trainer: Trainer) -> Losses:
    torch.compiler.reset()
    counters.clear()
    training = run(trainer).losses
    assert not counters["graph_break"]
    evaluation = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    return Losses(training, evaluation, counters["stats"]["unique_graphs"])


def trained(trainer_class: type[Trainer], output_dir: Path, model_init: Any, **settings: Any) -> Losses:
    """Train on nine full batches and one of two samples; each evaluation has a full batch and one of three."""
    options = {"eval_dataset": token_samples(7, seed=9)}
    return losses_of(
        trainer_of(
            trainer_class, output_dir, model_init, token_samples(38), trainer_options=options, **SETTINGS, **settings
        )
    )


def assert_same_losses(compiled: Losses, eager: Losses) -> None:
    assert len(compiled.training) == 10 and len(compiled.evaluation) == 2
    assert compiled.training == pytest.approx(eager.training, rel=1e-4)
    assert compiled.evaluation == pytest.approx(eager.evaluation, rel=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@long_search
def test_inductor_equals_eager_and_compiles_once_per_mode(tmp_path: Path) -> None:
    eager = trained(Trainer, tmp_path, Decoder)
    compiled = trained(Trainer, tmp_path, Decoder, torch_compile=True)
    assert_same_losses(compiled, eager)
    assert eager.num_graphs == 0
    assert compiled.num_graphs == 2, "one with gradients, one without, no extra graph for incomplete batches"


two_layers = functools.partial(Decoder, 2)


def job(output_dir: str) -> Losses:
    """Train a pipeline with compiled stages on ranks."""
    settings = {"schedule": "1f1b", "n_microbatches": 2, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    return trained(PipelineTrainer, Path(output_dir), two_layers, **settings)


@long_search
def test_compiled_pipeline_stages_equal_eager_and_compile_once_per_mode(tmp_path: Path) -> None:
    eager = trained(Trainer, tmp_path / "one", two_layers)
    for compiled in run_on_ranks(job, 2, str(tmp_path / "ranks")):
        assert_same_losses(compiled, eager)
        assert compiled.num_graphs == 2


class Restless(TokenModel):
    """Model that recompiles at every step, as for a number that the compiler treats as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "step"

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * len(self.name)


class Renames:
    """Callback that invalidates the compiled graph at every step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Restless, **_: Any) -> None:
        model.name += "s"


def test_recompile_limit_stops_compilation_but_not_training(tmp_path: Path) -> None:
    settings = {**SETTINGS, "eval_strategy": "no", "torch_compile": True, "torch_compile_backend": "eager"}
    with dynamo_config.patch(recompile_limit=dynamo_config.recompile_limit):
        compiled = losses_of(
            quiet_trainer(tmp_path, Restless(), token_samples(38), Renames(), dynamo_recompile_limit=2, **settings)
        )
    assert compiled.num_graphs == 2
    assert len(compiled.training) == 10


class Interrupted(TokenModel):
    """Model with a graph break."""

    def forward(self, input_ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(input_ids)


noted_modes: list[str | None] = []


@register_backend(name="noting")
def noting(module: Any, inputs: Any, mode: str | None = None) -> Any:
    """Compile nothing, but record the mode: a custom backend may have its own modes."""
    noted_modes.append(mode)
    return module


def test_mode_and_fullgraph_reach_the_compiler(tmp_path: Path) -> None:
    noted_modes.clear()
    settings: dict[str, Any] = {
        "torch_compile": True,
        "torch_compile_backend": "noting",
        "torch_compile_mode": "thorough",
        "max_steps": 1,
    }
    torch.compiler.reset()
    quiet_trainer(tmp_path, Interrupted(), token_samples(1), **settings).train()
    assert set(noted_modes) == {"thorough"}
    torch.compiler.reset()
    whole = quiet_trainer(tmp_path, Interrupted(), token_samples(1), torch_compile_full_graph=True, **settings)
    with pytest.raises(Unsupported):
        whole.train()


class Replaying(TokenModel):
    """Model that returns its loss in the same memory each time, as CUDA graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(()), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())
        if torch.is_grad_enabled():
            return {"loss": loss}
        self.memory.copy_(loss)
        return {"loss": self.memory}


def test_losses_survive_the_next_replay_of_a_graph(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB_SIZE, (6, 8), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = quiet_trainer(tmp_path, Replaying(), None, trainer_options={"eval_dataset": samples})
    found = trainer.evaluate()["eval_loss"]
    one_by_one = [quiet_trainer(tmp_path, Replaying(), None).evaluate([sample])["eval_loss"] for sample in samples]
    assert len(set(one_by_one)) > 1
    assert found == pytest.approx(sum(one_by_one) / len(one_by_one), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"torch_compile_mode": "reduce-overhead", "gradient_accumulation_steps": 2},
            r"'reduce-overhead' replays CUDA graphs, which cannot be used here: gradient_accumulation_steps=2 .*'default'",
        ),
        ({"torch_compile_mode": "fast"}, r"torch_compile_mode='fast' cannot be used: choose one of None, 'default'"),
    ],
)
def test_invalid_modes_are_rejected(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    on_gpu = {"use_cpu": False, "device": "cuda", "torch_compile": True}
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), **on_gpu, **settings)
    if "gradient_accumulation_steps" in settings:
        quiet_trainer(tmp_path, TokenModel(), token_samples(2), torch_compile=True, **settings)


def test_modes_with_cuda_graphs_are_rejected_in_pipelines_and_layers() -> None:
    assert "one graph for several layers of a pass" in str(
        cuda_graphs_problem("max-autotune", "cuda", 1, False, by_layer=True)
    )
    assert "a pipeline holds the activations of several micro-batches at once" in str(
        cuda_graphs_problem("max-autotune", "cuda", 1, is_pipeline=True)
    )
    assert cuda_graphs_problem("max-autotune", "cuda", 1, is_pipeline=False) is None
    assert cuda_graphs_problem("max-autotune-no-cudagraphs", "cuda", 2, is_pipeline=True) is None


class Kept:
    """Callback that measures the memory a step keeps for its backward pass."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._sizes[storage._cdata] = storage.nbytes()
        return tensor

    def on_forward_backward_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hooks.__enter__()

    def on_forward_backward_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hooks.__exit__()


@long_search
def test_activation_memory_budget_recomputes_activations(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB_SIZE, (4, 256), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    kept, losses = [], []
    # All runs share a process: a graph compiled for one budget must not be reused for the next.
    for number, budget in enumerate((None, 0.1, None)):
        torch.manual_seed(0)
        callback = Kept()
        trainer = quiet_trainer(
            tmp_path / str(number),
            Decoder(3, 32),
            samples,
            callback,
            activation_memory_budget=budget,
            max_steps=1,
            per_device_train_batch_size=4,
            logging_strategy="steps",
            torch_compile=True,
            torch_compile_backend="aot_eager",
            torch_compile_dynamic=False,
        )
        losses.append(run(trainer).losses)
        kept.append(callback.num_bytes)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert kept[1] < 0.4 * kept[0]
    assert kept[2] == kept[0]


def test_dynamic_shapes_may_be_left_to_torch(tmp_path: Path) -> None:
    num_graphs = []
    for number, dynamic in enumerate((True, None)):
        # The last batch of the epoch is smaller: a second graph is compiled unless the first one is dynamic.
        trainer = quiet_trainer(
            tmp_path / str(number),
            TokenModel(),
            token_samples(6),
            num_train_epochs=1,
            per_device_train_batch_size=4,
            torch_compile=True,
            torch_compile_backend="eager",
            torch_compile_dynamic=dynamic,
        )
        num_graphs.append(losses_of(trainer).num_graphs)
    assert num_graphs == [1, 2]


def test_watch_over_ranks_tells_the_compiler_from_compiled_code() -> None:
    """The limit of a step must not end a model that compiles again, also if the user has compiled it."""
    seen: dict[str, int] = {}
    this_thread = threading.get_ident()

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen["compiler"] = watcher.submit(activity_of, this_thread).result()

        def compiled(*given: object) -> object:
            seen["compiled code"] = watcher.submit(activity_of, this_thread).result()
            return graph(*given)

        return compiled

    with ThreadPoolExecutor(1) as watcher:
        assert torch.compile(lambda number: number * 2, backend=compiler)(torch.ones(2)).sum() == 4
    assert seen == {"compiler": IN_COMPILER, "compiled code": RUNNING}
