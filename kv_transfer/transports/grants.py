"""Grants of a receiving end: unguessable tokens, each of which opens one attempt's destinations.

Host memory is written under a grant's lock, one burst at a time, so a revocation, which takes that lock on the event
loop, is proven at once. A device write is not awaited under the lock: it ends by itself, and the end is reported.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.write_stop_lock import BurstLock
from kv_transfer.protocol.messages import TransferKey
from tandem.errors import InvariantError, TransferError

TOKEN_BYTES = 16


@dataclass(slots=True, kw_only=True, eq=False)
class WriteGrant:
    """The right to write into `landing`, by index; revocation is final.

    `lock` is held while bytes land in host memory; device writes run within `moving`.
    """

    key: TransferKey
    token: bytes
    landing: Landing
    quieted: Callable[["WriteGrant"], None]
    """Called, without the lock, when the device write has ended during which the grant was revoked."""
    lock: BurstLock = field(default_factory=BurstLock)
    revoked: bool = False
    num_moving: int = 0

    @contextmanager
    def moving(self) -> Iterator[bool]:
        """Context of a device write, which holds no lock. Yields False if the grant is revoked: then nothing may be
        written."""
        with self.lock:
            begun = not self.revoked
            self.num_moving += begun
        try:
            yield begun
        finally:
            if begun:
                with self.lock:
                    self.num_moving -= 1
                    is_last = self.revoked and not self.num_moving
                if is_last:
                    self.quieted(self)


class GrantTable:
    """All open grants of one receiving end; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[TransferKey, WriteGrant] = {}
        self._by_token: dict[bytes, WriteGrant] = {}
        self._ending: set[TransferKey] = set()
        """Revoked grants into which a device still writes."""
        self._listener: Callable[[TransferKey], None] = lambda _key: None

    def listen_quiet(self, listener: Callable[[TransferKey], None]) -> None:
        """Set the callback for revoked grants that become quiet later; called once, before the first grant."""
        self._listener = listener

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, key: TransferKey, landing: Landing) -> WriteGrant:
        """Create a grant with a random token. Raises InvariantError if `key` has one already."""
        grant = WriteGrant(key=key, token=secrets.token_bytes(TOKEN_BYTES), landing=landing, quieted=self._quieted)
        with self._lock:
            if key in self._by_key:
                raise InvariantError(f"{key} is granted twice")
            self._by_key[key] = grant
            self._by_token[grant.token] = grant
        return grant

    def find(self, token: bytes) -> WriteGrant | None:
        """The open grant with this token, if there is one."""
        with self._lock:
            return self._by_token.get(token)

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        with self._lock:
            grant = self._by_key.get(key)
        if grant is None:
            return False
        try:
            intact = grant.landing.checksum(cells) == checksum and self._settle(grant, cells)
            with grant.lock:  # other chunks are being assigned memory meanwhile
                grant.landing.judged(cells, intact=intact)
        except TransferError:
            return False  # the cells lie outside the reservation
        return intact

    def _settle(self, grant: WriteGrant, cells: CellRange) -> bool:
        """Settle the cells step by step, so that a revocation waits for one step at most; False if the grant was
        revoked."""
        landing = grant.landing
        for step in range(landing.num_settle_steps(cells)):
            if landing.is_on_device:
                with grant.moving() as begun:
                    if begun:
                        landing.settle(cells, step)
            else:
                with grant.lock:
                    if grant.revoked:
                        return False
                    landing.settle(cells, step)
        return not grant.revoked

    def is_quiet(self, key: TransferKey) -> bool:
        """Whether no device writes under a revoked grant; otherwise the listener is called when it ends."""
        with self._lock:
            return key not in self._ending

    def _quieted(self, grant: WriteGrant) -> None:
        with self._lock:
            self._ending.discard(grant.key)
        self._listener(grant.key)

    def revoke(self, key: TransferKey) -> WriteGrant | None:
        """Revoke a grant. On return its lock is free, and later holders find the grant revoked; see `is_quiet`."""
        with self._lock:
            grant = self._by_key.pop(key, None)
            if grant is None:
                return None
            del self._by_token[grant.token]
        with grant.lock:
            grant.revoked = True
            if grant.num_moving:
                with self._lock:
                    self._ending.add(key)
        return grant

    def revoke_all(self) -> None:
        for key in list(self._by_key):
            self.revoke(key)
