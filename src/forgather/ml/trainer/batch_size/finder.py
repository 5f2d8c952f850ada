"""BatchFinder (`auto_find_batch_size`): repeats a step that ran out of memory with half the samples per forward pass.

The repeated step has the same samples, targets, weights, buffers and random state, so its result is the result of a run
with the smaller batch. All ranks agree before any rank changes a weight: if one ran out of memory, all repeat. The loader
and its position do not change; each batch that it yields is split. `StepRunner` calls it.
"""

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.trainer.batch_size.memory_errors import is_out_of_memory
from forgather.ml.trainer.batch_size.splitting import parts_of, rows_in
from forgather.ml.trainer.loop.gradients import clear_gradients
from forgather.ml.trainer.loop.window import StepBatches, Window

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

StepResult = tuple[Tensor, Tensor | None, int | Tensor]


class RepeatStep(RuntimeError):
    """Another rank ran out of memory in this step, so that all ranks repeat it."""


class _Beginning(NamedTuple):
    """State at the beginning of a step, before its first forward pass."""

    random: dict[str, Any]
    buffers: list[tuple[Tensor, Tensor]]
    total: int | Tensor | None
    num_shares: int


class BatchFinder:
    """Repetition of steps with smaller batches, until they fit into memory on all ranks."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self._beginning: _Beginning | None = None
        self._is_settled = False
        self.reduce: Callable[[], None] | None = None
        """Averages gradients over ranks, once all ranks have finished the passes of a step."""

    @property
    def largest(self) -> int | None:
        """Samples per forward pass that fit, as far as known; None before the first out-of-memory error."""
        return self._trainer.loop.found_batch_size

    @property
    def is_repeating(self) -> bool:
        """Whether the window that begins now belongs to a repeated step."""
        return self._beginning is not None

    def run(self, steps: StepBatches) -> StepResult:
        """Run one step, as often as it runs out of memory."""
        self._beginning = None
        while True:
            result = self._tried(steps)
            if result is not None:
                return result
            self._shrink(steps)
            steps.repeat()

    def begin(self, window: Window) -> None:
        """Record the state before the first forward pass of a step, and split the micro-batches of its window."""
        if self.largest is not None:
            window.split(lambda batch: parts_of(batch, self.largest or 1))
        if self._beginning is None:
            buffers = [one for one in self._trainer.unwrapped_model().buffers() if not one.is_meta]
            copies = [(one, one.detach().clone()) for one in buffers]
            self._beginning = _Beginning(RNGState().state_dict(), copies, None, 0)

    def count(self, window: Window) -> None:
        """Fill in the numbers of targets of a window; a repeated step keeps the total of its first attempt."""
        trainer, kept = self._trainer, self._beginning
        assert kept is not None
        if kept.total is None:
            trainer.feed.count(window)
            self._beginning = kept._replace(total=window.total, num_shares=window.num_shares)
        else:
            window.counts = [trainer.step_loss.count(labels, batch) for batch, labels in window.labelled]
            window.total, window.num_shares = kept.total, kept.num_shares

    def settle(self) -> None:
        """Agree that all ranks have finished the passes of the step, and reduce gradients; collective."""
        if self._trainer.team.count(False) > 0:
            raise RepeatStep("Another rank ran out of memory.")
        self._is_settled = True
        if self.reduce is not None:
            self.reduce()

    def changed_buffers(self) -> list[str]:
        """Return the names of the buffers that differ from the beginning of the step."""
        assert self._beginning is not None
        copies = {id(buffer): copy for buffer, copy in self._beginning.buffers}
        named = self._trainer.unwrapped_model().named_buffers()
        return [name for name, one in named if id(one) not in copies or not one.equal(copies[id(one)])]

    def _tried(self, steps: StepBatches) -> StepResult | None:
        """Return the result of a step, or None if it ran out of memory on any rank."""
        self._is_settled = False
        try:
            return self._trainer._train_step(steps)
        except RepeatStep:
            return None
        except Exception as error:
            # After the agreement weights may have changed, and a smaller batch would not help the optimizer. Before the
            # first micro-batch, other ranks may be in the collective that counts targets.
            has_begun = steps.window is not None and steps.window.has_begun
            if self._is_settled or not has_begun or not is_out_of_memory(error):
                raise
        # Outside of the except clause, so that the traceback and the activations in its frames are freed.
        self._trainer.team.count(True)
        return None

    def _shrink(self, steps: StepBatches) -> None:
        """Halve the number of samples per forward pass on all ranks, and restore the beginning of the step."""
        trainer = self._trainer
        assert self._beginning is not None and steps.window is not None
        if steps.window.total is not None:
            # Counted during the failed attempt, by the forward pass that resolved the loss.
            self._beginning = self._beginning._replace(total=steps.window.total, num_shares=steps.window.num_shares)
        own = self.largest or max(rows_in(batch) for batch in steps.current)
        present = max(trainer.team.gather(own))
        if present == 1:
            raise RuntimeError(
                "auto_find_batch_size=True found no batch size that fits: a step ran out of memory with one sample per forward "
                "pass. Use shorter sequences, gradient_checkpointing=True, mixed_precision='bf16' or a smaller model; "
                "FSDP2Trainer divides the model between devices."
            )
        trainer.loop.found_batch_size = present // 2
        trainer.state.train_batch_size = present // 2
        self._restore()
        if trainer.team.rank == 0:
            logger.warning(
                "Step %d ran out of memory with %d samples per forward pass. It is repeated with at most %d, and training "
                "continues with them. The samples of a step stay the same, in more micro-batches.",
                *(trainer.state.global_step + 1, present, present // 2),
            )

    def _restore(self) -> None:
        assert self._beginning is not None
        clear_gradients(self._trainer.optimizer)
        for buffer, copy in self._beginning.buffers:
            buffer.copy_(copy)
        RNGState().load_state_dict(self._beginning.random)
        # Frames of the failed pass may be in reference cycles, which keep its activations.
        gc.collect()
        if not self._trainer.on_cpu:
            torch.accelerator.empty_cache()
