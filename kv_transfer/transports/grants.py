"""Grants of a receiving end: unguessable tokens, each naming where one attempt's cells land."""

import secrets
import threading
from dataclasses import dataclass, field

from kv_transfer.cell_range import CellRange
from kv_transfer.gate import PieceLock
from kv_transfer.landing import Landing
from kv_transfer.messages import TransferKey
from tandem.errors import InvariantError, TransferError

TOKEN_BYTES = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """The right to write into `landing`, by index. `lock` is held while bytes land; `revoked` is final."""

    key: TransferKey
    token: bytes
    landing: Landing
    lock: PieceLock = field(default_factory=PieceLock)
    revoked: bool = False


class GrantTable:
    """All open grants of one receiving end; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[TransferKey, Grant] = {}
        self._by_token: dict[bytes, Grant] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, key: TransferKey, landing: Landing) -> Grant:
        """A new grant with a random token."""
        grant = Grant(key=key, token=secrets.token_bytes(TOKEN_BYTES), landing=landing)
        with self._lock:
            if key in self._by_key:
                raise InvariantError(f"{key} is granted twice")
            self._by_key[key] = grant
            self._by_token[grant.token] = grant
        return grant

    def find(self, token: bytes) -> Grant | None:
        """The open grant with this token."""
        with self._lock:
            return self._by_token.get(token)

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """See KVReceiver."""
        with self._lock:
            grant = self._by_key.get(key)
        if grant is None:
            return False
        try:
            intact = grant.landing.checksum(cells) == checksum and self._settle(grant, cells)
            with grant.lock:  # other chunks are finding room meanwhile
                grant.landing.judged(cells, intact=intact)
        except TransferError:
            return False  # cells that the reservation does not have
        return intact

    def _settle(self, grant: Grant, cells: CellRange) -> bool:
        """Layer by layer, so that a revocation waits for no more than one; False once there was one."""
        for piece in range(grant.landing.num_pieces(cells)):
            with grant.lock:
                if grant.revoked:
                    return False
                grant.landing.settle(cells, piece)
        return not grant.revoked

    def revoke(self, key: TransferKey) -> Grant | None:
        """End a grant. On return nobody holds its lock, and whoever takes it next finds it revoked."""
        with self._lock:
            grant = self._by_key.pop(key, None)
            if grant is None:
                return None
            del self._by_token[grant.token]
        with grant.lock:
            grant.revoked = True
        return grant

    def revoke_all(self) -> None:
        """End every grant."""
        for key in list(self._by_key):
            self.revoke(key)
