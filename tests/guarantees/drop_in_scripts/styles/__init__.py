"""Trainer subclasses, callbacks and arguments in the styles that people use with transformers' Trainer.

Each style is a function of the module with `Trainer`, so that both trainers run the same code.
"""

from tests.guarantees.drop_in_scripts.styles import callbacks, loops, losses
from tests.guarantees.drop_in_scripts.styles.recipes import Style

STYLES: dict[str, Style] = {
    style.__name__: style
    for style in (
        losses.weighted_loss,
        losses.weighted_loss_of_items,
        losses.weighted_loss_with_kwargs,
        losses.added_penalty,
        losses.contrastive_loss,
        losses.two_heads,
        losses.loss_function,
        loops.own_sampler,
        loops.own_loader,
        loops.layerwise_learning_rates,
        loops.own_schedule,
        loops.ready_optimizer,
        loops.optimizer_class,
        loops.own_training_step,
        loops.timed_training_step,
        loops.own_prediction_step,
        loops.own_log,
        loops.own_evaluation,
        loops.undecayed_names,
        loops.frozen_layers,
        loops.model_factory,
        callbacks.curious_callback,
        callbacks.board_callback,
        callbacks.stopping_callback,
        callbacks.early_stopping,
        callbacks.adapters,
    )
}
