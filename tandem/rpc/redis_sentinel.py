"""Finds the master of a Redis that sentinels watch.

The sentinel that answered last is asked first. The next one is asked when it fails, and also when it has been silent
for a part of the time that the whole search has. An answer may be out of date, as that of a sentinel that the others do
not reach: whoever finds no master where it points calls `try_next_sentinel_first`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from tandem.cluster_state.redis_settings import Address, SentinelSettings
from tandem.rpc.hosts import join, split

_MAX_PORT_DIGITS = 5


class NoMaster(Exception):
    """No sentinel knows a master, or the server that they name is none; the message says why."""


class MasterFinder:
    """Keeps the order in which the sentinels are asked. Without I/O of its own."""

    def __init__(
        self,
        settings: SentinelSettings,
        ask: Callable[[Address, tuple[str, ...]], Awaitable[object]],
        *,
        timeout_s: float,
    ) -> None:
        """`ask`: returns the reply of one sentinel to a command; raises NoMaster, and need not have a timeout of its
        own. `timeout_s`: bound of a whole search."""
        self._master = settings.master
        self._order = list(settings.addresses)
        self._ask = ask
        self._timeout_s = timeout_s

    async def find(self) -> Address:
        """Return the master's address. Raises NoMaster, which says what each sentinel answered."""
        reasons: dict[Address, str] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                if (found := await self._first_answer(reasons)) is not None:
                    return found
        except TimeoutError:
            silent = f"no answer within {self._timeout_s:g} s"
            reasons |= {one: silent for one in self._order if one not in reasons}
        raise NoMaster("; ".join(f"sentinel {join(*one)}: {reason}" for one, reason in reasons.items()))

    async def _first_answer(self, reasons: dict[Address, str]) -> Address | None:
        """Ask until a sentinel names a master; None when all have failed. `reasons` gets why each has."""
        unasked, asked = deque(self._order), dict[asyncio.Task[Address], Address]()
        head_start_s = self._timeout_s / len(self._order)
        try:
            while unasked or asked:
                if unasked:
                    address = unasked.popleft()
                    asked[asyncio.create_task(self._ask_one(address))] = address
                await asyncio.wait(
                    asked, timeout=head_start_s if unasked else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [one for one in asked if one.done()]:
                    sentinel = asked.pop(task)
                    try:
                        found = task.result()
                    except NoMaster as error:
                        reasons[sentinel] = str(error)
                        continue
                    self._order.remove(sentinel)
                    self._order.insert(0, sentinel)
                    return found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    async def _ask_one(self, sentinel: Address) -> Address:
        return self._parsed(await self._ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)))

    def try_next_sentinel_first(self) -> None:
        """Move the sentinel that answered last to the end of the order: its answer was no good."""
        self._order.append(self._order.pop(0))

    def _parsed(self, reply: object) -> Address:
        if reply is None:
            raise NoMaster(f"knows no master named {self._master!r}")
        match reply:
            case [bytes(host), bytes(port)] if len(port) <= _MAX_PORT_DIGITS:
                try:
                    return split(join(host.decode("ascii"), int(port)))
                except ValueError:
                    pass
        raise NoMaster("not a valid Sentinel reply")


def is_master(role: object) -> bool:
    """Whether a server's reply to ROLE says that it is a master: a demoted one still serves reads."""
    match role:
        case [b"master", *_]:
            return True
    return False
