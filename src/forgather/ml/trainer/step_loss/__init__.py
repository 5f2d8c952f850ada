"""Loss of a training step: choice of the loss (`model_loss`) and weight of each micro-batch (`training_loss`).

Invariant: the losses of all micro-batches and ranks of a step add up to one mean over all targets of the step.
"""
