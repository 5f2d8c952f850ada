"""Tools for during and after training."""
