"""TextgenCallback: text generation from fixed prompts after each evaluation.

Invariant: training is not affected. Random generators and module modes are restored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from rich.text import Text
from torch import Tensor, nn

from forgather._terminal_text import printable
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import get_console
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState


class TokenizerT(Protocol):
    """Tokenizer methods that text generation needs of a `processing_class`."""

    def __call__(self, text: str, *, return_tensors: str) -> Mapping[str, Tensor]: ...

    def decode(self, token_ids: Tensor, *, skip_special_tokens: bool) -> str: ...


class TextgenCallback(TrainerCallback):
    """Callback that generates a continuation of each prompt after each evaluation, for the console and TensorBoard.

    Training is not affected: random generators and module modes are restored. Sampling depends only on `seed`, so that
    texts of different steps can be compared. `generation_kwargs` are passed to `model.generate`. If the trainer has
    `pipeline_generate(input_ids, **generation_kwargs)`, that is called instead.
    """

    changes_control = False
    needs_all_ranks = True
    """In a pipeline, either all ranks have this callback or none, because generation needs every stage."""

    def __init__(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        do_sample: bool = True,
        seed: int = 0,
        **generation_kwargs: Any,
    ) -> None:
        self._prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self._prompts:
            raise ValueError("TextgenCallback has no prompts. Pass at least one text for the model to continue.")
        self._options = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, **generation_kwargs}
        self._seed = seed

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        processing_class: TokenizerT | None,
        trainer: object,
        **kwargs: object,
    ) -> None:
        # Raise now if generation is impossible, not hours later at the first evaluation.
        _find_generate(_unwrapped(model, trainer), processing_class, trainer)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        processing_class: TokenizerT | None,
        trainer: object,
        **kwargs: object,
    ) -> None:
        # Runs on every rank, because a sharded model needs them all. The seed makes all ranks sample the same tokens.
        texts = self.generate(model, processing_class, trainer)
        if not state.is_world_process_zero:
            return
        _print_samples(state.global_step, self._prompts, texts)
        for recorder in _recorders(trainer):
            recorder.add_samples(state, self._prompts, texts)
        for writer in _text_writers(trainer):
            for number, (prompt, text) in enumerate(zip(self._prompts, texts, strict=True)):
                writer.add_text(args, state, f"samples/{number}", _as_markdown(prompt, text))

    def generate(self, model: nn.Module, tokenizer: TokenizerT | None, trainer: object) -> list[str]:
        """Return the continuation of each prompt, without the prompt."""
        unwrapped = _unwrapped(model, trainer)
        generate = _find_generate(unwrapped, tokenizer, trainer)
        assert tokenizer is not None
        texts = []
        # The length changes with every token, so layers that were compiled in place would recompile.
        eager = torch.compiler.set_stance("force_eager")
        with undisturbed_random_numbers(), set_train(unwrapped, False), torch.no_grad(), eager:
            for prompt in self._prompts:
                torch.manual_seed(self._seed)
                inputs = _encode(tokenizer, prompt, _device_of(unwrapped))
                output = generate(**inputs, **_padding(tokenizer), **self._options)
                continuation = output[0, inputs["input_ids"].shape[1] :]
                texts.append(tokenizer.decode(continuation, skip_special_tokens=True))
        return texts


def _find_generate(model: nn.Module, tokenizer: TokenizerT | None, trainer: object) -> Callable[..., Tensor]:
    if tokenizer is None:
        raise ValueError("TextgenCallback needs a tokenizer. Pass it to the trainer as processing_class.")
    generate: Callable[..., Tensor] | None = getattr(trainer, "pipeline_generate", None)
    generate = generate or getattr(model, "generate", None)
    if generate is None:
        raise ValueError(
            f"TextgenCallback cannot generate: {type(model).__name__} has no method generate. Use a model with "
            "transformers' GenerationMixin, or remove the callback."
        )
    return generate


def _unwrapped(model: nn.Module, trainer: object) -> nn.Module:
    unwrap: Callable[[], nn.Module] | None = getattr(trainer, "unwrapped_model", None)
    return model if unwrap is None else unwrap()


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _encode(tokenizer: TokenizerT, prompt: str, device: torch.device) -> dict[str, Tensor]:
    encoded = tokenizer(prompt, return_tensors="pt")
    # Some tokenizers return entries that generate rejects, such as token_type_ids.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask") if name in encoded}


def _padding(tokenizer: TokenizerT) -> dict[str, int]:
    """Return a pad_token_id for generate, if the tokenizer has one or an end-of-sequence token."""
    # Without it, generate warns for every prompt, although a single prompt needs no padding.
    for name in ("pad_token_id", "eos_token_id"):
        if isinstance(getattr(tokenizer, name, None), int):
            return {"pad_token_id": getattr(tokenizer, name)}
    return {}


def _text_writers(trainer: object) -> list[Any]:
    """Return the trainer's callbacks that can write texts, such as TBLogger."""
    return [callback for callback in getattr(trainer, "callbacks", []) if hasattr(callback, "add_text")]


def _recorders(trainer: object) -> list[Any]:
    """Return the trainer's callbacks that record samples, such as RunRecorder."""
    return [callback for callback in getattr(trainer, "callbacks", []) if hasattr(callback, "add_samples")]


def _print_samples(step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
    console = get_console()
    console.print(Text(f"samples at step {step}", style="bold"), soft_wrap=True)
    for prompt, text in zip(prompts, texts, strict=True):
        sample = Text("  ") + Text(printable(prompt), style="cyan") + Text(printable(text))
        console.print(Text("\n  ").join(sample.split("\n")), soft_wrap=True)


def _as_markdown(prompt: str, text: str) -> str:
    indented = "\n".join(f"    {line}" for line in (prompt + text).splitlines())
    return f"**{prompt}**\n\n{indented}"
