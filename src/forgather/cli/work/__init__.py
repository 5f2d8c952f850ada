"""Work of the commands: training, finalising, coordination of ranks (`Job`), and summaries.

May import torch. Called by `commands/` once the options are parsed. Every rank of a run executes this code; `Job`
decides which rank prints and which rank touches shared files.
"""
