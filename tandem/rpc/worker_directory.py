"""Where the workers of the cluster are.

A directory tells addresses only; who a worker is (id, incarnation, model) is said by the worker itself in the
HELLO of its session, so a wrong or old entry costs a refused connection and nothing else.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where one worker serves its session."""

    role: WorkerRole
    address: str
    """host:port."""


class WorkerDirectory(Protocol):
    """Knows the workers' addresses and their changes."""

    def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """The whole set now and again after each change; ends when it can change no more."""
        ...


class ChangingDirectory:
    """Addresses that whoever owns it replaces; one may watch it."""

    def __init__(self, addresses: frozenset[WorkerAddress]) -> None:
        self._addresses = addresses
        self._changed = asyncio.Event()

    def replace(self, addresses: frozenset[WorkerAddress]) -> None:
        """These are all from now on."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """The whole set now and again after each change; never ends."""
        while True:
            self._changed.clear()
            yield self._addresses
            await self._changed.wait()


def stated_addresses(*, prefill: Iterable[str], decode: Iterable[str]) -> frozenset[WorkerAddress]:
    """Of both pools. Raises ConfigError for one that is not host:port, or that stands twice."""
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
