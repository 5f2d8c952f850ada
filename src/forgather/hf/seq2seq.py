"""Seq2SeqTrainer: evaluation and prediction with generated tokens (`predict_with_generate`).

The generation options come from the call, else from the arguments, else from the generation config of the model.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import PredictionOutput

from forgather.hf.engine.strategies import PIPELINES
from forgather.hf.trainer import Inputs, Trainer


class Seq2SeqTrainer(Trainer):
    """Trainer with the evaluation of `transformers.Seq2SeqTrainer`."""

    def __init__(self, *values: Any, **keywords: Any) -> None:
        super().__init__(*values, **keywords)
        self._gen_kwargs: dict[str, Any] = {}
        config = getattr(self.args, "generation_config", None)
        if config is not None:
            self.model.generation_config = self.load_generation_config(config)

    def _set_evaluation_defaults(self) -> None:
        super()._set_evaluation_defaults()
        if self._strategy in PIPELINES and getattr(self.args, "predict_with_generate", False):
            raise ValueError(
                f"predict_with_generate=True cannot be used with fg_strategy={self._strategy!r}: a rank has only its own "
                "stages, and generation needs the complete model. Leave it False, and generate from the saved model."
            )

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Return a generation config: a copy of the given one, or one from a file, a directory or a model name."""
        if isinstance(gen_config_arg, transformers.GenerationConfig):
            config = copy.deepcopy(gen_config_arg)
        elif (path := Path(gen_config_arg)).is_file():
            config = transformers.GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = transformers.GenerationConfig.from_pretrained(str(gen_config_arg))
        # Saving the model would raise the same errors at the end of training.
        config.validate(strict=True)
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        self._gen_kwargs = self._generation_options(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        self._gen_kwargs = self._generation_options(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return the loss, the generated tokens and the labels, both padded to the longest possible output."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        tokens = self._generated(inputs, gen_kwargs or self._gen_kwargs)
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        longest = self._longest_output()
        return loss, self._padded(tokens, longest), None if labels is None else self._padded(labels, longest)

    def _generation_options(self, given: dict[str, Any]) -> dict[str, Any]:
        options = dict(given)
        if options.get("max_length") is None and options.get("max_new_tokens") is None:
            options["max_length"] = self.args.generation_max_length
        if options.get("num_beams") is None:
            options["num_beams"] = self.args.generation_num_beams
        return {name: value for name, value in options.items() if value is not None}

    def _generated(self, inputs: Inputs, options: dict[str, Any]) -> Tensor:
        """Return generated tokens. Decoder inputs that were made from the labels are left out."""
        labels, decoder = inputs.get("labels"), inputs.get("decoder_input_ids")
        made_from_labels = labels is not None and decoder is not None and labels.shape == decoder.shape
        left_out = ("decoder_input_ids", "decoder_attention_mask") if made_from_labels else ()
        kept = {name: value for name, value in inputs.items() if name not in left_out}
        # Shards are gathered by a forward pass, so every rank must take part until the longest output is complete.
        options = {"synced_gpus": self._strategy == "fsdp2", **options}
        with torch.no_grad():
            tokens: Tensor = self.model.generate(**kept, **options)
        return tokens

    def _longest_output(self) -> int:
        config = self.model.generation_config
        longest = self._gen_kwargs.get("max_length") or config.max_length
        new = self._gen_kwargs.get("max_new_tokens") or config.max_new_tokens
        if longest is None:
            longest = 0 if new is None else new + 1
        return int(longest)

    def _padded(self, tensor: Tensor, longest: int) -> Tensor:
        if tensor.shape[-1] >= longest:
            return tensor
        filling = tensor.new_full((*tensor.shape[:-1], longest - tensor.shape[-1]), self._pad_token())
        return torch.cat((tensor, filling), -1)

    def _pad_token(self) -> int:
        candidates = (self.processing_class, self.processing_class, getattr(self.model, "config", None))
        names = ("pad_token_id", "eos_token_id", "pad_token_id")
        found = (getattr(owner, name, None) for owner, name in zip(candidates, names, strict=True))
        token = next((one for one in found if one is not None), None)
        if token is None:
            raise ValueError(
                "Generated tokens cannot be padded: set pad_token_id in the tokenizer or the model's config."
            )
        return int(token)
