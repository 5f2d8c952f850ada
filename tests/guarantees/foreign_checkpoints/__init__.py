"""Guarantee: checkpoints of other programs are recognised, imported and never harmed."""
