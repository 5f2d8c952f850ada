"""Runs of the scripts: change their import, start them in this process with arguments, and read their results."""

import functools
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from tests.guarantees.drop_in_scripts.tiny_folders import save_models
from tests.guarantees.drop_in_scripts.tiny_texts import write_data

PROGRAMS = Path(__file__).parent / "programs"
OLD_IMPORT = "from transformers import ("
THEIRS = "transformers"
# With DROP_IN_MODULE=transformers, only tests of exact values fail: they show where the result of transformers is not exact.
OURS = os.environ.get("DROP_IN_MODULE", "forgather.hf")

# With a large epsilon, rounding noise in gradients that are zero does not become steps of the size of the learning rate.
# The trainers shuffle differently, so the data come in their own order.
COMMON_SETTINGS: Mapping[str, Any] = {
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "adam_epsilon": 0.01,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "log_level": "warning",
    "disable_tqdm": True,
    "seed": 7,
}


def _files(task: str, ending: str, *splits: str) -> dict[str, str]:
    return {f"{split}_file": f"{task}_{split}.{ending}" for split in splits}


DATA_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run_clm": {**_files("lines", "txt", "train", "validation"), "max_train_samples": 24, "max_eval_samples": 10},
    "run_mlm": {**_files("lines", "txt", "train", "validation"), "mask_seed": 3, "per_device_eval_batch_size": 16},
    "run_glue": {**_files("pairs", "json", "train", "validation", "test"), "do_predict": True},
    "run_classification": {**_files("topics", "csv", "train", "validation", "test"), "do_predict": True},
    "run_ner": {**_files("tagged_words", "json", "train", "validation", "test"), "do_predict": True},
    "run_swag": _files("choices", "json", "train", "validation"),
    "run_qa": {**_files("questions", "json", "train", "validation", "test"), "do_predict": True},
    "run_summarization": {
        **_files("summaries", "json", "train", "validation", "test"),
        "do_predict": True,
        "predict_with_generate": True,
        "max_target_length": 8,
    },
    "run_image_classification": {
        "train_dir": "images_train",
        "validation_dir": "images_validation",
        "remove_unused_columns": False,
        "learning_rate": 0.001,
    },
}


@dataclass
class ScriptResult:
    """Output directory of a script, and the files in it that people read."""

    output_dir: Path

    def read_json(self, name: str) -> Any:
        return json.loads((self.output_dir / name).read_text())

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics except durations, which differ from run to run."""
        metrics: dict[str, float] = self.read_json("all_results.json")
        timed = ("runtime", "per_second", "preparation_time")
        return {name: value for name, value in metrics.items() if not name.endswith(timed)}

    @property
    def losses(self) -> list[float]:
        """Training losses of the log."""
        return [entry["loss"] for entry in self.read_json("trainer_state.json")["log_history"] if "loss" in entry]

    def text(self, name: str) -> str:
        return (self.output_dir / name).read_text()


@functools.cache
def tiny_files() -> Path:
    """Return the folder with the models and data of all scripts, made once for each test process."""
    holder = tempfile.TemporaryDirectory(prefix="drop_in_scripts_")
    _holders.append(holder)
    folder = Path(holder.name)
    save_models(folder / "models")
    write_data(folder)
    return folder


_holders: list[tempfile.TemporaryDirectory[str]] = []


def settings_of(program: str, output_dir: Path, **settings: Any) -> dict[str, Any]:
    """Return the arguments of a script, with absolute paths."""
    files = tiny_files()
    merged = {**COMMON_SETTINGS, **DATA_SETTINGS[program], **settings}
    paths = {key: str(files / merged[key]) for key in merged if key.endswith(("_file", "_dir"))}
    model = {"model_name_or_path": str(files / "models" / program), "cache_dir": str(files / "cache")}
    return {**model, **merged, **paths, "output_dir": str(output_dir)}


def changed_program(program: str, module: str, folder: Path) -> Path:
    """Write the script into the folder, with its one import changed to the module."""
    source = (PROGRAMS / f"{program}.py").read_text()
    assert source.count(OLD_IMPORT) == 1, f"{program} must have exactly one statement {OLD_IMPORT!r}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program}.py"
    path.write_text(source.replace(OLD_IMPORT, f"from {module} import ("))
    return path


def run_program(program: str, module: str, folder: Path, **settings: Any) -> ScriptResult:
    """Run the script in this process."""
    with command_line(*write_program(program, module, folder, **settings)):
        run_script(folder / f"{program}.py")
    return ScriptResult(folder / "output")


def write_program(program: str, module: str, folder: Path, **settings: Any) -> list[str]:
    """Write the script and its arguments into the folder, and return its command line."""
    path = changed_program(program, module, folder)
    argument_file = folder / "arguments.json"
    argument_file.write_text(json.dumps(settings_of(program, folder / "output", **settings)))
    return [str(path), str(argument_file)]


def run_script(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as options of a command line."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


@contextmanager
def command_line(*argv: str) -> Iterator[None]:
    """Set the command line for a script, without network and with one thread."""
    before, was_offline, num_threads = sys.argv, huggingface_hub.constants.HF_HUB_OFFLINE, torch.get_num_threads()
    sys.argv, huggingface_hub.constants.HF_HUB_OFFLINE = list(argv), True
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.argv, huggingface_hub.constants.HF_HUB_OFFLINE = before, was_offline
        torch.set_num_threads(num_threads)


class Runs:
    """Results of the scripts, each computed once for its trainer and arguments, because several tests look at them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[str, ScriptResult] = {}

    def theirs(self, program: str, **settings: Any) -> ScriptResult:
        return self._of(THEIRS, program, settings)

    def ours(self, program: str, **settings: Any) -> ScriptResult:
        return self._of(OURS, program, settings)

    def _of(self, module: str, program: str, settings: Mapping[str, Any]) -> ScriptResult:
        key = json.dumps([module, program, settings], sort_keys=True)
        if key not in self._results:
            folder = self._folder / str(len(self._results))
            self._results[key] = run_program(program, module, folder, **settings)
        return self._results[key]
