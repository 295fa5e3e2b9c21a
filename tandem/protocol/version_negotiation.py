"""Negotiates the version of a protocol between two processes, and the messages that it allows. Pure.

Each side states the oldest and the newest version that it supports; both use the newest that both support. A process
that states a single number, as all did before there were ranges, supports only that one. Rationale:
docs/extend/adr/0014-versions-side-by-side.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass


class NoCommonVersion(Exception):
    """The peer supports none of this process's versions; the message names the versions of each."""


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
        """Return the newest version that both sides support. Raises NoCommonVersion."""
        version = min(self.newest, peer.newest)
        if version < max(self.oldest, peer.oldest):
            raise NoCommonVersion(f"protocol version {peer}, not {self}")
        return version

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Kinds of message that may be sent on one connection."""

    version: int
    """The version that both ends agreed on."""
    since: Mapping[str, int]
    """Version that introduced each kind of message."""

    def has(self, kind: str | None) -> bool:
        """Whether the peer knows this kind of message; another kind may end the connection or be lost silently."""
        return kind is not None and self.since[kind] <= self.version
