"""Generation in a pipeline gives the same tokens as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from forgather.data.byte_tokenizer import byte_tokenizer
from forgather.ml.trainer.callbacks import TextgenCallback
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama, pipeline_trainer, tied_gpt2, trainer_of
from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled
from tests.support.tiny_models import token_samples

MODELS = {"llama": llama, "tied_gpt2": tied_gpt2}
PAD, EOS = 0, 2
NEW_TOKENS = 9


def prompts() -> tuple[Tensor, Tensor]:
    """Return three left-padded prompts of different lengths, and their attention mask."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 32, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((2, 6, 4)):
        mask[row, : 6 - length] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def whole(name: str) -> Any:
    """Return the model with the initial weights of a trainer with seed 0."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def expected(name: str, case: dict[str, Any]) -> list[list[int]]:
    ids, mask = prompts()
    model = whole(name)
    torch.manual_seed(11)
    settings = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD, "top_k": 0, **case}
    tokens: list[list[int]] = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **settings).tolist()
    return tokens


CASES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "use_cache": False},
    {"do_sample": False, "repetition_penalty": 1.5},
    {"do_sample": False, "eos_token_id": 7},
    {"do_sample": True, "temperature": 0.8, "top_k": 5},
]


def generated(output_dir: str, schedules: list[str]) -> list[Any]:
    """Generate on ranks with each model, schedule and case; return the tokens, and the tokens processed per layer."""
    results: list[Any] = []
    ids, mask = prompts()
    for name in MODELS:
        for schedule in schedules:
            trainer = pipeline_trainer(
                Path(output_dir), MODELS[name], None, schedule=schedule, per_device_train_batch_size=8, n_microbatches=8
            )
            for case in CASES:
                torch.manual_seed(11)
                options = {"eos_token_id": EOS, "pad_token_id": PAD, **case}
                tokens = trainer.pipeline_generate(ids, NEW_TOKENS, attention_mask=mask, **options)
                results.append(tokens.tolist())
            results.append([layer_tokens(trainer, ids, use_cache) for use_cache in (True, False)])
    return results


def layer_tokens(trainer: PipelineTrainer, ids: Tensor, use_cache: bool) -> set[int]:
    """Return the numbers of tokens that the attention layers of this rank process to complete one prompt."""
    counts: dict[str, int] = {}
    hooks = []
    for name, module in trainer.unwrapped_model().named_modules():
        if name.endswith((".self_attn", ".attn")):

            def count(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                hidden = kwargs.get("hidden_states", args[0] if args else None)
                assert hidden is not None
                counts[name] = counts.get(name, 0) + hidden.shape[1]

            hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
    trainer.pipeline_generate(
        ids[1:2], NEW_TOKENS, eos_token_id=31, pad_token_id=PAD, do_sample=False, use_cache=use_cache
    )
    for hook in hooks:
        hook.remove()
    assert counts
    return set(counts.values())


@pytest.mark.parametrize("num_ranks", sampled([2, 4], [4]))
def test_generated_tokens_equal_one_device_in_every_layout(tmp_path: Path, num_ranks: int) -> None:
    schedules = ["1f1b", "interleaved1f1b", "zbv"] if num_ranks == 2 else ["1f1b", "zbv"]
    results = run_on_ranks(generated, num_ranks, str(tmp_path), schedules)
    texts = {name: [expected(name, case) for case in CASES] for name in MODELS}
    for rank, given in enumerate(results):
        found = iter(given)
        for name in MODELS:
            for schedule in schedules:
                for case, tokens in zip(CASES, texts[name], strict=True):
                    assert next(found) == tokens, (rank, name, schedule, case)
                # With a cache the work per token does not grow with the length.
                again = sum(range(6, 6 + NEW_TOKENS))
                assert next(found) == [{6 + NEW_TOKENS - 1}, {again}], (rank, name, schedule)


class Noted(TextgenCallback):
    """Callback that records the generated texts."""

    def __init__(self) -> None:
        super().__init__(["ab", "hello"], max_new_tokens=6, do_sample=True, temperature=0.9)
        self.texts: list[list[str]] = []

    def generate(self, model: nn.Module, tokenizer: Any, trainer: Any) -> list[str]:
        self.texts.append(super().generate(model, tokenizer, trainer))
        return self.texts[-1]


def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def byte_llama() -> nn.Module:
    """Return a model with dropout, which reveals a generation that draws from the training generator."""
    return llama(4, vocab_size=len(tokenizer()), attention_dropout=0.1)


def texts_while_training(output_dir: str, trainer_class: type[Trainer], with_texts: bool) -> tuple[Any, Any]:
    callback = Noted()
    trainer = trainer_of(
        trainer_class,
        Path(output_dir),
        byte_llama,
        token_samples(16),
        *([callback] if with_texts else []),
        trainer_options={"eval_dataset": token_samples(4), "processing_class": tokenizer()},
        per_device_train_batch_size=4,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
    )
    output = trainer.train()
    return callback.texts, output.metrics["train_loss"]


def test_samples_during_training_agree_on_ranks_and_do_not_affect_it(tmp_path: Path) -> None:
    (first, loss), (second, _) = run_on_ranks(texts_while_training, 2, str(tmp_path / "with"), PipelineTrainer, True)
    assert first == second and len(first) == 2 and len(first[0]) == 2
    ((_, undisturbed), _) = run_on_ranks(texts_while_training, 2, str(tmp_path / "without"), PipelineTrainer, False)
    assert loss == undisturbed
