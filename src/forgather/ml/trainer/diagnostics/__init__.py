"""Diagnostics of runs on accelerators: health check at the start, memory advice and NCCL traces after failures.

Nothing here runs between the start and the end of the training loop.
"""
