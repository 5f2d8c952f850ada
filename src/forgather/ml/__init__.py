"""Training, distribution and checkpoints: the trainers, their losses and optimizers, and the checkpoint system.

This package imports nothing itself, so that `import forgather.ml` does not import torch.
"""
