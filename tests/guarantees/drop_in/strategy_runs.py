"""One script of the drop-in for every strategy: train, evaluate, predict, save and resume. Functions run on ranks."""

from pathlib import Path
from typing import Any

import numpy as np

from forgather.hf import Trainer
from tests.guarantees.drop_in.programs import arguments, collate, rows
from tests.support.tiny_models import tiny_llama

GLOBAL_BATCH = 4
MAX_STEPS = 4
SAVED_STEP = 2
DATA_RANKS = {"single": 1, "ddp": 2, "fsdp2": 2, "accelerate": 2, "pipeline": 1, "hybrid": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": "full_shard"},
    "pipeline": {"fg_n_microbatches": 2},
    "hybrid": {"fg_n_microbatches": 2, "fg_pp_size": 2},
}
OWN_NAMES = ("single", "accelerate", "pipeline", "hybrid")
Results = dict[str, Any]


def metrics_of(prediction: Any) -> dict[str, float]:
    """Return metrics that depend on the values and on the order of the samples."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counts = labels != -100
    chosen = np.take_along_axis(logits, np.where(counts, labels, 0)[..., None], -1)[..., 0]
    weights = np.arange(1, len(labels) + 1)[:, None] * counts
    return {"order": float((chosen * weights).sum() / weights.sum()), "samples": float(len(labels))}


def make(strategy: str, output_dir: str, **options: Any) -> Trainer:
    """Return a trainer with the same global batch for every strategy."""
    named = {"fg_strategy": strategy} if strategy in OWN_NAMES else {}
    settings = {
        "per_device_train_batch_size": GLOBAL_BATCH // DATA_RANKS[strategy],
        "max_steps": MAX_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED_STEP,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        **named,
        **OPTIONS.get(strategy, {}),
    }
    builds = {"model_init": tiny_llama} if strategy in ("pipeline", "hybrid") else {"model": tiny_llama()}
    args = arguments(output_dir, **{**settings, **options})
    return Trainer(
        args=args,
        data_collator=collate,
        train_dataset=rows(),
        eval_dataset=rows(5),
        compute_metrics=metrics_of,
        **builds,
    )


def run_script(strategy: str, output_dir: str) -> Results:
    """Train, evaluate, predict, save, and resume from a checkpoint in the middle; return the results."""
    trainer = make(strategy, output_dir)
    output = trainer.train()
    results = seen(trainer)
    results["training_loss"] = output.training_loss
    results["evaluated"] = _numbers(trainer.evaluate())
    prediction = trainer.predict(rows(7))
    results["predictions"], results["label_ids"] = prediction.predictions, prediction.label_ids
    results["predicted"] = _numbers(prediction.metrics)
    trainer.save_model(str(Path(output_dir) / "final"))
    resumed = make(strategy, output_dir)
    resumed.train(resume_from_checkpoint=str(Path(output_dir) / f"checkpoint-{SAVED_STEP}"))
    results["resumed"] = seen(resumed)
    return results


def seen(trainer: Trainer) -> Results:
    """Return losses and metrics of the log history."""
    history = trainer.state.log_history
    return {
        "losses": [record["loss"] for record in history if "loss" in record],
        "metrics": [_numbers(record) for record in history if "eval_loss" in record],
    }


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that do not depend on time."""
    timed = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(timed)}
