"""Output directory and device of an existing run, for commands that work on its checkpoints."""

import logging
import os

import torch

from forgather.config.schema import Configuration
from forgather.ml.checkpoint.files.layout import CHECKPOINTS_FOLDER, IN_OUTPUT_DIR

logger = logging.getLogger(__name__)


def output_dir_of(checkpoint: str, configuration: Configuration) -> str:
    """Return the output directory of the run, which holds its tokens; it may have been moved since training."""
    folder, _ = os.path.split(os.path.abspath(checkpoint))
    if configuration.args.checkpoint_layout == IN_OUTPUT_DIR:
        return folder
    return os.path.dirname(folder) if os.path.basename(folder) == CHECKPOINTS_FOLDER else configuration.args.output_dir


def device_of(configuration: Configuration | None) -> str | None:
    """Return the device of the run if this machine has it; None lets the library choose."""
    if configuration is None:
        return None
    asked = "cpu" if configuration.args.use_cpu else configuration.args.device
    present = {"cpu"} | ({str(torch.accelerator.current_accelerator())} if torch.accelerator.is_available() else set())
    if asked is None or torch.device(asked).type in present:
        return asked
    logger.warning("The run used %s, which this machine does not have: using %s.", asked, " or ".join(sorted(present)))
    return None
