"""Checks across ranks: a trainer that supports several processes, and equal settings on all of them.

Different settings would send ranks into different collectives and deadlock. Ranks gather a digest of their settings when
training or evaluation begins, and exchange the settings only if the digests differ. `prepare_ranks` calls it.
"""

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from forgather.ml.distributed import DistributedEnvInterface, Peers, get_world_size
from forgather.ml.distributed.launch_variables import check_launch_variables
from forgather.ml.trainer.loading.builders import kind_of

MAY_DIFFER = {
    "device": "every rank has its own device",
    "logging_dir": "may be local to the node, and contains the time and the host name",
    "run_name": "a label; only ranks that report to a service use it",
    "report_to": "as run_name",
    "disable_tqdm": "display of one rank",
    "dataloader_num_workers": "affects only how a rank reads; with dispatch_batches only rank 0 reads",
    "dataloader_pin_memory": "as dataloader_num_workers",
    "dataloader_persistent_workers": "as dataloader_num_workers",
    "dataloader_prefetch_factor": "as dataloader_num_workers",
    "watch": "affects only when a rank that hangs is reported",
    "gc_threshold": "affects only the cache of a rank's device",
    "detect_anomaly": "checks only the backward pass of a rank, for debugging",
    "debug_optimizer_groups": "log messages of one rank",
    "debug_pipeline": "log messages of one rank",
    "debug_split_model": "log messages of one rank",
    "debug_model_params": "log messages of one rank",
    "debug_model_init": "log messages of one rank",
}
"""Arguments that may differ between ranks, with the reason.

These are not compared either: fields added by a user's subclass, because their meaning is unknown; callbacks, which may
exist on some ranks only; lengths of datasets, because the loaders agree on the shortest.
"""

_MOST_LINES = 20


_HOOKS_OF_STRATEGIES = ("_init_distributed", "_wrap")


def require_strategy_for_ranks(trainer_class: type, given: DistributedEnvInterface | None) -> None:
    """Raise ValueError if several processes would each train a separate model."""
    if given is None:
        check_launch_variables()
    num_ranks, source = (get_world_size(), "WORLD_SIZE") if given is None else (given.world_size, "distributed_env")
    if num_ranks == 1 and dist.is_available() and dist.is_initialized():
        # Checkpoints are coordinated between all ranks of torch.distributed, even if the environment reports one rank.
        num_ranks, source = dist.get_world_size(), "torch.distributed"
    if num_ranks == 1 or handles_ranks(trainer_class):
        return
    raise ValueError(
        f"{trainer_class.__name__} trains on one device, but this process is one of {num_ranks} ({source}): each would "
        "train a separate model on the same data and write to the same output directory. Use a trainer that divides the work "
        "between ranks: DDPTrainer or AccelTrainer if the model fits on one device, else FSDP2Trainer, PipelineTrainer or "
        "HybridTrainer. Or start one process, without torchrun. To train in this process only, such as in a subprocess of a "
        "rank, unset RANK and WORLD_SIZE, or pass distributed_env=StaticDistributedEnvironment(). A subclass that "
        "synchronises the models "
        "of its ranks itself sets handles_ranks = True."
    )


def handles_ranks(trainer_class: type) -> bool:
    """Return whether a trainer class supports several ranks: it declares so, or overrides a hook for set-up of ranks."""
    hooks = (getattr(trainer_class, name) for name in _HOOKS_OF_STRATEGIES)
    overrides = any(not hook.__module__.startswith("forgather.") for hook in hooks)
    return bool(getattr(trainer_class, "handles_ranks", False)) or overrides


def common_settings(
    trainer_class: type,
    args: object,
    resume: bool | str | None,
    optimizer_groups: Mapping[str, Any] | None,
    objects: Mapping[str, object],
    stream: object,
) -> dict[str, str]:
    """Return the settings that decide which collectives a trainer reaches, as text by name.

    `resume` is None for an evaluation without training. For `objects`, only their presence is compared. `stream` is the
    training dataset if every rank reads its own data, since its kind decides whether ranks compare their first batches.
    """
    settings = {
        **argument_settings(args),
        "class of the trainer": trainer_class.__qualname__,
        "prepared for": "evaluation" if resume is None else "training",
        # Ranks must agree on this before they resolve it to a checkpoint.
        "resume_from_checkpoint": "None" if resume is None else resume_setting(resume),
        "optimizer_groups": described(list(optimizer_groups or ())),
    }
    settings.update({name: "None" if value is None else "given" for name, value in objects.items()})
    if stream is not None:
        settings["kind of train_dataset"] = _kind(stream)
    return settings


def _kind(dataset: object) -> str:
    try:
        return kind_of(dataset)
    except ValueError:
        # The loader reports the error later, on all ranks.
        return "unknown"


def argument_settings(args: object) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks, as text by name; nested fields as `group.name`."""
    settings: dict[str, str] = {}
    # Only fields that Forgather's classes define; a user's subclass may add fields that differ on purpose.
    own_names = {
        field.name
        for cls in type(args).__mro__
        if dataclasses.is_dataclass(cls) and cls.__module__.startswith("forgather.")
        for field in dataclasses.fields(cls)
    }
    # train(resume_from_checkpoint=...) overrides the argument, so `common_settings` compares the effective value.
    for name in sorted(own_names - MAY_DIFFER.keys() - {"resume_from_checkpoint"}):
        value = getattr(args, name)
        if dataclasses.is_dataclass(value):
            fields = (field.name for field in dataclasses.fields(value))
            settings.update({f"{name}.{inner}": described(getattr(value, inner)) for inner in fields})
        else:
            settings[name] = described(value)
    if getattr(args, "save_on_each_node", False):
        # Nodes have local storage, possibly under different paths.
        settings.pop("output_dir", None)
    return settings


def resume_setting(resume: bool | str) -> str:
    """Return the `resume_from_checkpoint` setting as text; a path as its last component."""
    # The folder may be mounted under another path on another node.
    return described(resume) if isinstance(resume, bool) else os.path.basename(os.path.normpath(resume))


def described(value: object) -> str:
    """Return text that is equal on all ranks if and only if the value is; objects are described by their type."""
    # The repr of an object may contain a memory address.
    if value is None or isinstance(value, (bool, int, float, str, enum.Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(inner)}" for key, inner in sorted(value.items(), key=str)) + "}"
    if isinstance(value, (list, tuple)):
        # Some tuples become lists when they are converted, so both have the same text.
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def require_equal_settings(peers: Peers, settings: Mapping[str, str]) -> None:
    """Raise the same ValueError on all ranks if their settings differ; collective."""
    during = "comparing the settings of all ranks"
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if len(set(peers.gather(digest, during))) == 1:
        return
    of_ranks = peers.gather(dict(settings), during)
    # A barrier: a rank that exits closes its connections, so no rank may leave before all have received the settings.
    peers.gather(None, during)
    raise ValueError(_report(of_ranks))


def _report(of_ranks: Sequence[Mapping[str, str]]) -> str:
    names = sorted({name for settings in of_ranks for name in settings})
    lines = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, settings in enumerate(of_ranks):
            ranks_by_value.setdefault(settings.get(name, "(no such setting)"), []).append(rank)
        if len(ranks_by_value) > 1:
            lines.append(
                f"  {name}: " + "; ".join(f"{value} on {ranks_text(on)}" for value, on in ranks_by_value.items())
            )
    shown = lines[:_MOST_LINES]
    if len(lines) > len(shown):
        shown.append(f"  and {len(lines) - len(shown)} more")
    return (
        f"The {len(of_ranks)} ranks of this job have different settings, which would lead to a deadlock:\n"
        + "\n".join(shown)
        + "\n"
        "Use the same settings on every rank: create them from one configuration, independent of rank, host and time. "
        f"Only these arguments may differ: {', '.join(MAY_DIFFER)}."
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers, such as "rank 3" or "ranks 0, 2-7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
