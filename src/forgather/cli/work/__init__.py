"""The work of the commands, which may import torch: training and finalizing, the job of ranks, summaries.

Called by `commands/` once the options are parsed. Every rank of a run executes this code; `Job` decides which of them
prints and which touches shared files.
"""
