"""Finds the master of a Redis that sentinels watch.

Sentinels are asked one after the other until one answers, and the one that answered is asked first the next time. What
it says may be out of date, as that of a sentinel that the others do not reach: whoever finds no master where it points
calls `doubt`, and then the next sentinel is asked first.
"""

from collections.abc import Awaitable, Callable

from tandem.cluster_state.redis_settings import Address, SentinelSettings
from tandem.rpc.hosts import join, split

_MAX_PORT_DIGITS = 5


class NoMaster(Exception):
    """No sentinel knows a master, or there is none where they point; the message says why."""


class MasterFinder:
    """Keeps the order in which the sentinels are asked. Without I/O of its own."""

    def __init__(
        self, settings: SentinelSettings, ask: Callable[[Address, tuple[str, ...]], Awaitable[object]]
    ) -> None:
        """`ask`: the reply of one sentinel to a command. It raises NoMaster, saying why there is none."""
        self._master = settings.master
        self._order = list(settings.addresses)
        self._ask = ask

    async def find(self) -> Address:
        """Return the master's address. Raises NoMaster, which says what each sentinel answered."""
        reasons = []
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
        for sentinel in tuple(self._order):
            try:
                found = self._parsed(await self._ask(sentinel, command))
            except NoMaster as error:
                reasons.append(f"sentinel {join(*sentinel)}: {error}")
                continue
            self._order.remove(sentinel)
            self._order.insert(0, sentinel)
            return found
        raise NoMaster("; ".join(reasons))

    def doubt(self) -> None:
        """Ask the next sentinel first from now on."""
        self._order.append(self._order.pop(0))

    def _parsed(self, reply: object) -> Address:
        if reply is None:
            raise NoMaster(f"knows no master of the name {self._master!r}")
        match reply:
            case [bytes(host), bytes(port)] if len(port) <= _MAX_PORT_DIGITS:
                try:
                    return split(join(host.decode("ascii"), int(port)))
                except ValueError:
                    pass
        raise NoMaster("an answer that no sentinel gives")


def is_master(role: object) -> bool:
    """Whether a server's reply to ROLE says that it is a master: a demoted one still serves reads."""
    match role:
        case [b"master", *_]:
            return True
    return False
