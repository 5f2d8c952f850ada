"""Arithmetic of `global_batch_size`: micro-batches per step from samples, ranks and `per_device_train_batch_size`.

It sets `gradient_accumulation_steps` of the trainer's copy of the arguments, and refuses settings that contradict each
other or data without a global order. `Trainer._get_dataloader` calls it on every rank, with the same result.
"""

from dataclasses import replace

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.elastic.step_shares import StepShares
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.loading.epoch_loader import name_of
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.trainer_types import BaseDataset


def settle_global_batch(args: TrainingArguments, dataset: BaseDataset, layout: DataLayout) -> StepShares | None:
    """Set `gradient_accumulation_steps` from `global_batch_size`; return the division of a step, or None without it."""
    if args.global_batch_size is None:
        return None
    _require_weights_by_target(args)
    kind = kind_of(dataset)
    if kind == "loader":
        raise ValueError(
            f"global_batch_size={args.global_batch_size} cannot be combined with a loader ({name_of(dataset)}) as training "
            "data: its batches have a fixed size. Pass the dataset, or remove global_batch_size."
        )
    shares = StepShares(args.global_batch_size, args.per_device_train_batch_size, layout.part, layout.splits_streams)
    if kind == "iterable":
        shares = _even_shares(shares, dataset)
    _settle_accumulation(args, shares)
    return shares


def shares_of_part(shares: StepShares, part: Part) -> StepShares:
    """Return the shares of the process that reads `part`; raise ValueError if ranks have different datasets."""
    # The caller sharded the data, so positions of different ranks are positions of different orders.
    if not shares.reads_all and part != shares.part:
        raise ValueError(
            f"global_batch_size={shares.global_batch_size} needs the same dataset on all ranks, but each rank has "
            "its own shard. Pass the full dataset on every rank: the trainer divides it."
        )
    return shares


def _require_weights_by_target(args: TrainingArguments) -> None:
    if not args.token_weighted_loss:
        raise ValueError(
            f"global_batch_size={args.global_batch_size} cannot be combined with token_weighted_loss=False: micro-batches of "
            "different sizes would have the same weight. Set token_weighted_loss=True, or remove global_batch_size."
        )


def _even_shares(shares: StepShares, dataset: BaseDataset) -> StepShares:
    """Return shares with equal micro-batches, for a stream: its loader reads batches of one size."""
    size, num_parts = shares.global_batch_size, shares.part.num_parts
    if num_parts > 1 and not shares.reads_all:
        raise ValueError(
            f"global_batch_size={size} needs a global order of samples, but each of {num_parts} data-parallel ranks reads its "
            f"own stream ({name_of(dataset)}). Set dispatch_batches=True, so that rank 0 reads for all, or use a map-style "
            "dataset."
        )
    per_rank, rest = divmod(size, num_parts)
    if rest:
        raise ValueError(
            f"global_batch_size={size} does not fit {num_parts} data-parallel ranks that read a stream ({name_of(dataset)}), "
            f"because all its batches have the same size: {size} = {num_parts} x {per_rank} + {rest}. Choose a multiple of "
            f"{num_parts}, such as {size - rest or num_parts}, or use a map-style dataset, which is divided unevenly."
        )
    largest = max(number for number in range(1, shares.largest + 1) if per_rank % number == 0)
    return replace(shares, largest=largest)


def _settle_accumulation(args: TrainingArguments, shares: StepShares) -> None:
    number, given = shares.num_rounds(shares.global_batch_size), args.gradient_accumulation_steps
    size, num_parts = shares.global_batch_size, shares.part.num_parts
    arithmetic = (
        f"global_batch_size={size} on {num_parts} data-parallel rank{'s' if num_parts > 1 else ''} in micro-batches of at "
        f"most {shares.largest} samples takes {number} micro-batch{'es' if number > 1 else ''} per rank and step: {size} / "
        f"({num_parts} x {shares.largest}), rounded up"
    )
    # 1 is the default, so it is no contradiction.
    if given not in (1, number):
        raise ValueError(
            f"gradient_accumulation_steps={given} contradicts global_batch_size: {arithmetic}. Remove "
            "gradient_accumulation_steps, which follows from global_batch_size for any number of ranks, or change "
            "per_device_train_batch_size."
        )
    args.gradient_accumulation_steps = number
    try:
        # Validates the derived number against settings such as ddp.static_graph.
        args.copy()
    except ValueError as error:
        args.gradient_accumulation_steps = given
        raise ValueError(f"{arithmetic}. {error}") from None
