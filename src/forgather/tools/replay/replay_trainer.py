"""ReplayTrainer: the training loop of one device that measures some steps and stops before the update of the last.

It overrides hooks only: the steps before are trained as in the run. Every file that a trainer may write goes to a
temporary output directory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.state.rng import undisturbed_random_numbers
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.step_loss.model_loss import Forward
from forgather.ml.trainer.step_loss.model_outputs import logits_of
from forgather.ml.trainer.trainer import StepResult, Trainer
from forgather.ml.trainer.trainer_types import BaseDataset
from forgather.tools.replay.observer import StepObserver, gradient_digests, module_gradients
from forgather.tools.replay.random_states import RankGenerators, torch_states
from forgather.tools.replay.report import StepReport
from forgather.tools.replay.sample_losses import LossBook
from forgather.tools.samples.step_order import StepSample

SamplesOf = Callable[[int], list[StepSample] | None]


class ReplayTrainer(Trainer[TrainingArguments]):
    """Trainer that repeats the steps `first` to `last` of a run, and keeps a report of each in `reports`."""

    def __init__(
        self,
        *,
        first: int,
        last: int,
        samples_of: SamplesOf,
        generators: RankGenerators,
        num_ranks: int = 1,
        position: Mapping[str, Any] | None = None,
        keeps_digests: bool = False,
        **options: Any,
    ) -> None:
        """`samples_of` returns the samples of a step; `generators` are the random states of the ranks of the run.

        `num_ranks` is the number of data-parallel ranks of the run. `position` is the position in the data, if each rank
        saved its own: one device cannot load the positions of several ranks.
        """
        super().__init__(default_callbacks=False, **options)
        self.reports: list[StepReport] = []
        self.draws_random_numbers = False
        """Whether a replayed forward or backward pass drew random numbers, such as for dropout."""
        self._first, self._last = first, last
        self._samples_of = samples_of
        self._generators = generators
        self._num_ranks = num_ranks
        self._position = position
        self._keeps_digests = keeps_digests
        self._observer: StepObserver | None = None
        self._book: LossBook | None = None
        self._outputs: object = None
        self._measured: dict[str, Any] = {}

    # --- the run

    def _data_layout(self, for_training: bool) -> DataLayout:
        if not for_training or self.args.global_batch_size is None:
            return super()._data_layout(for_training)
        # One reader of the micro-batches of all ranks, as a dispatcher is: a global batch is divided as in the run.
        return DataLayout(Part(0, self._num_ranks), readers=[range(self._num_ranks)], reads_whole=True)

    def _get_dataloader(self, dataset: BaseDataset, batch_size: int) -> Any:
        loader = super()._get_dataloader(dataset, batch_size)
        if self.args.global_batch_size is not None:
            # The division counts the micro-batches of one rank.
            self.args.gradient_accumulation_steps *= self._num_ranks
        return loader

    def _load_state(self, path: str | None) -> str | None:
        loaded = super()._load_state(path)
        if self._position is not None:
            self.train_dataloader.load_state_dict(self._position)
        return loaded

    def _restore(self, resume: bool | str) -> None:
        super()._restore(resume)
        # An evaluation or a stop that the run still had to do is no part of a step.
        self.loop.evaluation_is_pending = False
        self.control.should_training_stop = False

    def _after_step(self) -> None:
        super()._after_step()
        if self.state.global_step >= self._last:
            self.control.should_training_stop = True

    # --- the step

    def _train_step(self, data_iterator: Iterator[Mapping[str, Any]]) -> StepResult:
        step = self.state.global_step + 1
        if step < self._first:
            return super()._train_step(data_iterator)
        samples = self._samples_of(step)
        kept = None if samples is None else [sample for sample in samples if not sample.is_skipped]
        self._observer, self._book = StepObserver(), LossBook(kept, self.processing_class, self.train_dataset)
        rate, epoch = float(self.lr_scheduler.get_last_lr()[0]), self.state.raw_epoch
        handle = self.model.register_forward_hook(self._keep_outputs)
        try:
            with self._observer.watching(self.unwrapped_model()):
                result = super()._train_step(data_iterator)
            self._report(step, epoch, rate, result)
        finally:
            handle.remove()
            self._observer = self._book = None
        return result

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        window = self.window
        assert window is not None
        if self._observer is not None:
            self._observer.micro_batch = window.number
        with self._generators.of_micro_batch(window.number):
            if self.draws_random_numbers:
                return super()._forward_backward_step(input_dict, labels)
            before = torch_states(self.device)
            loss = super()._forward_backward_step(input_dict, labels)
            after = torch_states(self.device)
            self.draws_random_numbers = not all(map(torch.equal, before, after))
            return loss

    def _forward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        loss = super()._forward_step(input_dict, labels)
        window = self.window
        if self._book is not None and window is not None and not window.is_stand_in:
            with torch.no_grad(), undisturbed_random_numbers(), self.amp_context.autocast():
                logits = logits_of(self._outputs)
                logits = None if logits is None else self.step_loss.logits(Forward(logits.detach(), None))
                self._book.add(logits, input_dict, labels, self.step_loss, window.number)
        self._outputs = None
        return loss

    def _keep_outputs(self, module: nn.Module, inputs: object, outputs: object) -> None:
        self._outputs = outputs

    def _update_parameters(self) -> Tensor | None:
        if self.state.global_step + 1 < self._last:
            return super()._update_parameters()
        # The last step ends here: its gradients are complete, and the weights stay as they were.
        self.amp_context.unscale_(self.optimizer)
        return self._clip_grad_norm(None)

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        if self._observer is not None:
            named = self._named_parameters()
            self._measured = {
                # Before clipping: a norm of NaN would turn all gradients into NaN.
                "gradients": module_gradients(named),
                "gradient_digests": gradient_digests(named) if self._keeps_digests else {},
            }
        return super()._clip_grad_norm(max_grad_norm, norm_type)

    def _report(self, step: int, epoch: int, rate: float, result: StepResult) -> None:
        observer, book = self._observer, self._book
        assert observer is not None and book is not None
        loss, norm, _ = result
        self.reports.append(
            StepReport(
                step=step,
                epoch=epoch,
                loss=float(loss),
                grad_norm=None if norm is None else float(norm),
                learning_rate=rate,
                num_targets=sum(sample.num_targets for sample in book.samples),
                samples=book.samples,
                worst_tokens=book.worst_tokens,
                activations=observer.activations(),
                first_nonfinite=observer.first_nonfinite(),
                first_nonfinite_gradient=observer.first_nonfinite_gradient(),
                **self._measured,
            )
        )
