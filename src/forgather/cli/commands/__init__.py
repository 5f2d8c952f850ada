"""CLI commands, one module each: options, help page, and `run(words) -> exit code`, which `main` calls.

Importing a command or showing its help must not import torch. Code that needs torch is in `work/` and imported when the
command starts to work.
"""
