"""Page of all training arguments: in groups, with type, default, allowed values and effect, from the dataclasses."""

import re
from collections.abc import Sequence

from forgather.config.help import FieldHelp, arguments_of
from forgather.config.trainer_kinds import DEFAULT_KIND, TRAINERS

_INTRODUCTION = """\
# Training arguments

Generated from the argument classes. Every trainer has the arguments of the first sections. A configuration sets them in
its section `args` (`args.max_steps`), the command line as `--args.max_steps 500`, a program as
`TrainingArguments(max_steps=500)`. An argument with a dot is a field of a group: `ddp.bucket_cap_mb` is
`DDPTrainingArguments(ddp={"bucket_cap_mb": 50})`. A wrong value raises `ValueError` when the object is created.

"""
_OTHER = "Other arguments"
# An argument belongs to the first group whose pattern matches its full name.
_GROUPS = {
    "Watch over ranks": r"watch\..*",
    "Output and reports": r"output_dir|logging_.*|run_name|report_to|disable_tqdm|overwrite_output_dir|"
    r"speed_metrics_start_step",
    "Length of the run, device and seed": r"num_train_epochs|max_steps|device|seed|use_cpu|epoch_train_steps",
    "Batch size": r"per_device_.*|gradient_accumulation_steps|global_batch_size|auto_find_batch_size|elastic",
    "Data loading": r"dataloader_.*|remove_unused_columns|train_sampling_strategy|length_column_name|shuffle|"
    r"set_dataset_epoch|dispatch_.*",
    "Optimizer, schedule and loss": r"lr_scheduler_.*|warmup_.*|learning_rate|weight_decay.*|adam_.*|optim|optim_args|"
    r"max_grad_norm|label_smoothing_factor|token_weighted_loss|ema_decay|fuse_optim_with_backward|debug_optimizer_groups",
    "Evaluation and metrics": r"eval_.*|max_eval_steps|prediction_loss_only|label_names|include_for_metrics|"
    r"batch_eval_metrics",
    "Best checkpoint": r".*best.*|.*greater_is_better",
    "Checkpoints": r"save_.*|checkpoint_.*|skip_checkpoint_components|resume_from_checkpoint|async_save.*|on_save_error",
    "Precision, memory and compilation": r"torch_compile.*|.*precision|fp8_.*|qat_.*|sdpa_.*|default_dtype|"
    r"gradient_checkpointing|.*activation.*|dynamo_recompile_limit|construct_model_on|gc_threshold|tune_malloc",
    "Checks": r"detect_anomaly|nonfinite_grad|health_check|replica_check_steps",
    _OTHER: r".*",
}


def page() -> str:
    """Return the page in Markdown."""
    common = arguments_of(DEFAULT_KIND)
    grouped: dict[str, list[FieldHelp]] = {title: [] for title in _GROUPS}
    for field in common:
        grouped[_group(field.name)].append(field)
    parts, listed = [_INTRODUCTION], set[str]()
    # The watch comes last, since few runs change it.
    titles = sorted(grouped, key=lambda title: title == "Watch over ranks")
    parts += [f"## {title}\n\n{_entries(grouped[title], listed)}\n" for title in titles if grouped[title]]
    for kind, found in TRAINERS.items():
        own = [field for field in arguments_of(kind) if field not in common]
        if own:
            parts.append(f"## Arguments of {found.class_name} (`--trainer {kind}`)\n\n{_entries(own, listed)}\n")
    return "\n".join(parts)


def _group(name: str) -> str:
    return next(title for title, pattern in _GROUPS.items() if re.fullmatch(pattern, name))


def _entries(fields: Sequence[FieldHelp], listed: set[str]) -> str:
    """Return the entries of a section. Only the first entry of a name is indexed."""
    parts = []
    for field in fields:
        options = [":no-index:"] if field.name in listed else []
        listed.add(field.name)
        default = field.default.removeprefix("default ")
        kind = f"`{field.type}`, default `{default}`." if default else f"`{field.type}`."
        choices = f" Values: {field.choices}." if field.choices else ""
        text = _without_html(f"{field.text}{choices}")
        parts.append("\n".join([f"```{{confval}} {field.name}", *options, "", f"{kind} {text}", "```"]))
    return "\n\n".join(parts) + "\n"


def _without_html(text: str) -> str:
    """Return text in which `<` outside of code is escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
