"""Arguments of FSDP2 training: options of fully_shard, HSDP, mixed precision of the shards, and batch dispatch.

Combinations that cannot work raise ValueError when the arguments are created. `FSDP2Trainer` takes them.
"""

from dataclasses import dataclass, field

from forgather.ml.optim.named_optimizers import WHOLE_PARAMETERS
from forgather.ml.trainer.arguments.checks import check_shards
from forgather.ml.trainer.arguments.training_arguments import ArgumentGroup, TrainingArguments

_SHORT_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_DTYPES = (None, "float32", "bfloat16")


@dataclass(kw_only=True)
class FSDP2Arguments(ArgumentGroup):
    """Options of torch's fully_shard."""

    reshard_after_forward: bool | int = True
    """Free the gathered weights of a layer after its forward pass, and gather them again in backward. False keeps them.
    A number keeps them divided over that many ranks, such as the GPUs of a node."""
    param_dtype: str | None = None
    """Dtype of gathered weights and of compute, such as "bfloat16". None: from mixed_precision, else the dtype of the model.
    Shards, and so the weights that the optimizer updates, keep the dtype of the model."""
    reduce_dtype: str | None = None
    """Dtype of the gradient reduction. None: float32 if param_dtype is set, else the dtype of the gradients."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    shard_transformer_layers: bool = True
    """Gather the weights of one layer at a time. False: gather the whole model at once."""
    transformer_layers_path: str | None = None
    """Name of the module list with the layers, such as "model.layers". None: found automatically."""
    find_unused_parameters: bool = False
    """Required if ranks use different parameters of a layer, such as experts. Costs one small message per step."""
    replicate_size: int = 1
    """HSDP: number of replicas of the sharded model. Ranks = replicate_size x shards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.param_dtype = _dtype("param_dtype", self.param_dtype)
        self.reduce_dtype = _dtype("reduce_dtype", self.reduce_dtype)
        for name, least in (("replicate_size", 1), ("reshard_after_forward", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} cannot be used: it must be {least} or more.")
        if self.transformer_layers_path is not None and not self.shard_transformer_layers:
            raise ValueError(
                f"transformer_layers_path={self.transformer_layers_path!r} has no effect with "
                "shard_transformer_layers=False. Remove one of the two."
            )


def _dtype(name: str, value: str | None) -> str | None:
    """Return the full name of a dtype; raise ValueError for a dtype that cannot be used."""
    full_name = _SHORT_NAMES.get(value or "", value)
    if full_name in _DTYPES:
        return full_name
    reason = " Gradients in float16 need a loss scale, which FSDP2 does not have." if full_name == "float16" else ""
    raise ValueError(f"{name}={value!r} cannot be used: choose one of {', '.join(map(repr, _DTYPES))}.{reason}")


@dataclass(kw_only=True)
class FSDP2TrainingArguments(TrainingArguments):
    """Training arguments plus batch dispatch and the options of fully_shard."""

    dispatch_batches: bool = True
    """True: rank 0 reads the data for all ranks. False: every rank reads its own shard."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation; None: equal to dispatch_batches."""
    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.data_is_sharded, self.dispatch_batches and self.dispatch_eval_batches is not False)
        for setting, reason in self._refused():
            raise ValueError(f"{setting} cannot be combined with FSDP2: {reason}")

    def _refused(self) -> list[tuple[str, str]]:
        """Return the settings that cannot work, with the reason and a remedy."""
        found = []
        if self.fuse_optim_with_backward:
            found.append(
                (
                    "fuse_optim_with_backward=True",
                    "a parameter would be updated before its gradient is reduced over the ranks. Turn it off.",
                )
            )
        if self.param_precision != "fp32":
            found.append(
                (
                    f"param_precision={self.param_precision!r}",
                    "shards already are the precise weights. Set mixed_precision='bf16' instead: weights are gathered and "
                    "used in bfloat16, and updated in the dtype of the model.",
                )
            )
        if self.mixed_precision == "fp16":
            found.append(
                (
                    "mixed_precision='fp16'",
                    "each rank scales and checks only its shard of the gradients. Use 'bf16', or DDPTrainer.",
                )
            )
        if self.mixed_precision == "bf16" and self.fsdp2.param_dtype not in (None, "bfloat16"):
            found.append(
                (
                    f"mixed_precision='bf16' and fsdp2.param_dtype={self.fsdp2.param_dtype!r}",
                    "both set the dtype of compute, and they contradict each other. Remove one of them.",
                )
            )
        if self.optim in WHOLE_PARAMETERS:
            found.append((f"optim={self.optim!r}", WHOLE_PARAMETERS[self.optim]))
        if self.construct_model_on != "default":
            found.append(
                (
                    f"construct_model_on={self.construct_model_on!r}",
                    "the model is always built without memory and initialised shard by shard. Remove the setting.",
                )
            )
        if self.save_on_each_node:
            found.append(
                (
                    "save_on_each_node=True",
                    "each rank needs the files of all ranks to resume. Turn it off, and use one output_dir for all nodes.",
                )
            )
        return found

    @property
    def compute_dtype(self) -> str | None:
        """Dtype of gathered weights and of compute; None for the dtype of the model."""
        return self.fsdp2.param_dtype or ("bfloat16" if self.mixed_precision == "bf16" else None)

    @property
    def reduce_dtype(self) -> str | None:
        return self.fsdp2.reduce_dtype or ("float32" if self.compute_dtype is not None else None)
