"""Pipeline misuse: every rank raises an error that names the mistake, the reason and the remedy, and no rank hangs."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer, PipelineTrainingArguments
from forgather.ml.trainer.pipeline.model_splitter import Split
from forgather.ml.trainer.pipeline.splitters.causal_lm import create_causal_lm_splitter
from tests.support.pipelines import llama, pipeline_trainer, trainer_of
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import VOCAB_SIZE, Stream, TokenModel, quiet_trainer, token_samples

BATCH: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2}

# --- rejected at construction, before any rank waits for another


def construct(output_dir: Path, trainer_options: dict[str, Any] | None = None, **settings: Any) -> PipelineTrainer:
    options = {"distributed_env": StaticDistributedEnvironment(world_size=2, local_world_size=2)}
    return pipeline_trainer(
        output_dir,
        llama,
        token_samples(8),
        trainer_options={**options, **(trainer_options or {})},
        **{**BATCH, **settings},
    )


ZERO_BUBBLE = ["interleavedzerobubble", "zbv", "dualpipev"]

BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"per_device_train_batch_size": 6, "n_microbatches": 4},
        r"per_device_train_batch_size=6 is not divisible by n_microbatches=4.*Make the batch size a multiple",
    ),
    ({"n_microbatches": 0}, r"n_microbatches=0 cannot be used: it must be 1 or more"),
    ({"stages_per_rank": 0}, r"stages_per_rank=0 cannot be used: it must be 1 or more"),
    ({"mixed_precision": "fp16"}, r"mixed_precision='fp16' cannot be combined with a pipeline.*Use 'bf16'"),
    (
        {"fuse_optim_with_backward": True},
        r"fuse_optim_with_backward=True cannot be combined with n_microbatches=4.*or turn it off",
    ),
    ({"pp_stage_type": "ring"}, r"pp_stage_type='ring' is not one of 'loop', 'v'"),
    (
        {"schedule": "zerobubble"},
        r"schedule='zerobubble' is not a known pipeline schedule. Did you mean .*The names are",
    ),
    ({"schedule": ""}, r"schedule='' is not a known pipeline schedule.*The names are"),
    *(
        (
            {"schedule": name, "torch_compile": True},
            rf"torch_compile=True cannot be combined with schedule='{name}'.*Turn torch_compile off, or use 1f1b",
        )
        for name in ZERO_BUBBLE
    ),
    *(
        (
            {"schedule": name, "stages_per_rank": 2},
            rf"schedule='{name}' cannot run with .*stages_per_rank=2.*Set stages_per_rank=1, or choose a schedule for",
        )
        for name in ("gpipe", "1f1b")
    ),
    *(
        (
            {"schedule": name, "is_multistage": True},
            rf"is_multistage=True cannot be used with schedule='{name}'.*Remove is_multistage, or choose another",
        )
        for name in ("gpipe", "1f1b")
    ),
    *(
        (
            {"schedule": name, "pp_stage_type": "v"},
            rf"pp_stage_type='v' cannot be used with schedule='{name}'.*Remove pp_stage_type, or choose zbv or dualpipev",
        )
        for name in ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble")
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=lambda value: str(value)[:60])
def test_invalid_settings_are_rejected_at_construction(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        construct(tmp_path, **settings)


@pytest.mark.parametrize("name", [*ZERO_BUBBLE, "interleaved1f1b", "loopedbfs"])
def test_multi_stage_schedules_accept_the_default_settings(name: str, tmp_path: Path) -> None:
    """Only the name of the schedule is required."""
    construct(tmp_path, schedule=name, n_microbatches=4)


def test_batch_size_must_be_divisible_by_default_n_microbatches() -> None:
    with pytest.raises(ValueError, match="not divisible by n_microbatches=4"):
        PipelineTrainingArguments(output_dir="unused", per_device_train_batch_size=2)


def test_partial_schedule_is_checked_by_its_class(tmp_path: Path) -> None:
    factory = functools.partial(Schedule1F1B, backward_requires_autograd=True)
    construct(tmp_path, schedule=factory)
    with pytest.raises(ValueError, match=r"schedule='1f1b' cannot run with .*stages_per_rank=2"):
        construct(tmp_path, schedule=factory, stages_per_rank=2)


def test_object_that_is_no_schedule_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a pipeline schedule. Pass a subclass .*'gpipe'"):
        construct(tmp_path, schedule=nn.Linear)


def test_built_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not take a ready model.*only its own stages. Pass model_init"):
        quiet_trainer(tmp_path, llama(), token_samples(8), trainer_class=PipelineTrainer, **BATCH)


def test_built_optimizer_or_scheduler_is_rejected(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for name, ready in {"optimizer": optimizer, "lr_scheduler": scheduler}.items():
        word = name.removeprefix("lr_")
        with pytest.raises(
            ValueError, match=rf"does not take a ready {word}.*do not exist yet. Pass optimizer_factory"
        ):
            construct(tmp_path, {name: ready})


def test_single_rank_is_rejected(tmp_path: Path) -> None:
    message = r"PipelineTrainer needs at least two ranks, but this job has one.*--nproc 2.*or use Trainer"
    for env in (None, StaticDistributedEnvironment()):
        with pytest.raises(ValueError, match=message):
            construct(tmp_path, {"distributed_env": env})


# --- rejected in preparation, on every rank


def mixtral_with_router_loss() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
            output_router_logits=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, d_model=8, d_ff=8, num_layers=2, num_heads=2, d_kv=4)
    )


def smoothed_llama() -> nn.Module:
    model = llama()
    model.loss_function = _smoothed
    return model


def _smoothed(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, label_smoothing=0.1)


def llama_that_encodes() -> nn.Module:
    return llama(is_encoder_decoder=True)


def one_layer() -> nn.Module:
    return llama(1)


def two_layers() -> nn.Module:
    return llama(2)


READY = TokenModel()


def ready_model() -> nn.Module:
    return READY


class Uninitialised(TokenModel):
    """Model with a parameter that is always on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(1, device="cpu"))


def another_model_with_memory() -> nn.Module:
    """Return a model that is wider on a real device than on the meta device."""
    return llama(hidden_size=16 if torch.empty(()).is_meta else 32)


def other_layers_with_memory() -> nn.Module:
    return llama(8 if torch.empty(()).is_meta else 7)


def fails_on_one_rank() -> nn.Module:
    if dist.get_rank() == 1:
        raise OSError("the disk of this rank is gone")
    return llama()


PREPARED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "more ranks than layers": (one_layer, {}, r"1 layers, which cannot be divided into 2 stages.*Use fewer ranks"),
    "more stages than layers": (
        two_layers,
        {"schedule": "interleaved1f1b"},
        r"2 layers, which cannot be divided into 4 stages.*every stage needs a layer. Use fewer ranks or stages_per_rank",
    ),
    "a model without a splitter": (
        TokenModel,
        {},
        r"TokenModel is not a model of transformers.*input_encoder, layer_stack, output_decoder.*create_automatic_splitter",
    ),
    "a router with a loss": (
        mixtral_with_router_loss,
        {},
        r"MixtralForCausalLM needs its own loss.*output_router_logits=True.*Pass compute_loss_func",
    ),
    "an encoder and a decoder": (
        t5,
        {},
        r"T5ForConditionalGeneration needs its own loss.*'ForConditionalGeneration'.*or train on one device",
    ),
    "a different loss": (
        smoothed_llama,
        {},
        r"LlamaForCausalLM needs its own loss.*differs from shifted causal.*Pass compute_loss_func",
    ),
    "a config of an encoder": (llama_that_encodes, {}, r"LlamaForCausalLM needs .*is_encoder_decoder=True"),
    "a ready model": (
        ready_model,
        {},
        r"model_init must build a new model.*'embedding\.weight' is on cpu.*Build the model inside model_init",
    ),
    "a parameter on a device": (
        Uninitialised,
        {},
        r"model_init must build .*'extra' is on cpu.*leave devices to the trainer",
    ),
    "two models of different shapes": (
        another_model_with_memory,
        {},
        r"model_init built two different models: 'model\.embed_tokens\.weight' is .*must build the same model",
    ),
    "two models of different depths": (
        other_layers_with_memory,
        {},
        r"model_init built two different models: 'model\.layers\.7\..*' is None.*must build the same model",
    ),
    "an error of one rank": (fails_on_one_rank, {}, r"the disk of this rank is gone"),
    "too few micro-batches": (
        llama,
        {"schedule": "dualpipev", "n_microbatches": 2},
        r"schedule='dualpipev' cannot run with n_microbatches=2 .*Set n_microbatches=4 or more",
    ),
    "more than two stages in a V schedule": (
        llama,
        {"schedule": "zbv", "stages_per_rank": 3},
        r"schedule='zbv' cannot run with .*stages_per_rank=3 .*Set stages_per_rank=2, or choose another",
    ),
}


def _prepare(output_dir: Path, name: str, action: str) -> None:
    model_init, settings, _ = PREPARED[name]
    samples = token_samples(8)
    trainer = pipeline_trainer(output_dir, model_init, samples, **{**BATCH, **settings})
    trainer.train() if action == "train" else trainer.evaluate(samples)


def assert_all_refuse(message: str, function: Callable[..., Any], *args: Any) -> None:
    """Assert that every rank raises this message; a hanging rank would end with a connection error instead."""
    for rank, outcome in enumerate(outcomes_on_ranks(function, 2, *args)):
        assert outcome.failed, f"rank {rank} did not raise"
        assert re.search(message, str(outcome.error_message), re.DOTALL), f"rank {rank}: {outcome.traceback}"


@pytest.mark.parametrize("action", ["train", "evaluate"])
@pytest.mark.parametrize("name", PREPARED)
def test_invalid_models_and_layouts_are_rejected_on_every_rank(name: str, action: str, tmp_path: Path) -> None:
    assert_all_refuse(PREPARED[name][2], _prepare, tmp_path, name, action)
    assert not list(tmp_path.glob("checkpoints/*")), "nothing was written"


# --- models that differ between the ranks


def wider() -> nn.Module:
    return llama(hidden_size=32)


def shorter() -> nn.Module:
    return llama(7)


def other_dtype() -> nn.Module:
    model = llama()
    model.model.norm.to(torch.bfloat16)  # type: ignore[operator, union-attr]
    return model


def other_buffers() -> nn.Module:
    model = llama()
    model.model.layers[3].register_buffer("seen", torch.zeros(3))  # type: ignore[index, operator, union-attr]
    return model


def other_name() -> nn.Module:
    model = llama()
    layer = model.model.layers[0]  # type: ignore[index, union-attr]
    layer.after_attention = layer._modules.pop("post_attention_layernorm")
    return model


def other_order() -> nn.Module:
    """Build a model whose projections of equal shape change places when they are sent without names."""
    model = llama()
    projections = model.model.layers[0].self_attn._modules  # type: ignore[index, union-attr]
    projections["q_proj"] = projections.pop("q_proj")
    return model


def unequal_split(model: Any, *args: Any, **options: Any) -> Split:
    weight = 6.0 if dist.get_rank() == dist.get_world_size() - 1 else 0.0
    return create_causal_lm_splitter(input_weight=weight)(model, *args, **options)


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shapes": (wider, r"'model\.embed_tokens\.weight': shape \[\d+, 16\], .* on rank 0[ 12]*, shape \[\d+, 32\]"),
    "layers": (shorter, r"'model\.layers\.7\..*': shape .* on rank 0[ 12]*, missing on rank \d"),
    "dtypes": (other_dtype, r"'model\.norm\.weight': .*torch\.float32 on rank 0.*torch\.bfloat16 on rank \d"),
    "buffers": (other_buffers, r"'model\.layers\.3\.seen': missing on rank 0.*buffer of shape \[3\]"),
    "names": (other_name, r"'model\.layers\.0\.post_attention_layernorm\.weight': .* missing on rank \d"),
    "order": (other_order, r"order, tensor 1: '.*q_proj\.weight' on rank 0.*'.*k_proj\.weight' on rank \d"),
    "stages": (
        llama,
        r"divided the model into different stages: '.*': stage \d, .* on rank 0.*stage \d, .* on rank \d",
    ),
}


def _train_other_model(output_dir: Path, name: str) -> None:
    is_other = dist.get_rank() == dist.get_world_size() - 1
    other, _ = OTHERS[name]
    options = {"model_splitter": unequal_split} if name == "stages" else {}
    is_hybrid = dist.get_world_size() > 2
    trainer_of(
        HybridTrainer if is_hybrid else PipelineTrainer,
        output_dir,
        other if is_other else llama,
        token_samples(8),
        trainer_options=options,
        **({"dp_size": 2} if is_hybrid else {}),
        **BATCH,
    ).train()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_different_models_of_the_ranks_are_named_on_every_rank(name: str, num_ranks: int, tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(_train_other_model, num_ranks, tmp_path, name)
    messages = {outcome.error_message for outcome in outcomes}
    assert len(messages) == 1 and outcomes[0].error_type == "ValueError", messages
    assert re.search(OTHERS[name][1], str(*messages)), messages


def _train_with_loss(output_dir: Path) -> int:
    options = {"compute_loss_func": _cross_entropy}
    trainer = pipeline_trainer(output_dir, mixtral_with_router_loss, token_samples(8), trainer_options=options, **BATCH)
    return trainer.train().global_step


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_compute_loss_func_allows_models_with_their_own_loss(tmp_path: Path) -> None:
    assert run_on_ranks(_train_with_loss, 2, tmp_path) == [2, 2]


# --- batches


def _without(samples: list[dict[str, Tensor]], name: str) -> list[dict[str, Tensor]]:
    return [{key: value for key, value in sample.items() if key != name} for sample in samples]


def _renamed(samples: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"tokens": sample["input_ids"], "labels": sample["labels"]} for sample in samples]


def _with_float_labels(samples: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**sample, "labels": sample["input_ids"].float()} for sample in samples]


BATCHES: dict[str, tuple[Callable[[list[dict[str, Tensor]]], Any], str]] = {
    "no labels": (
        functools.partial(_without, name="labels"),
        r"no loss to train on or to evaluate: the batch has no 'labels'",
    ),
    "no labels in a stream": (
        lambda samples: Stream(_without(samples, "labels")),
        r"no loss to train on or to evaluate: the batch has no 'labels'",
    ),
    "no labels for a custom loss": (
        functools.partial(_without, name="labels"),
        r"no loss to train on or to evaluate: the batch has no 'labels'",
    ),
    "no main input": (
        _renamed,
        r"The batch has no tensor 'input_ids', the main input of the model.*It has: tokens, labels",
    ),
    "no main input in a stream": (
        lambda samples: Stream(_renamed(samples)),
        r"The batch has no tensor 'input_ids', the main input of the model.*It has: tokens, labels",
    ),
    "no mapping": (lambda samples: [sample["input_ids"] for sample in samples], r"(?i)mapping|dict"),
    "float labels": (
        _with_float_labels,
        r"last batch is not full, and labels of type torch.float32 have no value .*dataloader_drop_last=True",
    ),
}


OWN_LOSS = ("float labels", "no labels for a custom loss")


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.mean(-1) - labels.float()).square().mean()


def _run_batches(output_dir: Path, name: str, action: str) -> None:
    samples = BATCHES[name][0](token_samples(7))
    options = {"compute_loss_func": _squared_error} if name in OWN_LOSS else {}
    settings = {**BATCH, "max_steps": 4, "n_microbatches": 2}
    trainer = pipeline_trainer(output_dir, llama, samples, trainer_options=options, **settings)
    trainer.train() if action == "train" else trainer.evaluate(samples)


@pytest.mark.parametrize("action", ["train", "evaluate"])
@pytest.mark.parametrize("name", BATCHES)
def test_unusable_batches_end_every_rank_with_the_reason_on_one(name: str, action: str, tmp_path: Path) -> None:
    """A rank that already waits for the next batch loses contact, and its error refers to the other rank."""
    outcomes = outcomes_on_ranks(_run_batches, 2, tmp_path, name, action)
    reasons = [re.search(BATCHES[name][1], str(outcome.error_message), re.DOTALL) for outcome in outcomes]
    assert any(reasons), outcomes[0].traceback
    for outcome, reason in zip(outcomes, reasons, strict=True):
        assert outcome.failed
        assert reason or "contact with the other ranks was lost" in str(outcome.error_message), outcome.traceback


def _run_full_batches(output_dir: Path) -> int:
    samples = _with_float_labels(token_samples(8))
    options = {"compute_loss_func": _squared_error}
    trainer = pipeline_trainer(output_dir, llama, samples, trainer_options=options, **BATCH)
    assert trainer.evaluate(samples)["eval_loss"] > 0
    return trainer.train().global_step


def test_float_labels_of_full_batches_are_accepted(tmp_path: Path) -> None:
    assert run_on_ranks(_run_full_batches, 2, tmp_path) == [2, 2]


# --- custom splitters


class Losing:
    """Splitter that omits the final norm, or puts it into two stages."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Split:
        modules, own, stages, make_mask = create_causal_lm_splitter()(model, *args, **kwargs)
        first, last = modules[0].model, modules[-1].model
        if self._kind == "twice":
            first.norm = last.norm  # type: ignore[union-attr]
        else:
            last.norm = nn.Identity()  # type: ignore[union-attr]
        return modules, own, stages, make_mask


def renaming_splitter(
    model: Any, example_args: Any, example_kwargs: Mapping[str, Any], stage_indices: Any, train: bool, **options: Any
) -> Split:
    """Split a model into stages that add a prefix to the tensor names."""
    modules: list[nn.Module] = [nn.Sequential(model), nn.Sequential()]
    index = stage_indices[options["rank"]][0]
    stage = PipelineStage(modules[index], index, 2, options["device"], group=options["pp_group"])
    return modules, [modules[index]], [stage], None


SPLITTERS: dict[str, tuple[Any, str]] = {
    "losing": (
        Losing("lost"),
        r"stages of LlamaForCausalLM together lack 'model\.norm\.weight' \(1 names are missing.*Pass another model_splitter",
    ),
    "doubling": (
        Losing("twice"),
        r"The splitter gave 'model\.norm\.weight' to stages 0 and 1, but every name belongs to one stage",
    ),
    "renaming": (renaming_splitter, r"A splitter must keep all tensors, under the names of the full model"),
}


def _run_splitter(output_dir: Path, name: str) -> None:
    options = {"model_splitter": SPLITTERS[name][0]}
    pipeline_trainer(output_dir, llama, token_samples(8), trainer_options=options, **BATCH).train()


@pytest.mark.parametrize("name", SPLITTERS)
def test_splitter_must_assign_every_tensor_to_one_stage(name: str, tmp_path: Path) -> None:
    assert_all_refuse(SPLITTERS[name][1], _run_splitter, tmp_path, name)
