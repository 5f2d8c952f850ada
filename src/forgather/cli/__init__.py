"""Command-line program `forgather`: a thin layer over the library that starts quickly.

`main.py` finds the command and turns errors into messages and exit codes. `commands/` parses options and prints help
without importing torch. `work/` does the work, `config/` reads configurations and builds the objects that they name,
and `launch/` starts the processes of a run.
"""
