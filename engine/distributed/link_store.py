"""Key-value stores in which the ranks of a group leave their addresses for each other, for torch's process groups.

Within one machine that is a file that only the ranks have open (see engine.distributed.ranks.leader).
Over several it is the store defined here: rank 0 holds the keys, and the others reach them over their authenticated
links, not over a port of torch's own.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

_Base: Any = dist.Store  # type: ignore[attr-defined]  # torch's stubs leave it out


class Keys(Protocol):
    """Values by key, in rank 0's memory. May be used from any thread."""

    def set(self, key: str, value: bytes) -> None:
        """Set or replace a value. Raises RankLost when rank 0 cannot be reached, like all methods here."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for a value. Returns None when the key is not set within `timeout_s`."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0. Returns its new value."""
        ...

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        ...

    def delete(self, key: str) -> bool:
        """Delete a key. Returns whether it had a value."""
        ...

    def count(self) -> int:
        """Number of keys."""
        ...


class LinkStore(_Base):  # type: ignore[misc]  # its base is untyped
    """torch's Store over Keys; called from torch's own threads, too."""

    def __init__(self, keys: Keys, *, timeout_s: float) -> None:
        super().__init__()
        self._keys = keys
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._keys.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, see torch. Raises RuntimeError when the key is not set in time."""
        return self._await(key, self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys, see torch. Raises RuntimeError when one is not set in time."""
        for key in keys:
            self._await(key, self._timeout_s if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._keys.has(key) for key in keys)

    def deleteKey(self, key: str) -> bool:
        return self._keys.delete(key)

    def getNumKeys(self) -> int:
        return self._keys.count()

    def clone(self) -> "LinkStore":
        """Return the store itself, which any thread may use: torch would not keep a new Python object alive."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _await(self, key: str, timeout_s: float) -> bytes:
        value = self._keys.get(key, timeout_s)
        if value is None:
            raise RuntimeError(f"no other rank has set {key} within {timeout_s:.0f} s")
        return value
