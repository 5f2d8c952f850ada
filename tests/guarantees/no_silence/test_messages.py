"""Error messages for mistakes of first-time users: each one names the mistake, the reason and the remedy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import HfArgumentParser

from forgather.ml.loss import ChunkedCausalLoss
from forgather.ml.trainer.callbacks import PeakMemory
from forgather.ml.trainer.loading.data_errors import DataError
from forgather.ml.trainer.trainer import Trainer, TrainingArguments
from tests.support.tiny_models import ScalarModel, TokenModel, quiet_trainer, scalars, token_samples


def builds_nothing() -> None:
    TokenModel()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": TokenModel}, r"model=TokenModel is a class.*model=TokenModel\(\.\.\.\).*model_init=TokenModel"),
        ({"model": "gpt2"}, r"'gpt2' is a string.*from_pretrained\('gpt2'\)"),
        ({"model": builds_nothing}, "is a function, not a model: pass it as model_init"),
        ({"model_init": TokenModel()}, "is a model: pass it as model"),
        ({"model_init": lambda trial: TokenModel()}, "missing a required argument: 'trial'. Bind the arguments"),
        ({"callbacks": [5]}, "5 cannot be used as a callback.*on_step_end"),
        ({"callbacks": PeakMemory()}, r"pass a list of callbacks, such as callbacks=\[PeakMemory"),
        ({"data_collator": 5}, r"data_collator=5 cannot be used.*\(list of samples\) -> batch"),
        ({"compute_loss_func": nn.CrossEntropyLoss}, r"is a class.*compute_loss_func=CrossEntropyLoss\(\.\.\.\)"),
        ({"optimizer": torch.optim.SGD}, r"optimizer=SGD is a class.*optimizer_cls_and_kwargs=\(SGD"),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, "is not a learning-rate schedule.*lr_scheduler_factory"),
        ({"optimizer_cls_and_kwargs": torch.optim.SGD}, "pass a class and a dict of its options"),
    ],
)
def test_objects_of_the_wrong_type_are_rejected(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    given = {"model": TokenModel(), **options} if "model_init" not in options else options
    with pytest.raises(ValueError, match=words):
        Trainer(args={"output_dir": str(tmp_path), "use_cpu": True}, train_dataset=token_samples(2), **given)


def test_model_init_that_returns_none_is_rejected(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_init": builds_nothing}
    with pytest.raises(
        ValueError, match=r"model_init \(builds_nothing\) returned None.*without return.*Return the model"
    ):
        quiet_trainer(tmp_path, None, token_samples(2), trainer_options=options).train()


def test_callback_classes_are_accepted_and_misspelt_events_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), PeakMemory)
    assert isinstance(trainer.callbacks[0], PeakMemory)
    with pytest.raises(ValueError, match="5 cannot be used as a callback"):
        trainer.add_callback(5)
    trainer.add_callback(type("Slip", (), {"on_stepend": lambda self, **_: None})())
    assert "Slip.on_stepend is not called by the trainer" in caplog.text and "on_step_end" in caplog.text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda args, model: Trainer(model, args),
            r"by name.*given 2 by position.*Trainer\(model=\.\.\., args=\.\.\.\)",
        ),
        (
            lambda args, model: Trainer(args=args, model=model, tokenizer=1),
            "'tokenizer': it is called processing_class",
        ),
        (lambda args, model: Trainer(args=args, model=model, train_datasets=[]), "Did you mean 'train_dataset'"),
        (
            lambda args, model: Trainer(args=args, model=model, max_steps=3),
            r"a field of the arguments: args=\{'max_steps'",
        ),
        (lambda args, model: Trainer(model=model), "Trainer needs args"),
        (lambda *_: TrainingArguments(bf16=True), "mixed_precision='bf16'"),
        (lambda *_: TrainingArguments(evaluation_strategy="steps"), "it is called eval_strategy"),
        (lambda *_: TrainingArguments(save_only_model=True), r"checkpoint_components=\['model'\]"),
        (lambda *_: TrainingArguments(learning_rat=1), "Did you mean 'learning_rate'"),
        (lambda *_: TrainingArguments("out"), r"by name.*TrainingArguments\(output_dir='out'\)"),
    ],
)
def test_invalid_constructor_calls_are_rejected(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(TrainingArguments(), TokenModel())


def test_swapped_args_and_model_are_rejected() -> None:
    with pytest.raises(ValueError, match="args and model are swapped"):
        Trainer(args=TokenModel(), model=TrainingArguments())  # type: ignore[arg-type]


@dataclass(kw_only=True)
class OwnArguments(TrainingArguments):
    note: Optional[str] = None  # noqa: UP045 - what users write
    mode: Literal["a", "b"] = "a"


def test_optional_and_literal_fields_of_subclasses() -> None:
    assert OwnArguments().note is None and OwnArguments(note="x", mode="b").note == "x"
    with pytest.raises(ValueError, match=r"note=5 has type int, expected str or None"):
        OwnArguments(note=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 'a' or 'b'"):
        OwnArguments(mode="c")  # type: ignore[arg-type]


def test_hf_argument_parser() -> None:
    (defaults,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([])
    assert defaults == TrainingArguments() and defaults.skip_checkpoint_components == ()
    words = [
        "--max_steps",
        "3",
        "--no_shuffle",
        "--sdpa_backend",
        "math",
        "--skip_checkpoint_components",
        "dataset",
        "rng",
    ]
    words += ["--lr_scheduler_kwargs", '{"power": 2}']
    (given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert (given.max_steps, given.shuffle, given.sdpa_backend) == (3, False, "math")
    assert (given.skip_checkpoint_components, given.lr_scheduler_kwargs) == (["dataset", "rng"], {"power": 2})
    for text, mode in (("", True), ("true", True), ("False", False), ("full", "full"), ("selective", "selective")):
        words = ["--gradient_checkpointing", *text.split()]
        (given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
        assert given.gradient_checkpointing == mode
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs='x' cannot be used: .*JSON"):
        TrainingArguments(lr_scheduler_kwargs="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (lambda: (one for one in token_samples(2)), "A generator was passed.*single samples.*IterableDataset"),
        (lambda: token_samples, "The function token_samples is not a dataset"),
        (lambda: "wikitext", r"The string 'wikitext'.*load_dataset\('wikitext'"),
        (lambda: Failing, r"The class Failing is not a dataset.*Failing\(\.\.\.\)"),
        (lambda: {"input_ids": torch.zeros(2, 3)}, "dict of columns.*Dataset.from_dict"),
        (lambda: [token_samples(1)[0], None], "Sample 1 of the dataset .* is None.*data_collator that skips None"),
        (lambda: [token_samples(1)[0], 7], "Sample 1 of the dataset .* is a int.*all samples as dicts"),
    ],
)
def test_objects_that_are_not_datasets_are_rejected(tmp_path: Path, dataset: Any, words: str) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), dataset(), per_device_train_batch_size=2)
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_generator_that_is_read_twice_is_an_error(tmp_path: Path) -> None:
    batches = ({"value": torch.ones(2)} for _ in range(2))
    with pytest.raises(ValueError, match=r"ended after 2 batches, .*only once"):
        quiet_trainer(tmp_path, ScalarModel(), batches, max_steps=5).train()


class Failing(Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise self.error
        return scalars(index)[0]


class FailingStream(IterableDataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Any:
        yield from scalars(0, 1)
        raise self.error


@pytest.mark.parametrize("kind", [Failing, FailingStream])
@pytest.mark.parametrize("error", [OSError("torn page"), StopIteration()], ids=["OSError", "StopIteration"])
@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_the_sample_that_raised(tmp_path: Path, kind: Any, error: Exception, workers: int) -> None:
    trainer = quiet_trainer(tmp_path, ScalarModel(), kind(error), dataloader_num_workers=workers)
    with pytest.raises(DataError) as raised:
        trainer.train()
    headline = str(raised.value).partition("\n")[0]
    assert "ample 2 of" in headline and type(error).__name__ in headline
    assert ("DataLoader worker 0 of 1" in headline) == bool(workers)
    assert ("next(...)" in headline) == isinstance(error, StopIteration)


def test_error_names_the_samples_of_a_failed_collate(tmp_path: Path) -> None:
    def collate(samples: Any) -> Any:
        return samples[0]["attention_mask"]

    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), trainer_options={"data_collator": collate})
    with pytest.raises(
        DataError, match=r"collate\) raised KeyError: 'attention_mask' .*numbers 0 .*keys \['input_ids'"
    ):
        trainer.train()


class Positions(TokenModel):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(40).expand(len(input_ids), -1))


@pytest.mark.parametrize(
    ("model", "key", "value", "words"),
    [
        (
            TokenModel,
            "input_ids",
            99,
            "'input_ids' .* id 99, its largest, .*'embedding' has .* of 32 rows.*tokenizer",
        ),
        (TokenModel, "input_ids", -1, "'input_ids' .* id -1.*pad_token_id"),
        (TokenModel, "labels", 40, "'labels' .* label 40, .*32 classes: allowed are 0 to 31, and -100.*num_labels"),
        (TokenModel, "labels", -1, "'labels' .* label -1.*Use -100"),
        (Positions, "labels", 1, "requested row 39 of the embedding 'embedding', which has 32 rows.*max_length=32"),
    ],
)
def test_ids_and_labels_out_of_range_are_named(tmp_path: Path, model: Any, key: str, value: int, words: str) -> None:
    samples = token_samples(1)
    samples[0][key][3] = value
    for options in ({}, {"compute_loss_func": ChunkedCausalLoss()}):
        trainer = quiet_trainer(tmp_path, model(), samples, trainer_options=options)
        for run in (trainer.train, lambda trainer=trainer: trainer.evaluate(samples)):
            with pytest.raises(IndexError, match=words):
                run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_cuda_device_is_an_error(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(1), use_cpu=False, device="cuda")
    with pytest.raises(ValueError, match=r"device='cuda' cannot be used: .*finds no cuda device.*use_cpu=True"):
        trainer.train()
