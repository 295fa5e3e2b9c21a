"""Bytes under way, as the transports move them: `shm` copies piece by piece, `tcp` leaves bytes in the network."""

from tests.proofs.explore.model import properties
from tests.proofs.explore.model.life import LANDED, LOOSE, MOVING, TORN, Life, Write
from tests.proofs.explore.model.scope import Scope


class Writing:
    """Changes the writes of lives."""

    def __init__(self, scope: Scope) -> None:
        self._by_copying = scope.shared_memory
        self._leaves_bytes = scope.remote or not scope.shared_memory

    def land(self, life: Life, write: Write, *, damaged: bool) -> None:
        """The bytes are in the decode worker's memory."""
        properties.writes_its_own(life, write.attempt, write.slots)
        life.writes.discard(write)
        life.put(write.slots, (TORN,) * len(write.slots) if damaged else write.content)
        if write.phase == MOVING and life.workers[write.at].epoch == write.epoch:
            life.writes.add(write._replace(phase=LANDED))

    def cancel(self, life: Life, at: int, attempt: int) -> bool:
        """The sender wants no more reads. True when none goes on; else the answer is owed."""
        epoch = life.workers[at].epoch
        mine = [w for w in life.writes if (w.at, w.epoch, w.attempt) == (at, epoch, attempt)]
        if self._by_copying and any(w.phase == MOVING for w in mine):
            life.owed.add(("writes quiet", at, attempt))
            return False
        for write in mine:
            self._stop_reading(life, write)
        return True

    def stop_all(self, life: Life, at: int, attempt: int) -> None:
        """Answer to a cancel that had to wait."""
        epoch = life.workers[at].epoch
        for write in [w for w in life.writes if (w.at, w.epoch, w.attempt) == (at, epoch, attempt)]:
            self._stop_reading(life, write)

    def _stop_reading(self, life: Life, write: Write) -> None:
        if write.phase == LOOSE:
            return
        life.writes.discard(write)
        if write.phase == MOVING and self._leaves_bytes:
            life.writes.add(write._replace(phase=LOOSE))
        life.owed.add(("write failed", write.at, write.attempt, write.seq, write.rewrite))

    def writer_dies(self, life: Life, at: int, epoch: int, *, lingers: bool) -> None:
        """What its process was writing ends with it, unless it only hangs; what is in the network may still land."""
        for write in list(life.writes):
            if (write.at, write.epoch) == (at, epoch) and not (lingers and write.phase == MOVING):
                life.writes.discard(write)
                if write.phase == LOOSE or (write.phase == MOVING and self._leaves_bytes):
                    life.writes.add(write._replace(phase=LOOSE))

    def lingerer_dies(self, life: Life, at: int, epoch: int) -> None:
        """A process that hung ends at last."""
        life.writes = {w for w in life.writes if (w.at, w.epoch, w.phase) != (at, epoch, MOVING)}

    def shut_out(self, life: Life, write: Write) -> None:
        """The decode worker lets it land no more; its sender, if alive, learns that."""
        life.writes.discard(write)
        if write.phase == MOVING and life.workers[write.at].epoch == write.epoch:
            life.owed.add(("write failed", write.at, write.attempt, write.seq, write.rewrite))

    def memory_dies(self, life: Life) -> None:
        """The decode worker's process ends: what was still to land there does not."""
        for write in list(life.writes):
            if write.phase in (MOVING, LOOSE):
                self.shut_out(life, write)

    @staticmethod
    def may_land(write: Write) -> bool:
        """Whether its bytes may still change memory."""
        return write.phase != LANDED
