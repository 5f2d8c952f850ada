"""Training, distribution and checkpoints."""
