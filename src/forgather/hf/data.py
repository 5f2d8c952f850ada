"""Loaders of the facade: torch DataLoaders with the sampler, the collator and the batch sizes of the arguments.

The engine builds its own loaders unless a subclass overrides a method. A loader made here covers the full dataset, and
the engine divides its batches between ranks.
"""

from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from forgather.hf.methods import call
from forgather.ml.trainer.loading.builders import build_eval_loader
from forgather.ml.trainer.loading.data_order import Part

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer


class EvaluationLoader:
    """Loader of evaluation data that the engine reads by dataset; iterating it yields the batches of this rank.

    For a dataset with a length, all ranks yield equally many batches, so that collectives in the loop of an override match.
    A rank without a batch in the last round repeats a batch, which `accelerator.gather_for_metrics` leaves out.
    """

    def __init__(self, dataset: Any, make: Callable[[Part], Any], trainer: "Trainer") -> None:
        args = trainer.args
        self.dataset = dataset
        self.batch_size: int = args.eval_batch_size
        self._accelerator = trainer.accelerator
        self._loader = make(Part(args.process_index, args.world_size))
        # The first part is the longest one.
        self._longest = self._loader if args.process_index == 0 else make(Part(0, args.world_size))

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.dataset, "__len__"):
            yield from self._loader
            return
        first, number = None, 0
        for batch in self._loader:
            first, number = batch if first is None else first, number + 1
            yield batch
        for _ in range(number, len(self)):
            self._accelerator.has_repeated_batch = True
            try:
                yield next(iter(self._longest)) if first is None else first
            finally:
                self._accelerator.has_repeated_batch = False

    def __len__(self) -> int:
        return len(self._longest)

    def __bool__(self) -> bool:
        return True


def train_loader(trainer: "Trainer") -> DataLoader[Any]:
    sampler = None
    if not isinstance(trainer.engine.columns.of(trainer.train_dataset), IterableDataset):
        sampler = call(trainer._get_train_sampler, train_dataset=trainer.train_dataset)
    return plain_loader(trainer, trainer.train_dataset, trainer.args.train_batch_size, sampler)


def plain_loader(trainer: "Trainer", dataset: Any, batch_size: int, sampler: Any) -> DataLoader[Any]:
    """Return a torch loader of a full dataset, without its unused columns."""
    used = trainer.engine.columns.of(dataset)
    return DataLoader(
        used,
        batch_size=batch_size,
        sampler=None if isinstance(used, IterableDataset) else sampler,
        drop_last=trainer.args.dataloader_drop_last,
        **_options(trainer),
    )


def _options(trainer: "Trainer") -> dict[str, Any]:
    args = trainer.args
    return {
        "collate_fn": trainer.engine.columns.collator(),
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }


def train_sampler(trainer: "Trainer", dataset: Any) -> Any:
    """Return the sampler of `train_sampling_strategy`; None for data without a length."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    name = trainer.args.train_sampling_strategy
    if name == "sequential":
        return SequentialSampler(dataset)
    if name != "group_by_length":
        return RandomSampler(dataset)
    from transformers.trainer_pt_utils import LengthGroupedSampler

    column, names = trainer.args.length_column_name, getattr(dataset, "column_names", ())
    inputs = getattr(trainer.processing_class, "model_input_names", None)
    return LengthGroupedSampler(
        trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps,
        dataset=dataset,
        lengths=dataset[column] if column in names else None,
        model_input_name=inputs[0] if inputs else None,
    )


def named_dataset(trainer: "Trainer", dataset: Any) -> Any:
    """Return a dataset: the given one, the entry of eval_dataset with this name, or eval_dataset."""
    chosen = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
    chosen = trainer.eval_dataset if chosen is None else chosen
    if chosen is None:
        raise ValueError("An evaluation needs an eval_dataset. Pass one to evaluate() or to the trainer.")
    return chosen


def eval_loader(trainer: "Trainer", dataset: Any) -> Any:
    """Return the loader of a dataset in its order; a loader stays as it is."""
    if isinstance(dataset, (DataLoader, EvaluationLoader)):
        return dataset
    used, size, options = trainer.engine.columns.of(dataset), trainer.args.eval_batch_size, _options(trainer)

    def make(part: Part) -> Any:
        return build_eval_loader(used, batch_size=size, part=part, **options)

    return EvaluationLoader(dataset, make, trainer)


def num_examples(loader: Any, batch_size: int) -> int:
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else len(loader) * batch_size


def num_tokens(loader: Any, max_steps: int | None) -> int:
    total = 0
    for batch in loader:
        tokens = batch["input_ids"].numel()
        if max_steps is not None:
            return int(tokens * max_steps)
        total += tokens
    return int(total)
