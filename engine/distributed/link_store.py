"""Where the ranks of a group leave each other what they need to meet, as torch's process groups ask for it.

Within one machine that is a file that only the ranks have open (see engine.distributed.ranks.leader).
Over several it is this: the keys lie with rank 0, and the others reach them over their authenticated links, not over a
port of torch's own.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

_Base: Any = dist.Store  # type: ignore[attr-defined]  # torch's stubs leave it out


class Keys(Protocol):
    """Texts with their values; rank 0's are in its memory. From any thread."""

    def set(self, key: str, value: bytes) -> None:
        """Replace the value. Raises RankLost when rank 0 cannot be reached, like all of these."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value once there is one; None when there was none in time."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count up; what is not there counts from 0."""
        ...

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        ...

    def delete(self, key: str) -> bool:
        """Forget it; whether it was there."""
        ...

    def count(self) -> int:
        """How many there are."""
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
        """See torch: waits. Raises RuntimeError when there is none in time."""
        return self._await(key, self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch. Raises RuntimeError when one is missing in time."""
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
        """See torch. The same, which any thread may use: a new one would go when Python holds it no longer."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _await(self, key: str, timeout_s: float) -> bytes:
        value = self._keys.get(key, timeout_s)
        if value is None:
            raise RuntimeError(f"no other rank has set {key} within {timeout_s:.0f} s")
        return value
