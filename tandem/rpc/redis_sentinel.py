"""Finds the master of a Redis that sentinels watch.

The sentinel that answered last is asked first. The next one is asked when it fails, and also when it has been silent
for a part of the time that the whole search has. An answer may be out of date, as that of a sentinel that the others do
not reach: whoever finds no master where it points calls `try_next_sentinel_first`, and while a connection is open all
are asked (`find_by_majority`).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.cluster_state.redis_settings import Address, SentinelSettings
from tandem.rpc.hosts import join, split

_MAX_PORT_DIGITS = 5
_MAX_DIGITS = 20
_Answer = TypeVar("_Answer")


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

    async def find_by_majority(self) -> Address:
        """Return the master's address by the word of most sentinels that answer in time; between equally many, by the
        newest of their configurations. Raises NoMaster when none answers."""
        answers = await self._ask_all(self._order, self._ask_one)
        if not answers:
            raise NoMaster("no sentinel names a master")
        ((found, most), *others) = Counter(answers.values()).most_common()
        if others and others[0][1] == most:
            epochs = await self._ask_all(list(answers), self._ask_epoch)
            tied = [found, *(address for address, num in others if num == most)]
            found = max(tied, key=lambda one: max(epochs.get(by, -1) for by, named in answers.items() if named == one))
        self._order.sort(key=lambda sentinel: answers.get(sentinel) != found)
        return found

    async def _ask_all(
        self, sentinels: list[Address], ask: Callable[[Address], Awaitable[_Answer]]
    ) -> dict[Address, _Answer]:
        """Return the answers that come in time, in the order of `sentinels`."""
        tasks = {one: asyncio.ensure_future(ask(one)) for one in sentinels}
        try:
            await asyncio.wait(tasks.values(), timeout=self._timeout_s)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        answers = {}
        for one, task in tasks.items():
            try:
                answers[one] = task.result()
            except (NoMaster, asyncio.CancelledError):
                continue
        return answers

    async def _ask_epoch(self, sentinel: Address) -> int:
        """Ask for the number of the configuration by which a sentinel names its master: each failover has a higher
        one."""
        reply = await self._ask(sentinel, ("SENTINEL", "MASTER", self._master))
        fields = reply if isinstance(reply, list) else []
        for name, value in zip(fields[::2], fields[1::2], strict=False):
            if name == b"config-epoch" and isinstance(value, bytes) and value.isdigit() and len(value) <= _MAX_DIGITS:
                return int(value)
        raise NoMaster("not a valid Sentinel reply")

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
