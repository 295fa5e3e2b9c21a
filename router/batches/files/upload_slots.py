"""Bounds on concurrent uploads of all router processes of a host: locked files, which a dead process gives back."""

import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from router.batches.files.private_files import make_private, open_private


class UploadSlots:
    """At most `limit` slots; a folder has a file for each."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def acquire(self) -> IO[bytes] | None:
        """A slot, to be closed; None when all are taken."""
        make_private(self._folder)
        for number in range(self._limit):
            slot = open_private(self._folder / str(number), "ab")
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                slot.close()
            else:
                return slot
        return None


def acquire_all(*kinds: UploadSlots) -> ExitStack | None:
    """A slot of each kind, to be closed together; None when one of them has none left."""
    with ExitStack() as acquired:
        for slots in kinds:
            if (slot := slots.acquire()) is None:
                return None
            acquired.enter_context(slot)
        return acquired.pop_all()
    return None
