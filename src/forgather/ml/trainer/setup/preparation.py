"""Building blocks of trainer preparation: device, loaders, torch.compile options, optimizer and parameter groups.

Each is a function of the arguments and the caller's objects, without access to the trainer. `Trainer` and `phases` call
them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forgather._lazy import import_quickly
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.distributed import DistributedEnvInterface
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.elastic.global_batch import shares_of_part
from forgather.ml.trainer.elastic.step_shares import StepShares
from forgather.ml.trainer.loading.builders import build_eval_loader, build_train_loader
from forgather.ml.trainer.loading.copy_streams import can_pin
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.ranks.parallel_loading import BuildLoader
from forgather.ml.trainer.samples.length_groups import SampleLengths
from forgather.ml.trainer.samples.skipped import SkippedData
from forgather.ml.trainer.setup.devices import choose_device, device_type, require_device
from forgather.ml.trainer.setup.layers import compile_layers
from forgather.ml.trainer.setup.optimizer_construction import (
    build_optimizer,
    group_weight_decay,
    optimizer_factory,
    undecayed_names,
)
from forgather.ml.trainer.setup.requirements import Given
from forgather.ml.trainer.setup.torch_settings import activation_budget, torch_settings
from forgather.ml.trainer.trainer_types import BaseDataset, DataCollatorT, OptimizerFactoryT, OptimizerT
from forgather.ml.utils import unwrap_model


@contextlib.contextmanager
def run_settings(args: TrainingArguments) -> Iterator[contextlib.ExitStack]:
    """Apply the torch settings of a run; the stack accepts further contexts after preparation."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_settings(args))
        stack.enter_context(activation_budget(args.activation_memory_budget))
        yield stack


def find_device(args: TrainingArguments, env: DistributedEnvInterface) -> torch.device:
    """Return the device of this process from arguments and environment."""
    if not args.use_cpu:
        require_device(args.device)
    return choose_device(args.device, device_type(args), env)


def use_device(device: torch.device) -> None:
    if device.index is not None and torch.accelerator.device_count() > 1:
        # Memory statistics and kernels of other packages use the current device.
        torch.accelerator.set_device_index(device.index)


def use_precision(args: TrainingArguments) -> None:
    """Apply the torch precision and compiler settings, which are global to the process."""
    if args.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(args.float32_matmul_precision)
    if args.dynamo_recompile_limit is not None:
        # Imported on demand: importing torch._dynamo is slow.
        from torch._dynamo import config as dynamo_config

        dynamo_config.recompile_limit = args.dynamo_recompile_limit


def loader_builder(
    args: TrainingArguments,
    dataset: BaseDataset,
    batch_size: int,
    collator: DataCollatorT | None,
    device: torch.device,
    seed: int | None,
    shares: StepShares | None = None,
    lengths: SampleLengths | None = None,
    skipped: SkippedData | None = None,
) -> BuildLoader:
    """Return a function that builds the loader of one part of a dataset: for training with a `seed`, else evaluation."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collator,
        "drop_last": args.dataloader_drop_last,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and can_pin(device),
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }

    def build(part: Part) -> Iterable[Any]:
        if seed is None:
            return build_eval_loader(dataset, part=part, **options)
        return build_train_loader(
            dataset,
            seed=seed,
            shuffle=args.shuffles,
            lengths=lengths,
            skipped=skipped,
            set_dataset_epoch=args.set_dataset_epoch,
            part=part,
            shares=None if shares is None else shares_of_part(shares, part),
            **options,
        )

    return build


def compile_options(args: TrainingArguments) -> dict[str, Any]:
    return {
        "backend": args.torch_compile_backend or "inductor",
        "mode": args.torch_compile_mode,
        "dynamic": args.torch_compile_dynamic,
        "fullgraph": args.torch_compile_full_graph,
    }


def compiled(model: nn.Module, args: TrainingArguments) -> nn.Module:
    """Return the compiled model, or the model itself with compiled layers, as `torch_compile_scope` requests."""
    if args.torch_compile_scope == "layer":
        compile_layers(unwrap_model(model), compile_options(args))
        return model
    # The wrapper adds a prefix to FQNs, which `unwrap_model` removes for checkpoints.
    whole: Any = torch.compile(model, **compile_options(args))
    return whole  # type: ignore[no-any-return]


def make_optimizer(
    args: TrainingArguments,
    given: Given,
    factory: OptimizerFactoryT | None,
    groups: Mapping[str, Any] | None,
    named: Sequence[tuple[str, nn.Parameter]],
    names_elsewhere: Sequence[str],
) -> OptimizerT:
    """Return the given optimizer, or build one from the factory, the class or the arguments."""
    if given.optimizer is not None:
        return given.optimizer
    # The first optimizer of a process imports it, which takes half of the time to the first step.
    import_quickly("torch._dynamo")
    make = optimizer_factory(args, factory, given.optimizer_cls_and_kwargs)
    return build_optimizer(named, make, groups, args.debug_optimizer_groups, names_elsewhere)


def decay_groups(
    args: TrainingArguments,
    optimizer: OptimizerT,
    whole_model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    names_elsewhere: Sequence[str],
    stored: Callable[[], str | None],
) -> str:
    """Move parameters without weight decay into a separate group; `stored` returns the value in the checkpoint."""
    # Use the full model, not the stage of this rank: all ranks must make the same groups.
    undecayed = undecayed_names(whole_model)
    trainable = [name for name, parameter in named if parameter.requires_grad]
    has_decayed = any(name not in undecayed for name in (*trainable, *names_elsewhere))
    return group_weight_decay(optimizer, named, undecayed, has_decayed, args.weight_decay_groups, stored())


def loads_component(args: TrainingArguments, key: str) -> bool:
    """Return whether a resume loads this component from the checkpoint."""
    chosen = args.checkpoint_components
    return (chosen is None or key in chosen) and key not in args.skip_checkpoint_components


def stored_decay_groups(args: TrainingArguments, claim: CheckpointManager | None, path: str | None) -> str | None:
    # The groups matter only if the state of the optimizer or of the schedule is loaded into them.
    if path is None or claim is None or not (loads_component(args, "optimizer") or loads_component(args, "scheduler")):
        return None
    return claim.stored_weight_decay_groups(path)
