"""Nine scripts in the style of transformers' examples give the same losses, metrics and files after a change of one import."""

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel

from tests.guarantees.drop_in_scripts.script_runs import (
    DATA_SETTINGS,
    OURS,
    Runs,
    ScriptResult,
    as_options,
    changed_program,
    command_line,
    run_script,
    settings_of,
)

TOLERANCE = 1e-5
# The evaluation loss of transformers is a mean over samples of the means of batches; ours is the mean over all labels.
# They differ if batches have different numbers of labels. test_exact_losses.py compares these with the exact values.
EXACT_HERE = {
    "run_ner": {"eval_loss", "predict_loss"},
    "run_summarization": {"eval_loss", "predict_loss"},
}
# transformers divides the loss of a causal language model by all labels. The first label of a sequence is no target, since
# the model predicts the next token: of 16 labels, 15 are targets. Ours is the mean over targets.
LABELS_PER_TARGET = {"run_clm": 16 / 15}
# The same in training: the mean over all labels of the run, and the mean of the means of its steps.
MEANS_OF_STEPS = {"run_mlm", "run_ner", "run_summarization"}
WRITTEN_TEXTS = {
    "run_glue": ["predict_results.txt"],
    "run_classification": ["predict_results.txt"],
    "run_ner": ["predictions.txt"],
    "run_qa": ["eval_predictions.json", "predict_predictions.json"],
    "run_summarization": ["generated_predictions.txt"],
}


def assert_same_metrics(ours: dict[str, float], theirs: dict[str, float], *different: str) -> None:
    """Compare the metrics; ours may have more, such as the number of tokens."""
    wanted = {name: value for name, value in theirs.items() if name not in different}
    assert {name: ours.get(name) for name in wanted} == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


def as_ours(program: str, losses: list[float]) -> list[float]:
    """Return losses of transformers as means over targets."""
    return [LABELS_PER_TARGET.get(program, 1.0) * loss for loss in losses]


def exact_metrics(program: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics of transformers with losses as means over targets."""
    exact = dict(metrics)
    for name in ("train_loss", "eval_loss", "predict_loss"):
        if name in exact:
            exact[name] = as_ours(program, [exact[name]])[0]
    if "perplexity" in exact:
        exact["perplexity"] = math.exp(exact["eval_loss"])
    return exact


def training_log(result: ScriptResult) -> list[dict[str, Any]]:
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    history = result.read_json("trainer_state.json")["log_history"]
    return [{name: entry[name] for name in names} for entry in history if "loss" in entry]


@pytest.mark.parametrize("program", DATA_SETTINGS)
def test_a_script_gives_the_losses_and_metrics_of_transformers(program: str, runs: Runs) -> None:
    theirs = runs.theirs(program)
    ours = runs.ours(program)
    assert ours.losses == pytest.approx(as_ours(program, theirs.losses), rel=TOLERANCE)
    different = EXACT_HERE.get(program, set()) | ({"train_loss"} if program in MEANS_OF_STEPS else set())
    assert_same_metrics(ours.metrics, exact_metrics(program, theirs.metrics), *different)
    for name in WRITTEN_TEXTS.get(program, []):
        assert ours.text(name) == theirs.text(name), name


@pytest.mark.parametrize("program", DATA_SETTINGS)
def test_a_script_logs_each_step_like_transformers(program: str, runs: Runs) -> None:
    theirs, ours = training_log(runs.theirs(program)), training_log(runs.ours(program))
    assert len(ours) == len(theirs)
    for our_step, their_step in zip(ours, theirs, strict=True):
        their_step |= {name: as_ours(program, [their_step[name]])[0] for name in ("loss", "grad_norm")}
        assert our_step == pytest.approx(their_step, rel=1e-4, abs=TOLERANCE)


def test_a_script_leaves_a_model_folder_with_metrics_and_a_card(runs: Runs) -> None:
    theirs, ours = runs.theirs("run_ner"), runs.ours("run_ner")
    # Ours are in training_args.json, because a pickle can run code.
    expected = {path.name for path in theirs.output_dir.iterdir()} - {"training_args.bin"} | {"training_args.json"}
    assert expected <= {path.name for path in ours.output_dir.iterdir()}
    assert AutoConfig.from_pretrained(ours.output_dir).id2label == {0: "ANIMAL", 1: "O", 2: "PLACE"}
    assert AutoModel.from_pretrained(ours.output_dir).config.hidden_size == 32
    card = ours.text("README.md")
    assert "base_model" in card and "precision" in card.lower()


def best_settings() -> dict[str, Any]:
    return {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "num_train_epochs": 4,
        "learning_rate": 0.05,
    }


def test_a_script_keeps_and_loads_the_best_model_by_its_own_metric(runs: Runs) -> None:
    theirs, ours = runs.theirs("run_ner", **best_settings()), runs.ours("run_ner", **best_settings())
    assert_same_metrics(ours.metrics, theirs.metrics, "eval_loss", "predict_loss", "train_loss")
    states = [result.read_json("trainer_state.json") for result in (ours, theirs)]
    assert states[0]["best_metric"] == pytest.approx(states[1]["best_metric"])
    kept = [sorted(path.name for path in result.output_dir.glob("checkpoint-*")) for result in (ours, theirs)]
    # transformers deletes the newest checkpoint at the end, and a run could only resume from the best one. Ours stays.
    assert kept == [["checkpoint-16", "checkpoint-4"], ["checkpoint-4"]]
    assert Path(states[0]["best_model_checkpoint"]).name == Path(states[1]["best_model_checkpoint"]).name


def test_options_of_the_command_line_work_like_a_json_file(runs: Runs, tmp_path: Path) -> None:
    path = changed_program("run_glue", OURS, tmp_path)
    output_dir = tmp_path / "output"
    with command_line(str(path), *as_options(settings_of("run_glue", output_dir))):
        run_script(path)
    assert_same_metrics(ScriptResult(output_dir).metrics, runs.theirs("run_glue").metrics)


def test_a_script_evaluates_without_training(runs: Runs) -> None:
    settings = {"do_train": False}
    theirs, ours = runs.theirs("run_clm", **settings), runs.ours("run_clm", **settings)
    assert_same_metrics(ours.metrics, exact_metrics("run_clm", theirs.metrics))


def test_a_language_model_accumulates_like_transformers(runs: Runs) -> None:
    # GPT-2 uses num_items_in_batch, so transformers weights its tokens as we do.
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    theirs, ours = runs.theirs("run_clm", **settings), runs.ours("run_clm", **settings)
    assert ours.losses == pytest.approx(as_ours("run_clm", theirs.losses), rel=TOLERANCE)
    assert_same_metrics(ours.metrics, exact_metrics("run_clm", theirs.metrics))
