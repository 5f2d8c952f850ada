"""Option names of other training programs, and the configuration keys that replace them.

Used by `parser` for suggestions when a key is unknown.
"""

import re

from forgather._suggestions import suggest

_KEYS = {
    "args.learning_rate": ("lr", "max_lr", "peak_lr"),
    "args.per_device_train_batch_size": (
        "batch_size",
        "bs",
        "train_batch_size",
        "micro_batch_size",
        "per_device_batch_size",
    ),
    "args.per_device_eval_batch_size": ("eval_batch_size", "test_batch_size", "valid_batch_size"),
    "args.num_train_epochs": ("epochs", "num_epochs", "n_epochs", "max_epochs"),
    "args.max_steps": ("steps", "num_steps", "train_steps", "max_train_steps", "num_train_steps", "iterations"),
    "args.gradient_accumulation_steps": ("grad_accum", "gradient_accumulation", "accumulate_grad_batches"),
    "args.max_grad_norm": ("clip", "grad_clip", "clip_grad_norm", "gradient_clip_val", "gradient_clipping"),
    "args.weight_decay": ("wd",),
    "args.warmup_steps": ("warmup", "num_warmup_steps"),
    "args.lr_scheduler_type": ("lr_scheduler_name", "scheduler", "lr_schedule", "schedule_type"),
    "args.output_dir": ("out", "output", "out_dir", "save_dir", "default_root_dir"),
    "args.eval_strategy": ("evaluation_strategy",),
    "args.dataloader_num_workers": ("workers", "num_workers"),
    "args.mixed_precision": ("precision",),
    "args.resume_from_checkpoint": ("resume", "checkpoint", "ckpt", "ckpt_path"),
    "args.use_cpu": ("cpu", "no_cuda"),
    "args.torch_compile": ("compile",),
    "args.default_dtype": ("dtype", "torch_dtype"),
    "model.pretrained": ("model_name_or_path", "model_name", "model_path", "pretrained_model_name_or_path", "model_id"),
    "model.config_class": ("config_name",),
    "model.config": ("config_overrides", "model_config"),
    "tokenizer.path": ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "data.files": ("train_file", "train_files", "data_path", "data_files", "train_data"),
    "data.eval_files": ("validation_file", "validation_files", "eval_file", "test_file", "val_data"),
    "data.dataset": ("dataset_name", "dataset_path", "dataset_name_or_path"),
    "data.sequence_length": ("block_size", "max_seq_length", "max_length", "seq_len", "seq_length", "context_length"),
    "data.text_field": ("text_column", "text_column_name", "dataset_text_field"),
    "data.eval_fraction": ("validation_split_percentage", "val_size", "test_size"),
    "nproc": ("nproc_per_node", "num_processes", "n_gpus", "num_gpus", "gpus", "devices", "world_size"),
    "nnodes": ("num_nodes", "num_machines"),
    "node-rank": ("machine_rank",),
    "rdzv-endpoint": ("master_addr", "main_process_ip", "rdzv_backend"),
    "trainer": ("strategy", "distributed"),
}
_SENTENCES = {
    "bf16": "Set <args.mixed_precision> to bf16.",
    "fp16": "Set <args.mixed_precision> to fp16.",
    "tf32": "Set <args.float32_matmul_precision> to high.",
    "warmup_ratio": "Set a number of steps: <args.warmup_steps>.",
    "data_seed": "<args.seed> also sets the order of the data, and <data.seed> selects the documents for evaluation.",
    "save_only_model": "Set <args.checkpoint_components> to [model].",
    "optim": "Set <optimizer.class_path>, such as torch.optim.SGD, and its keyword arguments in <optimizer.init_args>.",
    "optim_args": "Set <optimizer.init_args> together with <optimizer.class_path>.",
    "report_to": "Add a logger to <callbacks>, such as {class_path: TBLogger}.",
    "disable_tqdm": "Set <trainer.default_callbacks> to false.",
    "do_train": "The command always trains.",
    "do_eval": "Set <args.eval_strategy> to steps or epoch.",
    "overwrite_cache": "Files are tokenised again when a file, the tokenizer or the split changes.",
    "streaming": "Tokens of files are already memory-mapped; <data.class_path> accepts your own datasets.",
    "gradient_checkpointing_kwargs": "Only <args.gradient_checkpointing> can be set here; use Python for more.",
    "config": "Pass the configuration file without an option: forgather train CONFIG.",
    "config_file": "Pass the configuration file without an option: forgather train CONFIG.",
    "push_to_hub": "Nothing is uploaded; forgather finalize writes a directory that you can upload.",
}
"""Hints for names that no single key replaces; <key> is a key of Forgather."""


def other_name_hint(name: str, prefix: str = "") -> str:
    """Return a sentence that names the key for an option of another program, or an empty string.

    It is appended to a message. `prefix` is "--" for options of the command line.
    """
    # The section of an unknown key may be a guess of the user, so it is ignored.
    plain = re.sub(r"^(args|model|data|trainer)\.", "", name).replace("-", "_").lower()
    if plain in _SENTENCES:
        return " " + re.sub(r"<([\w.]+)>", rf"{prefix}\1", _SENTENCES[plain])
    key = next((key for key, names in _KEYS.items() if plain in names), None)
    return "" if key is None or key == name else suggest(prefix + key)
