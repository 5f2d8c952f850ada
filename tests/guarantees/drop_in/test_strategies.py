"""Every strategy of the drop-in: losses, metrics, predictions, saved models and resumed runs equal one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from forgather.hf import Trainer
from tests.guarantees.drop_in.programs import arguments, collate, rows
from tests.guarantees.drop_in.strategy_runs import SAVED_STEP, Results, run_script
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search

TIMEOUT = 240
CLOSE = {"rel": 0.0, "abs": 1e-5}


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


@pytest.fixture(scope="module")
def one(one_folder: Path) -> Results:
    """Results of one process."""
    return run_script("single", str(one_folder))


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("ddp", 2), ("fsdp2", 2), ("accelerate", 2), ("pipeline", 2), pytest.param("hybrid", 4, marks=long_search)],
)
def test_a_strategy_gives_the_results_of_one_process(
    tmp_path: Path, one: Results, one_folder: Path, strategy: str, num_ranks: int
) -> None:
    for results in run_on_ranks(run_script, num_ranks, strategy, str(tmp_path), timeout=TIMEOUT):
        assert_same(results, one)
    assert (tmp_path / f"checkpoint-{SAVED_STEP}" / "trainer_state.json").exists()
    expected, found = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "final") for folder in (one_folder, tmp_path)
    )
    # AdamW amplifies the rounding of gradients near zero.
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0.0, atol=1e-4)


def assert_same(results: Results, expected: Results) -> None:
    assert results["losses"] == pytest.approx(expected["losses"], **CLOSE)
    assert results["resumed"]["losses"] == results["losses"] and results["resumed"]["metrics"] == results["metrics"]
    assert results["training_loss"] == pytest.approx(expected["training_loss"], **CLOSE)
    for name in ("evaluated", "predicted"):
        assert results[name] == pytest.approx(expected[name], **CLOSE)
    for metrics, same in zip(results["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(same, **CLOSE)
    np.testing.assert_allclose(results["predictions"], expected["predictions"], rtol=0.0, atol=1e-5)
    assert (results["label_ids"] == expected["label_ids"]).all()


def test_a_pipeline_needs_model_init(tmp_path: Path) -> None:
    from tests.support.tiny_models import tiny_llama

    args: Any = arguments(tmp_path, fg_strategy="pipeline", fg_n_microbatches=2)
    with pytest.raises(ValueError, match="model_init"):
        Trainer(tiny_llama(), args, collate, rows()).train()
