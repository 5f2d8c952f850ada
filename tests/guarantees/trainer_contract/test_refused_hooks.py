"""Rejected overrides: hooks that are never called, retired names, and incompatible signatures."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.guarantees.trainer_contract.small_trainer import SmallTrainer, small_trainer

RETIRED = {
    "_eval_loop_all_shards": "_eval_loop",
    "_check_eval_shards_nonempty": "_zero_eval_batches_message",
    "_initialize_params": "_prepare_model",
    "_eval_schedule_context": "_prediction_step",
    "_apply_fp8_training": "fp8_recipe",
    "_apply_qat_training": "qat_recipe",
    "_print_modules": "debug_",
    "_speed_metrics": "_end_train_loop",
    "_log_stop_condition": "_stop_requested_by",
    "_run_final_checkpoint_if_needed": "_finalize_training",
    "_pipeline_step_for_generation": "pipeline_generate",
}
OF_PIPELINES = ("_construct_model", "_get_example", "_split_model", "_all_reduce_norm")
OF_TRANSFORMERS = {
    "compute_loss": "_forward_backward_step",
    "training_step": "_forward_backward_step",
    "prediction_step": "_prediction_step",
    "evaluation_loop": "_eval_loop",
    "create_optimizer": "_init_optimizer",
    "get_train_dataloader": "_init_dataloaders",
}
WRONG_SIGNATURES: dict[str, Callable[..., Any]] = {
    "_forward_backward_step": lambda self, batch: None,
    "_train_step": lambda self, data_iterator, more: None,
    "_prepare_batch": lambda self: None,
    "_prediction_step": lambda self, model, input_dict, labels: None,
    "_wrap": lambda self, model: None,
    "_get_dataloader": lambda self, dataset: None,
    "_log_step": lambda self, loss_log: None,
    "_maybe_log_save_evaluate": lambda self, loss_log, total_norm_log, tokens_log: None,
    "_end_train_loop": lambda self: None,
    "_finalize_training": lambda self, output: None,
    "_distributed_loss": lambda self: None,
    "_clip_grad_norm": lambda self: None,
    "state_dict": lambda self, prefix: None,
    "_format_zero_eval_batches_diagnostic": lambda self, header: None,
    "_eval_loop": lambda self, dataset: None,
    "get_state_components": lambda self, purpose: None,
}


def build(base: Any, output_dir: Path, **methods: Any) -> Any:
    own = type("Own", (base,), methods)
    if issubclass(base, SmallTrainer):
        return small_trainer(output_dir, trainer_class=own)
    return own(args={"output_dir": str(output_dir), "use_cpu": True}, model=nn.Linear(1, 1), default_callbacks=False)


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


@pytest.mark.parametrize("base", [Trainer, DDPTrainer, SmallTrainer])
@pytest.mark.parametrize("name", RETIRED)
def test_retired_hook_name_is_rejected(base: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} .*{RETIRED[name]}"):
        build(base, tmp_path, **{name: nothing})


@pytest.mark.parametrize("base", [Trainer, DDPTrainer])
@pytest.mark.parametrize("name", OF_PIPELINES)
def test_pipeline_hook_is_rejected_on_other_trainers(base: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} would never be called: .*PipelineTrainer"):
        build(base, tmp_path, **{name: nothing})


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_hook_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} would never be called: .*{OF_TRANSFORMERS[name]}"):
        build(Trainer, tmp_path, **{name: nothing})


def test_method_that_the_subclass_calls_may_have_a_transformers_hook_name(tmp_path: Path) -> None:
    def forward_backward(self: Any, input_dict: Any, labels: Any) -> Any:
        return self.compute_loss(input_dict, labels)

    build(Trainer, tmp_path, compute_loss=nothing, _forward_backward_step=forward_backward)


@pytest.mark.parametrize("base", [Trainer, DDPTrainer])
@pytest.mark.parametrize("name", WRONG_SIGNATURES)
def test_incompatible_signature_is_rejected(base: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} does not accept the trainer's call .*def {name}\(self"):
        build(base, tmp_path, **{name: WRONG_SIGNATURES[name]})


@pytest.mark.parametrize("name", ["_prepare", "_train_loop", "_eval_loop", "state_dict", "load_state_dict"])
def test_signatures_of_base_class_hooks_are_checked(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} does not accept the trainer's call"):
        build(SmallTrainer, tmp_path, **{name: lambda self, one, two, three: None})


def test_parameters_may_have_other_names_and_defaults(tmp_path: Path) -> None:
    build(
        Trainer,
        tmp_path,
        _forward_backward_step=lambda self, inputs, targets, scale=1.0: None,
        _wrap=lambda self, **options: None,
        _prepare_batch=lambda self, *given: None,
        _clip_grad_norm=lambda self, limit, norm_type=2.0: None,
    )


def test_mixin_is_checked(tmp_path: Path) -> None:
    class Mixin:
        def _speed_metrics(self) -> None: ...

    own = type("Own", (Mixin, Trainer), {})
    with pytest.raises(TypeError, match=r"Mixin\._speed_metrics"):
        own(args={"output_dir": str(tmp_path), "use_cpu": True}, model=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("name", "meant"), [("_prepare_batchs", "_prepare_batch"), ("_forward_backward", "_forward_backward_step")]
)
def test_misspelt_hook_name_warns(name: str, meant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(Trainer, tmp_path, **{name: nothing})
    (message,) = (record.getMessage() for record in caplog.records if name in record.getMessage())
    assert f"Did you mean {meant}?" in message


def test_unrelated_methods_do_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(Trainer, tmp_path, _my_own_helper=nothing, update_average=nothing)
    assert not caplog.records


def test_trainer_hook_name_is_free_on_the_base_class(tmp_path: Path) -> None:
    """The base class calls three methods; a custom loop may use any other name."""
    build(SmallTrainer, tmp_path, _forward_backward_step=lambda self, batch: None, _wrap=lambda self, model: None)
