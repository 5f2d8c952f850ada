"""Scripts on two ranks: every sample once and in order, and errors on all ranks."""

from pathlib import Path

import pytest
import torch

from forgather.hf import Trainer
from tests.guarantees.drop_in import rank_cases
from tests.guarantees.drop_in.programs import collate, made, weights
from tests.support.ranks import run_on_ranks

TIMEOUT = 240


@pytest.mark.parametrize("offline", [True, False])
def test_all_ranks_raise_if_one_cannot_reach_the_hub(tmp_path: Path, offline: bool) -> None:
    for error in run_on_ranks(rank_cases.raised_by_upload, 2, str(tmp_path), offline, timeout=TIMEOUT):
        assert "cannot be created now" in error and ("HF_HUB_OFFLINE" if offline else "no route") in error


def test_generated_tokens_of_unequal_lengths_are_gathered_in_order(tmp_path: Path) -> None:
    predictions, labels, loss = rank_cases.generated(str(tmp_path))
    assert predictions[:, 0].tolist() == labels[:, 0].tolist() == rank_cases.FIRST_TOKENS[:7]
    assert len(set((predictions > 0).sum(1).tolist())) > 1
    for of_rank, its_labels, its_loss in run_on_ranks(rank_cases.generated, 2, str(tmp_path), timeout=TIMEOUT):
        assert (of_rank == predictions).all() and (its_labels == labels).all()
        assert its_loss == pytest.approx(loss, abs=1e-6)


def test_a_plain_loader_is_evaluated_once_by_two_ranks(tmp_path: Path) -> None:
    _, samples, loss = rank_cases.evaluated_by_loader(str(tmp_path))
    outcomes = run_on_ranks(rank_cases.evaluated_by_loader, 2, str(tmp_path), timeout=TIMEOUT)
    assert samples == rank_cases.FIRST_TOKENS[:7]
    assert sorted(outcomes[0][0] + outcomes[1][0]) == sorted(samples) and outcomes[0][0] and outcomes[1][0]
    for _, found, its_loss in outcomes:
        assert found in (samples, []) and its_loss == pytest.approx(loss, abs=1e-6)


def test_a_loader_with_a_distributed_sampler_is_read_by_each_rank(tmp_path: Path) -> None:
    _, expected = rank_cases.trained_by_sampler(str(tmp_path / "one"), 4)
    outcomes = run_on_ranks(rank_cases.trained_by_sampler, 2, str(tmp_path / "two"), 2, timeout=TIMEOUT)
    for rank, (seen, found) in enumerate(outcomes):
        assert seen == rank_cases.FIRST_TOKENS[rank::2] * 2
        assert len(found) == 4 and found == pytest.approx(expected, abs=1e-5)


def test_the_number_of_processes_in_a_loss_is_logged_once(tmp_path: Path) -> None:
    for records in run_on_ranks(rank_cases.notes_of_processes, 2, str(tmp_path), timeout=TIMEOUT):
        assert len(records) == 1 and "self.args.world_size" in records[0]


def test_changed_labels_are_counted_or_refused(tmp_path: Path) -> None:
    class InCollator(Trainer):
        """The same labels, without an override."""

    def shorter(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = collate(samples)
        batch["labels"][:, 4:] = -100
        return batch

    expected = made(InCollator, tmp_path / "collator")
    expected.data_collator = expected.engine.data_collator = shorter
    expected.train()
    found = made(rank_cases.ShorterLabels, tmp_path / "override")
    found.train()
    torch.testing.assert_close(weights(found), weights(expected), rtol=0.0, atol=1e-6)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-6)
    for cls in (rank_cases.ShorterLabels, rank_cases.ShorterStep):
        with pytest.raises(ValueError, match=r"_prepare_inputs changes the number of targets .* data_collator"):
            made(cls, tmp_path / "accumulated", gradient_accumulation_steps=2).train()


def test_changed_labels_are_refused_on_ranks(tmp_path: Path) -> None:
    errors = run_on_ranks(rank_cases.raised_by_changed_labels, 2, str(tmp_path), timeout=TIMEOUT)
    assert all("_prepare_inputs changes the number of targets" in error for error in errors)
