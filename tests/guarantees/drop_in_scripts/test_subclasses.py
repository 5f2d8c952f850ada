"""Subclasses, callbacks and arguments in common styles train and evaluate like they do with transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.guarantees.drop_in_scripts.script_runs import OURS, THEIRS
from tests.guarantees.drop_in_scripts.styles import STYLES, callbacks, loops, losses
from tests.guarantees.drop_in_scripts.styles.recipes import StyleResult, classifier, labelled, run_recipe
from tests.support.sampling import sampled

TOLERANCE = 1e-5


def assert_same(ours: StyleResult, theirs: StyleResult) -> None:
    """Compare losses, metrics and weights."""
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE, abs=TOLERANCE)
    found = {name: ours.metrics.get(name) for name in theirs.metrics}
    assert found == pytest.approx(theirs.metrics, rel=TOLERANCE, abs=TOLERANCE)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(
            ours.weights[name], weight, rtol=1e-4, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def flat(notes: Any) -> list[Any]:
    """Return all values of nested notes in order."""
    if isinstance(notes, dict):
        return [value for key in sorted(notes) for value in (key, *flat(notes[key]))]
    if isinstance(notes, (list, tuple)):
        return [value for note in notes for value in flat(note)]
    return [notes]


def assert_same_notes(ours: list[Any], theirs: list[Any]) -> None:
    """Compare what the styles saw, with a tolerance for numbers."""
    found, wanted = flat(ours), flat(theirs)
    assert len(found) == len(wanted), (ours, theirs)
    for one, other in zip(found, wanted, strict=True):
        assert one == (pytest.approx(other, abs=2e-4) if isinstance(other, float) else other), (ours, theirs)


@pytest.mark.parametrize("name", STYLES)
def test_a_style_gives_the_result_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = run_recipe(STYLES[name], THEIRS, tmp_path / "theirs")
    ours = run_recipe(STYLES[name], OURS, tmp_path / "ours")
    assert_same(ours, theirs)
    assert_same_notes(ours.notes, theirs.notes)


def test_an_override_without_num_items_in_batch_still_works(tmp_path: Path) -> None:
    # The newest transformers refuses this signature. The reference is the same loss with its new signature.
    theirs = run_recipe(losses.weighted_loss, THEIRS, tmp_path / "theirs")
    ours = run_recipe(losses.weighted_loss_of_old_signature, OURS, tmp_path / "ours")
    assert_same(ours, theirs)


MEAN_STYLES = ("weighted_loss", "weighted_loss_with_kwargs", "added_penalty")


@pytest.mark.parametrize(
    "name",
    sampled([*MEAN_STYLES, "weighted_loss_of_items", "loss_function"], ["weighted_loss", "weighted_loss_of_items"]),
)
def test_accumulation_does_not_change_an_own_loss(name: str, tmp_path: Path) -> None:
    """Two micro-batches of 2 must train like a batch of 4, for losses that are means over samples."""
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = run_recipe(STYLES[name], THEIRS, tmp_path / "whole")
    theirs = run_recipe(STYLES[name], THEIRS, tmp_path / "theirs", **accumulated)
    # Why it differs: transformers assumes that an own loss is divided by num_items_in_batch. The mean of a
    # micro-batch is not, so transformers adds the means instead of averaging them: the loss is twice as large.
    if name in MEAN_STYLES:
        assert theirs.losses[0] == pytest.approx(2 * whole.losses[0], rel=0.05)
    else:
        assert theirs.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert_same(run_recipe(STYLES[name], OURS, tmp_path / "ours", **accumulated), whole)


def test_training_again_builds_the_model_again(tmp_path: Path) -> None:
    first = run_recipe(loops.model_factory, OURS, tmp_path)
    first.trainer.train()
    again = {name: value.detach().clone() for name, value in first.trainer.model.state_dict().items()}
    for name, weight in first.weights.items():
        torch.testing.assert_close(again[name], weight, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_saved_adapter_loads_into_its_base_model(tmp_path: Path) -> None:
    result = run_recipe(callbacks.adapters, OURS, tmp_path)
    result.trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(classifier(), tmp_path / "adapter")
    inputs = {name: value[None] for name, value in labelled(1)[0].items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**inputs).logits, result.trainer.model.eval()(**inputs).logits)


def test_own_values_are_in_the_log(tmp_path: Path) -> None:
    result = run_recipe(loops.own_log, OURS, tmp_path)
    assert all("weight_norm" in entry for entry in result.trainer.state.log_history)
