"""Context manager for work that one process per node does first, such as downloads and dataset caches.

Exported by the package for scripts. It uses the gloo group of the node.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from forgather.ml.distributed.agreement import Peers
from forgather.ml.distributed.groups import get_local_process_group


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the body on local rank 0 of each node first, then on the node's other ranks.

    Use it for work with a result on disk that the other ranks read, such as a download or a tokenised dataset. All
    ranks must enter it. If the body fails on local rank 0, every rank of the node raises `DistributedError`, and the
    other ranks do not run it. The body must contain no collectives: local rank 0 would wait for ranks that have not
    started it.
    """
    peers = Peers(get_local_process_group())
    during = "running main_process_first on local rank 0"
    if peers.rank == 0:
        with peers.agreement(during):
            yield
    else:
        # This matches the agreement of local rank 0, so it also works as the barrier that holds the other ranks back.
        peers.agree(None, during)
        yield
