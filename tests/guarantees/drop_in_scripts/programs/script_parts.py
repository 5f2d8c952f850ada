"""Parts that all scripts share: arguments, log set-up, detection of the last checkpoint, and the end of a script.

They use no trainer, so they need no changed import.
"""

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import datasets
import transformers
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """Model, configuration and tokenizer of the script."""

    model_name_or_path: str = field(metadata={"help": "Folder with a model, its configuration and its tokenizer."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder for the files of `datasets`."})
    use_fast_tokenizer: bool = field(default=True, metadata={"help": "Use a tokenizer of the package tokenizers."})


@dataclass
class DataArguments:
    """Data of the script and their preparation."""

    train_file: str | None = field(default=None, metadata={"help": "Training data."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation data."})
    test_file: str | None = field(default=None, metadata={"help": "Data for predictions."})
    max_seq_length: int = field(default=32, metadata={"help": "Longest sequence, in tokens."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all samples to the longest sequence."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first training samples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first evaluation samples."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Use only the first test samples."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes of `Dataset.map`."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Prepare the data again."})

    @property
    def data_files(self) -> dict[str, str]:
        files = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: path for split, path in files.items() if path is not None}

    @property
    def map_options(self) -> dict[str, Any]:
        return {"num_proc": self.preprocessing_num_workers, "load_from_cache_file": not self.overwrite_cache}


def parse(parser: Any) -> tuple[Any, ...]:
    """Read the arguments from a JSON file if this is the only argument, otherwise from the command line."""
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        parsed: tuple[Any, ...] = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        parsed = parser.parse_args_into_dataclasses()
    return parsed


def set_up_logging(logger: logging.Logger, training_args: Any) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    if training_args.should_log:
        # The default level is passive, so the level of the script is not touched without an argument.
        transformers.utils.logging.set_verbosity_info()
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, "
        f"n_gpu: {training_args.n_gpu}, "
        f"distributed training: {training_args.parallel_mode.value == 'distributed'}, "
        f"16-bits training: {training_args.fp16}"
    )
    logger.info(f"Training/evaluation parameters {training_args}")


def find_checkpoint(logger: logging.Logger, training_args: Any) -> str | None:
    """Return the checkpoint to resume from: the requested one, or the last one of the output directory."""
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.info(f"Resuming from {last_checkpoint}; choose another --output_dir to start again.")
    if training_args.resume_from_checkpoint is not None:
        return str(training_args.resume_from_checkpoint)
    return last_checkpoint


def first_samples(dataset: Any, limit: int | None) -> Any:
    return dataset if limit is None else dataset.select(range(min(len(dataset), limit)))


def run_training(trainer: Any, checkpoint: str | None, train_dataset: Any, data_args: DataArguments) -> None:
    """Train, save the model, and record metrics and state."""
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # Saves the tokenizer too.
    metrics = train_result.metrics
    limit = data_args.max_train_samples
    max_train_samples = limit if limit is not None else len(train_dataset)
    metrics["train_samples"] = min(max_train_samples, len(train_dataset))
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def publish(trainer: Any, training_args: Any, **kwargs: Any) -> None:
    """Push the model, or write its card."""
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)
