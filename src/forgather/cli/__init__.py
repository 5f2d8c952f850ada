"""The command-line program `forgather`: thin over the library, and quick to answer.

`main.py` finds the command and turns errors into messages and exit codes. `commands/` parses and prints help without
importing torch; `work/` does the work; `config/` reads configurations and builds what they name; `launch/` starts the
processes of a run.
"""
