"""Tests of the library. Importing this package hides accelerators, so that the CPU suite runs on any machine."""

import os

# Before torch looks for devices. Ranks and scripts that a test starts inherit the variables.
if os.environ.get("REHEARSAL") != "1":
    for _name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        os.environ[_name] = ""
    # Only the CPU device of oneAPI, which torch does not use as an accelerator.
    os.environ["ONEAPI_DEVICE_SELECTOR"] = "*:cpu"
