"""Job without a launcher, of which one rank ends before it joins: `main([ABSENT_RANK, SECONDS])`."""

import logging
import os
import sys
from collections.abc import Sequence

from forgather.ml.distributed import DistributedEnvironment, get_rank


def main(words: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if get_rank() == int(words[0]):
        os._exit(9)
    DistributedEnvironment(no_accelerator=True, timeout=float(words[1]))
