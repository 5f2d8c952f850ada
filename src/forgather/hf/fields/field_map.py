"""Field map: one row for every field of `transformers.TrainingArguments`, with its effect in Forgather.

A test compares the map with transformers, so a field that transformers adds is noticed. `engine_arguments` applies the
rows, and tools/field_table.py writes the table of docs/moving-from-transformers.md from them.
"""

from collections.abc import Mapping
from typing import Any

from forgather.hf.fields import conversions as to
from forgather.hf.fields.kinds import Mapped, NoEffect, Refused, Row, Same

_SCRIPT = "Read by scripts."
_BY_CALLBACK = "Read by the logger that `report_to` names."
_BY_GROUP = "Passed on when the process group is created."

TRAINING: Mapping[str, Row] = {
    "output_dir": Same(),
    "per_device_train_batch_size": Same(),
    "num_train_epochs": Same(),
    "max_steps": Mapped("max_steps", to.max_steps, "0 means no limit, as in transformers."),
    "learning_rate": Same(),
    "lr_scheduler_type": Mapped("lr_scheduler_type", to.schedule, "reduce_lr_on_plateau and greedy are refused."),
    "lr_scheduler_kwargs": Same(),
    "warmup_steps": Mapped(
        "warmup_steps", to.steps("warmup_steps"), "A fraction below 1 counts steps of the run, as in transformers."
    ),
    "optim": Mapped("optim", to.optim),
    "optim_args": Same(),
    "weight_decay": Same("Not applied to biases and norms, as in transformers."),
    "adam_beta1": Same(),
    "adam_beta2": Same(),
    "adam_epsilon": Same(),
    "optim_target_modules": Refused("GaLore and APOLLO are not built by name.", "Pass optimizers=(optimizer, None)."),
    "gradient_accumulation_steps": Same(),
    "average_tokens_across_devices": NoEffect("The loss is always the mean over all targets of a step, on all ranks."),
    "max_grad_norm": Same(),
    "label_smoothing_factor": Same(),
    "bf16": Mapped("mixed_precision", to.precision),
    "fp16": Mapped("mixed_precision", to.nothing, "See bf16."),
    "bf16_full_eval": Refused("Evaluations use the weights of training.", "Set bf16=True, or convert the model."),
    "fp16_full_eval": Refused("Evaluations use the weights of training.", "Set fp16=True, or convert the model."),
    "tf32": Mapped("float32_matmul_precision", to.tf32),
    "gradient_checkpointing": Same(),
    "gradient_checkpointing_kwargs": Same("Passed to `gradient_checkpointing_enable` of the model.", engine=False),
    "torch_compile": Same(),
    "torch_compile_backend": Same(),
    "torch_compile_mode": Mapped("torch_compile_mode", to.compile_mode),
    "use_liger_kernel": Refused("The kernels replace parts of the model.", "Apply them before the model is passed."),
    "liger_kernel_config": NoEffect("It belongs to use_liger_kernel, which is refused."),
    "use_cache": Same("Set in the configuration of the model.", engine=False),
    "neftune_noise_alpha": Refused("The trainer adds no noise to embeddings.", "Add a forward hook to the embeddings."),
    "torch_empty_cache_steps": NoEffect("The cache is emptied by need, see gc_threshold in fg_options."),
    "auto_find_batch_size": Same("Keeps the global batch size by accumulation."),
    "logging_strategy": Mapped("logging_strategy", to.strategy("logging_strategy")),
    "logging_steps": Mapped("logging_steps", to.steps("logging_steps"), "A fraction below 1 counts steps of the run."),
    "logging_first_step": Same(),
    "log_on_each_node": Same("Read by `should_log` of the arguments.", engine=False),
    "logging_nan_inf_filter": NoEffect("NaN and infinity stop the run, see fg_nonfinite_grad."),
    "include_num_input_tokens_seen": Same(
        "Written to log records. `state.num_input_tokens_seen` always counts.", engine=False
    ),
    "log_level": Same("Log level of transformers and of Forgather on the main process.", engine=False),
    "log_level_replica": Same("The same on the other processes.", engine=False),
    "disable_tqdm": Same(),
    "report_to": Same(),
    "run_name": Same(),
    "project": Same(_BY_CALLBACK, engine=False),
    "trackio_space_id": Same(_BY_CALLBACK, engine=False),
    "trackio_bucket_id": Same(_BY_CALLBACK, engine=False),
    "trackio_static_space_id": Same(_BY_CALLBACK, engine=False),
    "eval_strategy": Mapped("eval_strategy", to.strategy("eval_strategy")),
    "eval_steps": Mapped("eval_steps", to.steps("eval_steps"), "A fraction below 1 counts steps of the run."),
    "eval_delay": Mapped("eval_delay", to.eval_delay, "Epochs with eval_strategy='epoch', as in transformers."),
    "per_device_eval_batch_size": Same(),
    "prediction_loss_only": Same(),
    "eval_on_start": Same(),
    "eval_do_concat_batches": Refused("Predictions are one array.", "Leave it True, and divide that array."),
    "eval_use_gather_object": NoEffect("Predictions of any structure are gathered."),
    "eval_accumulation_steps": Same(),
    "include_for_metrics": Same(),
    "batch_eval_metrics": Same(),
    "save_only_model": Same(
        "Omits the optimizer state only, so a resume continues with a new optimizer.", engine=False
    ),
    "save_strategy": Mapped(
        "save_strategy", to.save_strategy, "'best' saves each new best step, and the last step of the run."
    ),
    "save_steps": Mapped("save_steps", to.steps("save_steps"), "A fraction below 1 counts steps of the run."),
    "save_on_each_node": Same(),
    "save_total_limit": Mapped(
        "save_total_limit", to.save_total_limit, "0 and negative numbers keep all, as in transformers."
    ),
    "enable_jit_checkpoint": NoEffect("SIGTERM always saves a checkpoint at the end of the current step."),
    "push_to_hub": Same("Checked at construction: without network access it is an error there.", engine=False),
    "hub_token": Same("Used by push_to_hub.", engine=False),
    "hub_private_repo": Same("Used by push_to_hub.", engine=False),
    "hub_model_id": Same("Used by push_to_hub.", engine=False),
    "hub_strategy": Same(
        "'end' uploads after training, all others after each save.",
        engine=False,
    ),
    "hub_always_push": NoEffect("Uploads run one after another."),
    "hub_revision": Same("Used by push_to_hub.", engine=False),
    "load_best_model_at_end": Same(),
    "metric_for_best_model": Mapped("metric_for_best_model", to.best_metric),
    "greater_is_better": Same(),
    "ignore_data_skip": Mapped("skip_checkpoint_components", to.data_skip, "The data start at their beginning."),
    "restore_callback_states_from_checkpoint": Refused("Checkpoints lack that state.", "Restore it in on_train_begin."),
    "full_determinism": Same("Applied at construction.", engine=False),
    "seed": Same(),
    "data_seed": Refused(
        "The seed also sets the data order.", "Leave it None, or set it to the value of seed.", to.is_same_seed
    ),
    "use_cpu": Same(),
    "accelerator_config": Mapped(
        "dispatch_batches", to.accelerator, "split_batches=True is refused. Others are logged."
    ),
    "parallelism_config": Refused("Forgather has other strategies.", "Set fg_strategy instead."),
    "dataloader_drop_last": Same(),
    "dataloader_num_workers": Same(),
    "dataloader_pin_memory": Same(),
    "dataloader_persistent_workers": Same(),
    "dataloader_prefetch_factor": Same(),
    "dataloader_multiprocessing_context": Refused(
        "Workers use torch's start method.",
        "Leave it None.",
        to.is_default_start_method,
    ),
    "dataloader_in_order": NoEffect("Batches are always in order, because an exact resume needs it."),
    "remove_unused_columns": Same(),
    "label_names": Same(),
    "train_sampling_strategy": Mapped("train_sampling_strategy", to.sampling, "'batch_rebalance' is refused."),
    "length_column_name": Same(),
    "ddp_find_unused_parameters": Mapped("ddp.find_unused_parameters", to.ddp),
    "ddp_bucket_cap_mb": Mapped("ddp.bucket_cap_mb", to.nothing),
    "ddp_broadcast_buffers": Mapped("ddp.broadcast_buffers", to.nothing),
    "ddp_static_graph": Mapped("ddp.static_graph", to.nothing),
    "ddp_backend": Same(_BY_GROUP, engine=False),
    "ddp_timeout": Same(_BY_GROUP, engine=False),
    "fsdp": Mapped("fg_strategy='fsdp2'", to.fsdp),
    "fsdp_config": Mapped(
        "fsdp2",
        to.nothing,
        "Only reshard_after_forward, cpu_offload, activation_checkpointing. Logs others.",
    ),
    "deepspeed": Refused("DeepSpeed has its own engine.", "Use fsdp=True, or fg_shard_optimizer=True for ZeRO-1."),
    "debug": Refused("underflow_overflow is not available.", "Set fg_options={'detect_anomaly': True} instead."),
    "skip_memory_metrics": NoEffect("Memory is in the log records of accelerators, as peak_mem_allocated."),
    "do_train": Same(_SCRIPT, engine=False),
    "do_eval": Same(_SCRIPT, engine=False),
    "do_predict": Same(_SCRIPT, engine=False),
    "resume_from_checkpoint": Same(
        f"{_SCRIPT} A run resumes only if train(resume_from_checkpoint=...) says so.", engine=False
    ),
    "local_rank": NoEffect("The rank comes from the launcher."),
}
"""Fields of `transformers.TrainingArguments`."""

SEQ2SEQ: Mapping[str, Row] = {
    "sortish_sampler": NoEffect("transformers does not read it either. Set train_sampling_strategy='group_by_length'."),
    "predict_with_generate": Same(engine=False),
    "generation_max_length": Same(engine=False),
    "generation_num_beams": Same(engine=False),
    "generation_config": Same(engine=False),
}
"""Fields that `transformers.Seq2SeqTrainingArguments` adds."""

FIELDS: Mapping[str, Row] = {**TRAINING, **SEQ2SEQ}


def table(rows: Mapping[str, Row]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| field | here | notes |", "|---|---|---|"]
    lines += [f"| `{name}` | {_KINDS[type(row)]} | {row.description} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


_KINDS: dict[type[Any], str] = {Same: "same", Mapped: "mapped", NoEffect: "no effect", Refused: "refused"}
