"""Commands, one file each: the options, the help page, and `run(words) -> exit code`, which `main` calls.

Importing a command, and showing its help, must not import torch: what needs torch is in `work/`, and imported when the
command has something to do.
"""
