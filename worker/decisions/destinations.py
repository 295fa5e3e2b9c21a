"""Which destinations of which hand-off attempt are still out, so that each reservation is given back exactly once."""

from collections.abc import Iterable

from tandem.errors import InvariantError
from tandem.values.ids import BlockId, TransferId


class Destinations:
    """Bound destination blocks by the reservation that they belong to. Pure."""

    def __init__(self) -> None:
        self._key_of: dict[BlockId, TransferId] = {}
        self._remaining: dict[TransferId, int] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def is_out(self, key: TransferId) -> bool:
        """Whether some block of this reservation may still be written."""
        return key in self._remaining

    def bind(self, key: TransferId, blocks: Iterable[BlockId]) -> None:
        """These blocks may be written by a peer from now on. InvariantError when one is out already."""
        for block in blocks:
            if block in self._key_of:
                raise InvariantError(f"destination {block} is bound twice")
            self._key_of[block] = key
            self._remaining[key] = self._remaining.get(key, 0) + 1

    def settle(self, blocks: Iterable[BlockId]) -> list[TransferId]:
        """These blocks came back; the reservations of which none is out any more."""
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
