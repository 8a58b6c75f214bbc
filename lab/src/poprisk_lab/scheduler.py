"""Studies on the workers of a Dask scheduler: the enclosing ``poprisk.cluster`` of what a command runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from poprisk.cli._jobs import connected


@contextmanager
def on_scheduler(address: str | None) -> Iterator[None]:
    """Run the tasks of studies within the block on a scheduler's workers; without an address, where they ran before.

    Raises:
        JobError: no scheduler answers there.
        MissingExtraError: Dask is not installed.
    """
    if address is None:
        yield
        return
    from poprisk import cluster  # torch comes with it, which the help of a command does not need

    with connected(address) as client, cluster(client):
        yield
