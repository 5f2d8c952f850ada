"""Loss of a step: which loss it is (`model_loss`), and the weight of each micro-batch (`training_loss`).

Invariant: the losses of all micro-batches and ranks of a step add up to one mean over all its targets.
"""
