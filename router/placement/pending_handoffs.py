"""Prompts that one worker computes for another at this moment, as the router sent them. Pure.

One is under way from the moment it was sent until its first token came, its attempt ended, or somebody else was asked.
Its KV may still be travelling then: what workers count of that is in their load reports.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tandem.values.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHandoff:
    source: WorkerId
    """Who computes the prompt."""
    target: WorkerId
    """Who goes on with it."""
    num_tokens: int
    """That the source has to compute."""
    since_s: float


class PendingHandoffs:
    """All that are under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: dict[Hashable, PendingHandoff] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def began(self, key: Hashable, *, source: WorkerId, target: WorkerId, num_tokens: int) -> None:
        """`key` names it until it has ended."""
        self._under_way[key] = PendingHandoff(
            source=source, target=target, num_tokens=num_tokens, since_s=self._clock()
        )

    def ended(self, key: Hashable) -> None:
        """Well or not; no-op when it has ended already."""
        self._under_way.pop(key, None)

    def oldest(self, most: int) -> list[PendingHandoff]:
        """So many of them, the oldest first: a dict keeps its order."""
        found: list[PendingHandoff] = []
        for handoff in self._under_way.values():
            if len(found) == most:
                break
            found.append(handoff)
        return found
