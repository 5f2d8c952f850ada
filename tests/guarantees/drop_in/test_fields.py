"""Field map: every field of transformers' arguments has a row, and the page shows the same table."""

import dataclasses
from pathlib import Path
from typing import Any

import field_table
import pytest
import transformers

from forgather.hf import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from forgather.hf.fields.engine_arguments import strategy_of, to_engine_arguments
from forgather.hf.fields.field_map import SEQ2SEQ, TRAINING
from forgather.hf.fields.kinds import NoEffect, Refused
from forgather.ml.trainer.ddp import DDPTrainingArguments
from forgather.ml.trainer.fsdp2 import FSDP2TrainingArguments
from forgather.ml.trainer.trainer import TrainingArguments as EngineArguments
from tests.guarantees.drop_in.programs import made
from tests.support.tiny_parallel import captured_logs


def fields_of(cls: type[Any]) -> set[str]:
    return {one.name for one in dataclasses.fields(cls)}


def test_the_field_map_has_exactly_the_fields_of_transformers() -> None:
    of_training = fields_of(transformers.TrainingArguments)
    assert of_training - TRAINING.keys() == set(), "new fields of transformers need rows in the field map"
    assert TRAINING.keys() - of_training == set(), "rows of fields that transformers does not have"
    assert fields_of(transformers.Seq2SeqTrainingArguments) - of_training == SEQ2SEQ.keys()


def test_the_page_contains_the_generated_table() -> None:
    assert field_table.page().read_text(encoding="utf-8") == field_table.generated_page()


def test_defaults_are_equal_to_transformers(tmp_path: Path) -> None:
    engine = to_engine_arguments(TrainingArguments(str(tmp_path)), EngineArguments)
    assert engine.max_grad_norm == 1.0 and engine.logging_steps == engine.save_steps == 500
    assert engine.seed == 42 and engine.learning_rate == 5e-5 and engine.num_train_epochs == 3
    assert engine.save_total_limit is None and engine.resume_from_checkpoint is False
    assert engine.per_device_train_batch_size == 8


OTHER_VALUES: dict[str, Any] = {
    "optim_target_modules": "all",
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "eval_do_concat_batches": False,
    "restore_callback_states_from_checkpoint": True,
    "data_seed": 7,
    "dataloader_multiprocessing_context": "spawn",
}


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_a_refused_field_is_an_error_with_a_remedy(tmp_path: Path, name: str) -> None:
    row = TRAINING[name]
    assert isinstance(row, Refused)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    setattr(args, name, OTHER_VALUES[name])
    with pytest.raises(ValueError, match=name) as caught:
        to_engine_arguments(args, EngineArguments)
    assert row.remedy in str(caught.value)


def test_a_field_without_effect_is_logged_only_if_it_was_set(tmp_path: Path) -> None:
    assert isinstance(TRAINING["logging_nan_inf_filter"], NoEffect)
    with captured_logs() as records:
        to_engine_arguments(TrainingArguments(str(tmp_path)), EngineArguments)
    assert records == []
    with captured_logs() as records:
        to_engine_arguments(TrainingArguments(str(tmp_path), logging_nan_inf_filter=False), EngineArguments)
    assert [record.split(":")[0] for record in records] == ["logging_nan_inf_filter=False has no effect"]


def test_fields_of_the_strategies_are_mapped(tmp_path: Path) -> None:
    ddp = TrainingArguments(str(tmp_path), ddp_find_unused_parameters=True, fg_shard_optimizer=True)
    engine = to_engine_arguments(ddp, DDPTrainingArguments)
    assert isinstance(engine, DDPTrainingArguments)
    assert engine.ddp.find_unused_parameters and engine.ddp.shard_optimizer and engine.ddp.broadcast_buffers
    sharded = TrainingArguments(str(tmp_path), fsdp="shard_grad_op offload", bf16=True, use_cpu=True)
    assert strategy_of(sharded) == "fsdp2"
    engine = to_engine_arguments(sharded, FSDP2TrainingArguments)
    assert isinstance(engine, FSDP2TrainingArguments)
    assert engine.fsdp2.reshard_after_forward is False and engine.fsdp2.cpu_offload
    assert engine.mixed_precision == "bf16"


def test_the_argument_parser_reads_all_fields(tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    words = f"--output_dir {tmp_path} --logging_steps 0.5 --fg_async_save --fg_strategy single --do_train".split()
    (args,) = parser.parse_args_into_dataclasses([*words, "--fg_options", '{"shuffle": false}'])
    assert args.fg_async_save and args.do_train and args.fg_options == {"shuffle": False} and args.logging_steps == 0.5
    file = tmp_path / "arguments.json"
    file.write_text('{"output_dir": "out", "fg_ema_decay": 0.9, "lr_scheduler_type": "cosine"}')
    (args,) = parser.parse_json_file(str(file))
    engine = to_engine_arguments(args, EngineArguments)
    assert engine.ema_decay == 0.9 and engine.lr_scheduler_type == "cosine" and engine.output_dir == "out"


def test_the_arguments_answer_about_ranks_and_devices(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index, args.n_gpu) == (1, 0, 0, 0)
    assert str(args.device) == "cpu" and args.parallel_mode.value == "not_parallel"
    with args.main_process_first():
        assert args.get_process_log_level() > 0


@pytest.mark.parametrize(("name", "value"), [("fg_strategy", "magic"), ("fg_options", "[1]"), ("fg_watch", "{")])
def test_wrong_values_of_own_fields_are_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        TrainingArguments(str(tmp_path), **{name: value})


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="shufle"):
        to_engine_arguments(TrainingArguments(str(tmp_path), fg_options={"shufle": False}), EngineArguments)


@pytest.mark.parametrize("norm", [None, 0.0, -1.0])
def test_gradients_are_not_clipped_without_a_positive_limit(tmp_path: Path, norm: float | None) -> None:
    assert made(Trainer, tmp_path, max_grad_norm=norm).engine.args.max_grad_norm is None
