"""Tracks which destination blocks peers may write, so that each reservation is released exactly once."""

from collections.abc import Iterable

from tandem.errors import InvariantError
from tandem.values.ids import BlockId, TransferId


class Destinations:
    """Bound destination blocks, by their reservation. Pure."""

    def __init__(self) -> None:
        self._key_of: dict[BlockId, TransferId] = {}
        self._remaining: dict[TransferId, int] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def is_out(self, key: TransferId) -> bool:
        """Whether some block of this reservation may still be written."""
        return key in self._remaining

    def bind(self, key: TransferId, blocks: Iterable[BlockId]) -> None:
        """Record that a peer may write these blocks. Raises InvariantError when one of them is bound already."""
        for block in blocks:
            if block in self._key_of:
                raise InvariantError(f"destination {block} is bound twice")
            self._key_of[block] = key
            self._remaining[key] = self._remaining.get(key, 0) + 1

    def settle(self, blocks: Iterable[BlockId]) -> list[TransferId]:
        """Record that these blocks were returned; returns the reservations that now have none bound."""
        settled: list[TransferId] = []
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is None:
                raise InvariantError(f"destination {block} came back but was not out")
            self._remaining[key] -= 1
            if not self._remaining[key]:
                del self._remaining[key]
                settled.append(key)
        return settled
