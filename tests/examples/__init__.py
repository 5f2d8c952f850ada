"""Runs of the programs in examples/."""
