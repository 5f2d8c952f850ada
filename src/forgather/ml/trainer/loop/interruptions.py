"""Preemption: save and leave on a stop signal, and complete the interrupted step after a resume.

Both functions are collective. The feed reports the same stop signal on every rank, so all ranks save and leave at the
same step. The training loop calls them.
"""

import logging
from typing import TYPE_CHECKING, Any

from forgather.ml.trainer.elastic.preemption_mark import leave_mark
from forgather.ml.trainer.loop.signals import CONTROL_ABORT, Aborted, Preempted

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def heed_stop_request(trainer: "Trainer[Any]") -> None:
    """Save a checkpoint and raise `Preempted` if a stop signal was received; collective.

    A request to abort raises `Aborted` without a save.
    """
    signal_name = trainer.feed.stop_signal
    if signal_name is None:
        return
    loop = trainer.loop
    if signal_name == CONTROL_ABORT:
        trainer.saver.finish_save()
        trainer._end_training()
        aborted = Aborted(loop.state.global_step, loop.saved_path or trainer.resume_path or "")
        logger.warning("%s", aborted)
        raise aborted
    loop.is_leaving = True
    if trainer.control.should_training_stop:
        # A checkpoint already saved at this step lacks the stop request of a callback. Save again with the request, so
        # that the resumed run stops too.
        loop.saved_step = -1
    path = trainer.saver.save_in_training(is_scheduled=False)
    trainer._end_training()
    preempted = Preempted(signal_name, loop.state.global_step, path)
    logger.warning("%s", preempted)
    if trainer.team.rank == 0 and not trainer.control.should_abort_without_save:
        leave_mark(trainer.args.output_dir, preempted)
    raise preempted


def finish_interrupted_step(trainer: "Trainer[Any]") -> None:
    """Run the evaluation that was pending in the resumed checkpoint, and repeat the save that follows it; collective."""
    loop = trainer.loop
    if not loop.evaluation_is_pending:
        trainer.saver.list_resumed_best()
        return
    # Before the evaluation: its callbacks may request saves.
    was_scheduled = loop.scheduled_step == loop.state.global_step
    trainer.evaluator.evaluate_in_training()
    if not loop.evaluation_is_pending and (was_scheduled or trainer.control.should_save or loop.cadence.save_was_due):
        if trainer.rng.has_loaded:
            # Callbacks may have drawn random numbers since the load, and the new checkpoint stores the random state.
            trainer.rng.restore()
        # Replace the resumed checkpoint: it lacks the evaluation and still marks it as pending.
        loop.saved_step = loop.scheduled_step = -1
        trainer.saver.save_in_training()
    heed_stop_request(trainer)
