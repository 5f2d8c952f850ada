"""Tests on the rehearsal CUDA device: collected only where the device is active (`make rehearse`)."""

import os

# The device replaces CUDA hooks when torch is loaded, so it cannot be switched on inside a running test process.
collect_ignore_glob = [] if os.environ.get("REHEARSAL") == "1" else ["test_*.py"]
