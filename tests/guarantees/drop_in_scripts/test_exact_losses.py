"""Losses that differ from transformers' Trainer on purpose: ours do not depend on how the data are split into batches.

transformers averages the means of batches: an evaluation weights each batch by its samples, and a script with a loss
that ignores `num_items_in_batch` (T5, BERT) trains with the sum of the means of its micro-batches. Ours are means over
all labels, and each test compares them with this mean, computed by hand.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, AutoModelForTokenClassification, AutoTokenizer

from tests.guarantees.drop_in_scripts.script_runs import Runs, tiny_files

TOLERANCE = 1e-5
LABELS = ("ANIMAL", "O", "PLACE")
FILES = {"run_ner": "tagged_words", "run_summarization": "summaries"}
AUTO_MODELS = {"run_ner": AutoModelForTokenClassification, "run_summarization": AutoModelForSeq2SeqLM}


def samples_by_hand(program: str, split: str) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield inputs and labels of each sample as a batch of one, without any padding."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_files() / "models" / program)
    for line in (tiny_files() / f"{FILES[program]}_{split}.json").read_text().splitlines():
        row = json.loads(line)
        if program == "run_ner":
            inputs = tokenizer([row["tokens"]], is_split_into_words=True, return_tensors="pt")
            words = inputs.word_ids(0)
            firsts = [word is not None and word not in words[:place] for place, word in enumerate(words)]
            labels = [
                LABELS.index(row["ner_tags"][word]) if first else -100
                for word, first in zip(words, firsts, strict=True)
            ]
            yield dict(inputs), torch.tensor([labels])
        else:
            yield (
                dict(tokenizer([row["document"]], return_tensors="pt")),
                tokenizer([row["summary"]], return_tensors="pt")["input_ids"],
            )


@torch.no_grad()
def loss_by_hand(program: str, model_folder: Path, split: str, numbers: range | None = None) -> float:
    """Return the sum of the losses of all labels of these samples, divided by their number."""
    model = AUTO_MODELS[program].from_pretrained(model_folder).eval()
    samples = list(samples_by_hand(program, split))
    total, count = 0.0, 0
    for inputs, labels in (samples[number] for number in numbers or range(len(samples))):
        logits = model(**inputs, labels=labels).logits
        total += float(nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


def mean_of_batches(program: str, model_folder: Path, split: str) -> float:
    """Return the evaluation loss of transformers: losses of batches of 4, weighted by samples, or by 4."""
    num_samples = len(list(samples_by_hand(program, split)))
    batches = [range(start, min(start + 4, num_samples)) for start in range(0, num_samples, 4)]
    means = [loss_by_hand(program, model_folder, split, batch) for batch in batches]
    sizes = [len(batch) if program == "run_ner" else 4 for batch in batches]
    return sum(mean * size for mean, size in zip(means, sizes, strict=True)) / sum(sizes)


@pytest.mark.parametrize("program", FILES)
def test_the_evaluation_loss_is_the_mean_over_all_labels(program: str, runs: Runs) -> None:
    theirs, ours = runs.theirs(program), runs.ours(program)
    for split, name in {"validation": "eval_loss", "test": "predict_loss"}.items():
        exact = loss_by_hand(program, ours.output_dir, split)
        # Why it differs: transformers weights the batches of 4 and 3 samples by samples. A Seq2SeqTrainer even counts the
        # smaller batch as a full one, because its gather function keeps the repeated losses.
        assert theirs.metrics[name] != pytest.approx(exact, rel=3e-4)
        assert theirs.metrics[name] == pytest.approx(mean_of_batches(program, theirs.output_dir, split), rel=TOLERANCE)
        assert ours.metrics[name] == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.parametrize("program", FILES)
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(program: str, runs: Runs) -> None:
    settings = {"per_device_eval_batch_size": 16}
    theirs, ours = runs.theirs(program, **settings), runs.ours(program, **settings)
    # In one batch, transformers computes the exact mean too.
    for name in ("eval_loss", "predict_loss"):
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=TOLERANCE)


@pytest.mark.parametrize("program", FILES)
def test_accumulated_micro_batches_train_like_one_batch(program: str, runs: Runs) -> None:
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole, theirs = runs.theirs(program), runs.theirs(program, **accumulated)
    ours = runs.ours(program, **accumulated)
    exact = loss_by_hand(program, tiny_files() / "models" / program, "train", range(4))
    # Why it differs: transformers passes num_items_in_batch to these models and takes their loss for a share of it, but
    # they return means. So it adds the means of the micro-batches: a loss that is twice as large, and not the mean.
    assert theirs.losses[0] > 1.5 * exact
    assert theirs.metrics["train_loss"] != pytest.approx(whole.metrics["train_loss"], rel=1e-2)
    assert ours.losses[0] == pytest.approx(exact, rel=TOLERANCE)
    assert ours.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert_metrics_of(ours.metrics, whole.metrics)


def assert_metrics_of(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    counted = [name for name in theirs if name.startswith(("eval_", "predict_")) and not name.endswith("_loss")]
    assert {name: ours[name] for name in counted} == pytest.approx(
        {name: theirs[name] for name in counted}, rel=TOLERANCE
    )
