"""Optimizers made of several, and the groups that parameters are optimized in."""
