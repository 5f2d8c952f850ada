"""Overrides of methods of transformers' Trainer are called, or refused at construction."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, SequentialSampler

from forgather.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from forgather.hf.methods import CALLED, FORWARDED, REFUSED
from tests.guarantees.drop_in.programs import COUNTED, collate, count_calls, made, rows, with_copied_bodies
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama


def test_the_list_of_methods_is_complete() -> None:
    known = CALLED | FORWARDED | REFUSED.keys()
    of_transformers = {name for name in vars(transformers.Trainer) if not name.startswith("__")}
    assert of_transformers - known == set() and known - of_transformers == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_without_effect_is_refused(tmp_path: Path, name: str) -> None:
    cls = type("Mine", (Trainer,), {name: lambda self, *values: None, "__module__": __name__})
    with pytest.raises(TypeError, match=f"Mine.{name} would never be called"):
        made(cls, tmp_path)


def test_a_pipeline_refuses_overrides_of_the_loss(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Mine.compute_loss would never be called: a pipeline"):
        made(Mine, tmp_path, fg_strategy="pipeline")


@pytest.mark.parametrize("name", ["_save", "compute_loss_context_manager", "autocast_smart_context_manager"])
def test_a_pipeline_refuses_overrides_that_need_the_full_model(tmp_path: Path, name: str) -> None:
    cls = type("Mine", (Trainer,), {name: lambda self, *values: None, "__module__": __name__})
    with pytest.raises(TypeError, match=f"Mine.{name} would never be called: .* pipeline"):
        made(cls, tmp_path, fg_strategy="pipeline")


def refuse_generation(output_dir: str) -> None:
    args = Seq2SeqTrainingArguments(output_dir, use_cpu=True, fg_strategy="pipeline", predict_with_generate=True)
    with pytest.raises(ValueError, match="generation needs the complete model"):
        Seq2SeqTrainer(None, args, collate, rows(), model_init=tiny_llama)


def test_a_pipeline_refuses_predictions_by_generation(tmp_path: Path) -> None:
    run_on_ranks(refuse_generation, 2, str(tmp_path))


def check_calls(calls: dict[str, int], num_micro_batches: int, num_eval_batches: int) -> None:
    assert set(COUNTED) - calls.keys() == set()
    assert calls["training_step"] == num_micro_batches
    # Two evaluations during training and one afterwards.
    assert calls["evaluate"] == 3 and calls["get_eval_dataloader"] == 3
    assert calls["evaluation_loop"] == 4 and calls["predict"] == calls["get_test_dataloader"] == 1
    assert calls["prediction_step"] == 4 * num_eval_batches
    assert calls["save_model"] == 1 and calls["create_optimizer_and_scheduler"] == 1


def test_every_overridable_method_is_called(tmp_path: Path) -> None:
    calls = count_calls(str(tmp_path))
    check_calls(calls, num_micro_batches=2, num_eval_batches=2)
    assert calls["_save"] == 1


def test_every_overridable_method_is_called_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(count_calls, 2, str(tmp_path))
    check_calls(first, num_micro_batches=2, num_eval_batches=1)
    assert first.pop("_save") == 1 and "_save" not in second


def test_copied_method_bodies_of_transformers_give_the_same_result(tmp_path: Path) -> None:
    wanted, number = with_copied_bodies(str(tmp_path / "own"))
    for accepts in (True, False):
        # False: the copied training_step divides each loss by the number of micro-batches, 2 in the last step and 3 before.
        copied = with_copied_bodies(str(tmp_path / str(accepts)), model_accepts_loss_kwargs=accepts)
        torch.testing.assert_close(copied[0], wanted)
        assert copied[1] == number == 4
    ranks = run_on_ranks(copied_on_rank, 2, str(tmp_path))
    torch.testing.assert_close(*ranks[0])


def copied_on_rank(output_dir: str) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, _ = with_copied_bodies(f"{output_dir}/own_on_ranks")
    copied, number = with_copied_bodies(f"{output_dir}/copied_on_ranks", model_accepts_loss_kwargs=True)
    assert number == 4
    return copied, wanted


def test_an_overridden_sampler_and_loader_choose_the_data(tmp_path: Path) -> None:
    seen: list[int] = []

    class Seen(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            seen.append(int(inputs["input_ids"][0, 0]))
            return super().compute_loss(model, inputs, return_outputs, **keywords)

    class Reversed(Seen):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return list(reversed(range(8)))

    class Loaded(Seen):
        def get_train_dataloader(self) -> Any:
            data = rows()[4:]
            return DataLoader(data, 2, sampler=SequentialSampler(data), collate_fn=collate)

    made(Reversed, tmp_path / "sampler").train()
    made(Loaded, tmp_path / "loader").train()
    first = [row["input_ids"][0] for row in rows()]
    assert seen == [first[7], first[5], first[4], first[6]]


def test_an_overridden_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=9)
            return self.lr_scheduler

    trainer = made(Own, tmp_path)
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.get_learning_rates() == [0.05]


def test_an_overridden_evaluate_decides_about_the_best_model(tmp_path: Path) -> None:
    class Judged(Trainer):
        def evaluate(self, *values: Any, **keywords: Any) -> dict[str, float]:
            return {**super().evaluate(*values, **keywords), "eval_taste": float(self.state.global_step == 1)}

    trainer = made(
        Judged,
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="taste",
    )
    trainer.train()
    assert trainer.state.best_metric == 1.0
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-1")


def test_the_default_collator_is_chosen_as_in_transformers(tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    assert trainer.data_collator is transformers.default_data_collator


class OwnLoop(Trainer):
    """Evaluation loop of a user, with a collective for each batch."""

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> Any:
        assert next(self.model.parameters()).device.type == self.args.device.type
        ids, texts = [], []
        for batch in dataloader:
            ids.append(self.accelerator.gather_for_metrics(batch["input_ids"][:, 0]))
            texts += self.accelerator.gather_for_metrics([f"text {one}" for one in batch["input_ids"][:, 0].tolist()])
        found = torch.cat(ids)
        assert texts == [f"text {one}" for one in found.tolist()] and len(dataloader) == len(ids)
        metrics = {f"{metric_key_prefix}_first_ids": found.tolist()}
        return transformers.trainer_utils.EvalLoopOutput(None, None, metrics, len(found))


def first_ids(output_dir: str, number: int) -> Any:
    return made(OwnLoop, output_dir).evaluate(rows(number))["eval_first_ids"]


@pytest.mark.parametrize("number", [8, 5, 2])
def test_an_own_evaluation_loop_sees_each_sample_once(tmp_path: Path, number: int) -> None:
    """On two ranks with batches of two, so that one rank has fewer batches, or none."""
    expected = [row["input_ids"][0] for row in rows(number)]
    assert first_ids(str(tmp_path / "one"), number) == expected
    assert run_on_ranks(first_ids, 2, str(tmp_path / "two"), number) == [expected, expected]


def test_log_works_before_training(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    trainer.log({"num_documents": 3})
    assert trainer.state.log_history[-1]["num_documents"] == 3
    trainer.train()
    assert trainer.state.global_step == 2


def refuse_hub(output_dir: str) -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with pytest.raises(RuntimeError, match="needs the repository") as caught:
        made(Trainer, output_dir, push_to_hub=True, hub_model_id="someone/something")
    return str(caught.value)


def test_a_missing_hub_is_an_error_on_every_rank(tmp_path: Path) -> None:
    assert len(run_on_ranks(refuse_hub, 2, str(tmp_path))) == 2
