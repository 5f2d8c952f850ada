"""Interruptions: leaving on a stop signal, and doing after a resume what the interrupted process left undone."""

import logging
from typing import TYPE_CHECKING, Any

from forgather.ml.trainer.loop.signals import Preempted

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def heed_stop_request(trainer: "Trainer[Any]") -> None:
    """Save and leave when the system asked for it; ranks agree on that in their feed."""
    signal_name = trainer.feed.stop_signal
    if signal_name is None:
        return
    loop = trainer.loop
    loop.is_leaving = True
    if trainer.control.should_training_stop:
        # No checkpoint of this step has the callback's request to stop, which the resumed run must follow.
        loop.saved_step = -1
    path = trainer.saver.save_in_training(is_scheduled=False)
    trainer._dispatch_event("on_train_end")
    preempted = Preempted(signal_name, loop.state.global_step, path)
    logger.warning("%s", preempted)
    raise preempted


def finish_interrupted_step(trainer: "Trainer[Any]") -> None:
    """Do what was due at the step of the resumed checkpoint, and is not in it: an evaluation, and the save after it."""
    loop = trainer.loop
    if not loop.evaluation_is_pending:
        trainer.saver.list_resumed_best()
        return
    was_scheduled = loop.scheduled_step == loop.state.global_step
    trainer.evaluator.evaluate_in_training()
    if not loop.evaluation_is_pending and (was_scheduled or trainer.control.should_save or loop.cadence.save_was_due):
        if trainer.rng.has_loaded:
            # Callbacks may have drawn random numbers since the load.
            trainer.rng.restore()
        # Replace the resumed checkpoint: it lacks the evaluation, and says that it is pending.
        loop.saved_step = loop.scheduled_step = -1
        trainer.saver.save_in_training()
    heed_stop_request(trainer)
