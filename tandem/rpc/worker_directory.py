"""Directories of the cluster's workers.

A directory lists addresses only; a worker identifies itself (id, incarnation, model) in the HELLO of its session, so a
wrong or stale entry costs a refused connection and nothing else.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """The endpoint at which one worker serves its session."""

    role: WorkerRole
    address: str
    """host:port."""


class WorkerDirectory(Protocol):
    """Knows the workers' addresses and their changes."""

    def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """Yield the whole set now and after each change; ends when it can change no more."""
        ...


class ChangingDirectory:
    """A directory whose owner replaces the addresses; it can be watched."""

    def __init__(self, addresses: frozenset[WorkerAddress]) -> None:
        self._addresses = addresses
        self._changed = asyncio.Event()

    def replace(self, addresses: frozenset[WorkerAddress]) -> None:
        """Replace the whole set."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """Yield the whole set now and after each change; never ends."""
        while True:
            self._changed.clear()
            yield self._addresses
            await self._changed.wait()


def stated_addresses(*, prefill: Iterable[str], decode: Iterable[str]) -> frozenset[WorkerAddress]:
    """The addresses of both pools. Raises ConfigError for one that is not host:port, or that is listed twice."""
    stated = [(WorkerRole.PREFILL, a) for a in prefill] + [(WorkerRole.DECODE, a) for a in decode]
    seen: set[str] = set()
    for role, address in stated:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{role.value}.addresses: {address!r} is not of the form host:port")
        if address in seen:
            raise ConfigError(f"{role.value}.addresses: {address} is listed twice")
        seen.add(address)
    return frozenset(WorkerAddress(role=role, address=address) for role, address in stated)
