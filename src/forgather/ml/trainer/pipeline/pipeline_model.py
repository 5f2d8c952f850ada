"""PipelineModel: a model in stages, split on the meta device; each rank allocates and fills its own stages.

Stages keep the FQNs of the full model, so that checkpoints do not depend on the layout. `StageSetup` builds the object;
`PipelineTrainer` and `StageRunner` use it.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.weights.module_weights import (
    ShardIndex,
    create_sharing_metadata,
    load_into_modules,
    locate_weights,
    make_shard_index,
)
from forgather.ml.construct import torch_dtype
from forgather.ml.trainer.pipeline.model_splitter import Split, Stage
from forgather.ml.trainer.pipeline.pipeline_batches import Meta, PipelineBatch, padded_batch
from forgather.ml.trainer.pipeline.pipeline_utils import (
    assert_no_duplicate_fqns,
    require_all_fqns,
    tensors_of,
)
from forgather.ml.trainer.pipeline.splitters.example_batch import main_input_of
from forgather.ml.trainer.pipeline.splitters.stage_building import RankModel, materialise, stream_values
from forgather.ml.trainer.pipeline.tied_weights import canonical_names
from forgather.ml.trainer.setup.devices import moved
from forgather.ml.trainer.setup.model_construction import build_model, compute_missing_buffers
from forgather.ml.trainer.step_loss.known_masks import to_device
from forgather.ml.utils import count_parameters, default_dtype

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PipelineModel:
    """The full model without memory, and the allocated stages of this rank.

    `whole` is on the meta device, except for the stages of this rank. `rank` is the rank within the pipeline.
    """

    def __init__(
        self,
        whole: nn.Module,
        split: Callable[[nn.Module], Split],
        stage_indices: Sequence[tuple[int, ...]],
        device: torch.device,
        rank: int,
        group: ProcessGroup,
    ) -> None:
        """Divide `whole` into stages with `split`, check the stages, and allocate the stages of `rank`."""
        self.whole = whole
        self.device = device
        self.group = group
        self.stage_indices = stage_indices
        self._main_input = main_input_of(whole)
        # Read before `materialise`, which replaces tensors: tied names on different ranks then differ.
        self.sharing = create_sharing_metadata(whole)
        self.parameter_stats = count_parameters(whole)
        self.modules, _, stages, self.make_mask = split(whole)
        assert_no_duplicate_fqns(self.modules)
        require_all_fqns(whole, self.modules, self.sharing)
        self.stages: list[Stage] = sorted(stages, key=lambda stage: stage.stage_index)
        self.own = {index: self.modules[index] for index in stage_indices[rank]}
        self.names_of_ranks = [
            [name for index in indices for name in tensors_of(self.modules[index])] for indices in stage_indices
        ]
        # Computed from meta tensors of all stages, so it is equal on all ranks without communication.
        self.shard_index = self._shard_index()
        materialise(self.own.values(), device)
        self.part = RankModel(list(self.own.values()), whole)
        self.running: dict[int, nn.Module] = dict(self.own)
        """Modules that run this rank's stages: compiled, or without the head. Generation and saves use `own`."""

    @property
    def own_modules(self) -> nn.ModuleList:
        return nn.ModuleList(self.own.values())

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether stages were traced and accept only one batch shape."""
        return any(getattr(stage, "fixed_shapes", False) for stage in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.modules)

    @property
    def stage_ranks(self) -> list[int]:
        """Rank within the pipeline that holds each stage, by stage index."""
        ranks = {index: rank for rank, indices in enumerate(self.stage_indices) for index in indices}
        return [ranks[index] for index in range(self.num_stages)]

    @property
    def has_first(self) -> bool:
        return 0 in self.own

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.own

    @property
    def all_can_cache(self) -> bool:
        """Whether every stage, on all ranks, supports a KV cache."""
        return all(getattr(module, "can_cache", hasattr(module, "make_cache")) for module in self.modules)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters; tied weights have the name that the full model lists."""
        canonical = canonical_names(self.sharing)
        return [(canonical.get(name, name), parameter) for name, parameter in self.part.named_parameters()]

    def names_elsewhere(self) -> list[str]:
        """Return the names of trainable parameters that only other ranks hold."""
        here = {name for name, _ in self.named_parameters()}
        whole = self.whole.named_parameters()
        return [name for name, parameter in whole if parameter.requires_grad and name not in here]

    def load_weights(self, path: str) -> None:
        """Load this rank's part from a checkpoint or an exported model."""
        # The names of the full model are needed to tell weights of other stages from unexpected weights.
        load_into_modules(locate_weights(path), [self.part], True, self.whole.state_dict(keep_vars=True).keys())

    def boundary(self, main_input: Tensor) -> Meta | None:
        """Return shape and dtype of the tensor between stages if all stages know it without running, else None."""
        # All stages must agree: a receiver allocates by this answer, without a header from the sender.
        known = [getattr(module, "boundary", lambda _: None)(main_input) for module in self.modules]
        return None if not known or known[0] is None or len(set(known)) > 1 else Meta(*known[0])

    def fill_from(self, source: nn.Module | None) -> None:
        """Receive values from the full model `source`, which only the first rank of the pipeline has; collective."""
        stream_values(source, list(self.own.values()), self.names_of_ranks, self.group)

    def check_source(self, source: nn.Module) -> None:
        """Raise ValueError unless `source` has the same tensors as the model that was split."""
        # Receivers have allocated their tensors by the split model, so shapes and dtypes must match.
        expected = {name: tensor for module in self.modules for name, tensor in tensors_of(module).items()}
        given = tensors_of(source)
        for name, tensor in expected.items():
            found = Meta.of(given[name]) if name in given else None
            if found != Meta.of(tensor):
                raise ValueError(
                    f"model_init built two different models: {name!r} is {found} in the model with values, but "
                    f"{Meta.of(tensor)} in the model on the meta device. It must build the same model in every call. Set "
                    "default_dtype instead of converting the model inside model_init."
                )

    def batch(self, inputs: Mapping[str, Any], labels: Tensor | None, num_rows: int) -> PipelineBatch:
        """Return a batch padded to a multiple of `num_rows`; tensors that this rank's stages read are on its device."""
        main_input = self._main_input
        main, keywords, labels = padded_batch(inputs, labels, main_input, num_rows)
        if self.make_mask is not None:
            mask = self.make_mask(**{main_input: main, **keywords})
            keywords = {**keywords, "attention_mask": mask} if mask is not None else keywords
        # Only the first stage reads the main input, and only the last stage reads the labels. Other stages need just
        # the shape of the input.
        if self.has_first:
            main = moved(main, self.device)
        if labels is not None and self.has_last:
            labels = moved(labels, self.device)
        return PipelineBatch(main, to_device(keywords, self.device), labels)

    def micro_batches(self, inputs: Mapping[str, Any], labels: Tensor | None, size: int) -> list[PipelineBatch]:
        """Return the batch in micro-batches of `size` rows."""
        batch = self.batch(inputs, labels, size)
        return batch.micro_batches(batch.num_rows // size)

    def compile(self, compiled: Callable[[nn.Module], nn.Module]) -> None:
        """Compile each stage separately."""
        self.running = {index: compiled(module) for index, module in self.running.items()}

    def _shard_index(self) -> ShardIndex:
        states = [
            {
                name: tensor
                for index in indices
                for name, tensor in self.modules[index].state_dict(keep_vars=True).items()
            }
            for indices in self.stage_indices
        ]
        return make_shard_index(states, safetensors=True, param_sharing_metadata=self.sharing)

    def log_stages(self) -> None:
        for index, module in enumerate(self.modules):
            parts = [name or type(module).__name__ for name, part in module.named_modules() if _holds_tensors(part)]
            logger.info("stage %d of %d: %s", index, self.num_stages, ", ".join(parts))

    def log_parameters(self) -> None:
        for name, parameter in self.part.named_parameters():
            logger.info("%s %s %s", name, tuple(parameter.shape), parameter.dtype)


class StageFact(Generic[T]):
    """Trainer attribute that reads from `pipeline`; None before the pipeline is built."""

    def __init__(self, read: Callable[[PipelineModel], T]) -> None:
        self._read = read

    def __get__(self, trainer: object, owner: type) -> T | None:
        pipeline = getattr(trainer, "pipeline", None)
        return None if pipeline is None else self._read(pipeline)


def _holds_tensors(module: nn.Module) -> bool:
    return bool(module._parameters or module._buffers)


def model_without_memory(model_init: Callable[[], nn.Module], dtype: str | None) -> nn.Module:
    """Build the model on the meta device; raise ValueError if a tensor has memory."""
    with contextlib.ExitStack() as context:
        context.enter_context(default_dtype(None if dtype is None else torch_dtype(dtype)))
        context.enter_context(pretrained_without_weights())
        context.enter_context(torch.device("meta"))
        model = model_init()
    real = next((name for name, tensor in tensors_of(model).items() if not tensor.is_meta), None)
    if real is not None:
        raise ValueError(
            f"model_init must build a new model on the default device in every call: {real!r} is on "
            f"{tensors_of(model)[real].device}, though the default device is meta. Build the model inside "
            "model_init, from a configuration (weights are loaded from checkpoints), and leave devices to the trainer."
        )
    return model


def fill_missing_buffers(module: nn.Module, model_init: Callable[[], nn.Module], dtype: str | None) -> None:
    """Compute buffers of a partial model that no checkpoint holds, such as rotary frequencies."""
    with pretrained_without_weights(), default_dtype(None if dtype is None else torch_dtype(dtype)):
        compute_missing_buffers(module, model_init)


@contextlib.contextmanager
def pretrained_without_weights() -> Iterator[None]:
    """Patch `from_pretrained` of transformers to build models from their configuration, without reading weights."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        yield
        return
    model_class = transformers.PreTrainedModel
    # Taken from the class dictionary: attribute access would bind the class method, and restoring it would break
    # subclasses.
    original = vars(model_class)["from_pretrained"]

    def from_configuration(cls: Any, path: Any, *args: Any, config: Any = None, **options: Any) -> nn.Module:
        if config is None:
            config, options = cls.config_class.from_pretrained(path, return_unused_kwargs=True, **options)
        # As in from_pretrained: "auto" is the default, and torch_dtype is the older name of the option.
        dtype = options.get("dtype", options.get("torch_dtype", "auto"))
        dtype = getattr(config, "dtype", None) if dtype == "auto" else dtype
        attention = {name: options[name] for name in ("attn_implementation",) if name in options}
        model: Any = cls._from_config(config, dtype=dtype, **attention)
        # from_pretrained reads this file too, and generation takes its eos and pad tokens from it.
        if os.path.exists(os.path.join(str(path), "generation_config.json")):
            model.generation_config = type(model.generation_config).from_pretrained(path)
        built: nn.Module = model
        return built

    model_class.from_pretrained = classmethod(from_configuration)  # type: ignore[arg-type]
    try:
        yield
    finally:
        model_class.from_pretrained = original


def whole_model(
    model_init: Callable[[], nn.Module], device: torch.device, construct_on: str, dtype: str | None
) -> nn.Module:
    """Build the full model with its initial values, on the CPU unless `construct_on` is "device"."""
    on_device = construct_on == "device"
    return build_model(
        model_init, device if on_device else torch.device("cpu"), "device" if on_device else "default", dtype, False
    )
