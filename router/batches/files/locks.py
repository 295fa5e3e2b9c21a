"""What router processes that share a folder must do one at a time, or at most so many of them. Blocking: for threads.

Each lock is a file, held by `flock`: the kernel gives it back when a process ends, however that ends, and it holds
between the threads of one process as well. A process that hangs with one in its hand is killed within seconds
(`cluster.supervisor.supervisor`).
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from router.batches.files.private_files import make_private, open_private


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until nobody else is inside for this folder."""
    with open_private(folder / "alone", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Places:
    """So many of a kind; a folder holds a file for each."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most

    def take(self) -> IO[bytes] | None:
        """A place, to be closed; None when all are taken."""
        make_private(self._folder)
        for number in range(self._most):
            place = open_private(self._folder / str(number), "ab")
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                place.close()
            else:
                return place
        return None


def take_all(*kinds: Places) -> ExitStack | None:
    """A place of each kind, to be closed together; None when there is none of one of them."""
    with ExitStack() as taken:
        for places in kinds:
            if (place := places.take()) is None:
                return None
            taken.enter_context(place)
        return taken.pop_all()
    return None
