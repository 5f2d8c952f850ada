"""Internals: attributes and helpers of `transformers.Trainer` that its own method bodies use.

People override a method by copying its body from transformers and changing a line. The names in such a body must exist
here, with the meaning that fits Forgather's engines. `Trainer` of this package inherits them.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import TrainerMemoryTracker

from forgather.hf import data
from forgather.hf.engine.label_rules import shifts_labels
from forgather.hf.engine.num_items import NumItems, Use
from forgather.hf.engine_objects import EngineObjects
from forgather.ml.trainer.samples.columns import UsedColumnsCollator
from forgather.ml.utils import unwrap_model

if TYPE_CHECKING:
    from forgather.hf.accelerator_shim import AcceleratorShim


class Internals(EngineObjects):
    """Names that copied method bodies read. Overriding the methods has no effect, and is refused."""

    is_deepspeed_enabled = False
    is_fsdp_xla_enabled = False
    is_fsdp_xla_v1_enabled = False
    is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = False
    is_model_parallel = False
    place_model_on_device = True
    deepspeed: Any = None
    hp_search_backend: Any = None
    neftune_noise_alpha: float | None = None
    args: Any
    accelerator: "AcceleratorShim"
    _strategy: str

    @property
    def is_fsdp_enabled(self) -> bool:
        return self._strategy == "fsdp2"

    @functools.cached_property
    def _memory_tracker(self) -> TrainerMemoryTracker:
        return TrainerMemoryTracker(self.args.skip_memory_metrics)

    @functools.cached_property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model takes `num_items_in_batch`. Scripts may set it; the loss does not depend on it here."""
        model = unwrap_model(self.model)
        told: bool | None = getattr(model, "accepts_loss_kwargs", None)
        if told is not None:
            return told
        parameters = inspect.signature(model.forward).parameters.values()
        return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    @functools.cached_property
    def gather_function(self) -> Callable[..., Any]:
        return self.accelerator.gather_for_metrics

    @property
    def _loss_shifts_labels(self) -> bool:
        return shifts_labels(self.model)

    @property
    def _train_batch_size(self) -> int:
        return int(self.args.train_batch_size)

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Number of micro-batches of the current step: fewer than `gradient_accumulation_steps` at the end of an epoch."""
        window = self.engine.window
        return int(self.args.gradient_accumulation_steps) if window is None else len(window)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return an empty context and the inputs: no strategy divides sequences."""
        return contextlib.nullcontext, inputs

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the model: the strategy has wrapped it."""
        return model

    def _get_num_items_in_batch(self, batch_samples: Sequence[dict[str, Any]], device: Any) -> NumItems | None:
        """Return the number of targets of these batches; None without labels."""
        counted = [batch["labels"] for batch in batch_samples if batch.get("labels") is not None]
        if not counted:
            return None
        loss = self.engine.evaluator.loss
        return NumItems.of(sum(int(loss.count(one, {"labels": one})) for one in counted), device, Use())

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return a loader of a dataset without its unused columns; the engine divides its batches between ranks."""
        trainer: Any = self
        if not is_training and batch_size == self.args.eval_batch_size:
            return data.eval_loader(trainer, dataset)
        return data.plain_loader(trainer, dataset, batch_size, None if sampler_fn is None else sampler_fn(dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler | None:
        """Return a sampler in the order of the dataset; None for data without a length."""
        return SequentialSampler(eval_dataset) if hasattr(eval_dataset, "__len__") else None

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return self.engine.columns.of(dataset)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        names = self.engine.columns.names
        return data_collator if names is None else UsedColumnsCollator(data_collator, names)

    def get_tp_size(self) -> int:
        return 1

    def get_cp_size(self) -> int:
        return 1

    def get_sp_size(self) -> int:
        return 1
