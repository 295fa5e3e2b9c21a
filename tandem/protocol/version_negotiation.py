"""Which version of a protocol two processes speak with each other, and what may be said in it. Pure.

Each side says the oldest and the newest version that it speaks; both take the newest that both speak. A process that
says one number, as all did before there were ranges, speaks that one. Why:
docs/extend/adr/0014-versions-side-by-side.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass


class NoCommonVersion(Exception):
    """The peer speaks no version that is spoken here; says which each speaks."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Every version of a protocol from `oldest` to `newest`."""

    oldest: int
    newest: int

    @classmethod
    def from_hello(cls, oldest: int, newest: int) -> "VersionRange":
        """The range of a HELLO; `newest` is 0 when it states a single version."""
        return cls(oldest, newest or oldest)

    def negotiate(self, peer: "VersionRange") -> int:
        """Choose the newest version that both sides know. Raises NoCommonVersion."""
        version = min(self.newest, peer.newest)
        if version < max(self.oldest, peer.oldest):
            raise NoCommonVersion(f"protocol version {peer}, not {self}")
        return version

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What may be said on one connection."""

    version: int
    """What both ends agreed on."""
    since: Mapping[str, int]
    """Kinds of message, by the version that brought each."""

    def has(self, kind: str | None) -> bool:
        """Whether the peer knows this kind of message; another kind may end the connection or be lost silently."""
        return kind is not None and self.since[kind] <= self.version
