"""Work that one process per node does before the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from forgather.ml.distributed.agreement import Peers
from forgather.ml.distributed.groups import get_local_process_group


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the body on local rank 0 of each node first, then on the node's other ranks.

    For work whose result the others find on disk, such as a download or a tokenised dataset. All ranks enter it. When
    the body fails on local rank 0, every rank of the node raises `DistributedError` and the others do not run it. The
    body must contain no collectives: local rank 0 would wait in them for ranks that have not begun.
    """
    peers = Peers(get_local_process_group())
    during = "the part that local rank 0 runs first"
    if peers.rank == 0:
        with peers.agreement(during):
            yield
    else:
        peers.agree(None, during)
        yield
