"""A connection to Redis with bounds on every wait and on the size of every answer; the only module that imports redis.

Failures are raised as RedisDown and close the connection, so that a late answer is never taken for that of another
command. An answer larger than anything that Tandem writes is such a failure, too. A command that Redis refuses has the
answer Refusal. A circuit breaker decides when to connect again; changes of state are logged, not every failure.

With sentinels each new connection begins with their answer to which server is the master, and with that server's own
word that it is. While a connection is open all are asked again now and then, beside its commands, and most of them
decide: a master that only its clients and some sentinel reach would otherwise keep them for ever.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.backoff import Backoff
from tandem.circuit_breaker import BreakerPolicy, CircuitBreaker
from tandem.cluster_state.redis_settings import Address, RedisSettings
from tandem.errors import ConfigError
from tandem.rpc.bounded_redis_reader import BoundedReader, ReplyTooLarge, most_bytes
from tandem.rpc.certificates import read_authorities
from tandem.rpc.redis_sentinel import MasterFinder, NoMaster, is_master

if TYPE_CHECKING:
    from redis.asyncio import Connection

_GREETING_BYTES = 1 << 16
"""Maximum bytes of Redis's replies while a connection is made."""
RECHECK_S = 5.0
"""Time between two searches for the master while a connection is open."""
_log = logging.getLogger(__name__)

Command = Sequence[str | bytes | int]
Reply = Any
"""A reply: bytes, int, None, a list of these, or a Refusal."""


class RedisDown(Exception):
    """Redis did not answer in time, or there is no connection; the message says why."""


class UntrustedReply(RedisDown):
    """A reply is larger than anything that Tandem writes: something else writes to these keys."""


class Refusal(Exception):
    """Error reply of Redis to one command; returned in place of its answer, never raised."""


@dataclass(slots=True, kw_only=True)
class LinkHealth:
    """Health of one connection, for metrics. Written by its link alone."""

    use: str
    is_up: bool = False
    connects: int = 0
    failures: int = 0
    reason: str = field(default="not connected yet")
    """Reason of the last failure."""


REDIS_BREAKER = BreakerPolicy(most_in_a_row=2, least_outcomes=math.inf, open=Backoff(first_s=0.25, most_s=3.0))
"""Allows a try every few seconds: each costs one connection."""


class RedisLink:
    """A connection that is used by one task, which sends one batch of commands at a time."""

    def __init__(
        self, settings: RedisSettings, breaker: CircuitBreaker, *, use: str, clock: Callable[[], float]
    ) -> None:
        """`use`: purpose of the connection, for metrics and logs. Raises ConfigError when redis is not installed."""
        self.health = LinkHealth(use=use)
        self._settings = settings
        self._breaker = breaker
        self._clock = clock
        self._connection: Connection | None = None
        self._errors, self._refusals = _error_classes()
        self._finder = (
            None
            if settings.sentinel is None
            else MasterFinder(settings.sentinel, self._ask_sentinel, timeout_s=settings.timeout_s)
        )
        self._server = settings
        """Settings for the server: with sentinels, the master that they named last."""
        self._search: asyncio.Task[RedisSettings | None] | None = None
        """Asks the sentinels while a connection is open; commands do not wait for it."""
        self._searched_s = 0.0

    @property
    def display_name(self) -> str:
        """Address of the server, for logs; before sentinels have answered, the master's name."""
        return self._server.display_name

    async def allowed(self) -> None:
        """Wait until the circuit breaker allows a try."""
        await asyncio.sleep(self._breaker.wait_s(self._clock()))

    async def execute(
        self,
        commands: Sequence[Command],
        *,
        vital: int = 0,
        patience_s: float = 0.0,
        fits: Callable[[Reply], bool] | None = None,
    ) -> list[Reply]:
        """Send commands together and return their answers in order. Raises RedisDown.

        `vital`: number of commands, from the first, whose refusal counts as a failure of Redis. `patience_s`: how long
        the server itself may wait before it answers, on top of the usual bound. `fits`: checks the form of each answer
        that is no refusal; one that does not fit counts as a failure of Redis.
        """
        replies = await self._bounded(commands, patience_s)
        if fits is not None and not all(isinstance(reply, Refusal) or fits(reply) for reply in replies):
            await self.close()
            raise self._failed("not a valid Redis reply")
        await self._judge(replies[:vital])
        return replies

    async def transact(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands as one MULTI/EXEC and return their answers; any refusal counts as a failure of Redis."""
        replies = await self._bounded([("MULTI",), *commands, ("EXEC",)], 0.0)
        results = replies[-1]
        if not isinstance(results, list):
            await self._judge([*replies, Refusal("the transaction was dropped")])
        results = [Refusal(str(each)) if isinstance(each, self._refusals) else each for each in results]
        await self._judge(results)
        return results

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        search, self._search = self._search, None
        try:
            if search is not None:
                search.cancel()
                await asyncio.gather(search, return_exceptions=True)
        finally:
            if connection is not None:
                await connection.disconnect(nowait=True)

    async def _bounded(self, commands: Sequence[Command], patience_s: float) -> list[Reply]:
        self._breaker.began(self._clock())
        try:
            await self._follow_master()
            async with asyncio.timeout(self._settings.timeout_s + patience_s):
                connection = self._connection or await self._connect()
                replies = await self._exchange(connection, commands)
        except TimeoutError:
            await self.close()
            raise self._failed(f"no answer within {self._settings.timeout_s:g} s") from None
        except ReplyTooLarge as error:
            await self.close()
            raise self._failed(str(error), UntrustedReply) from None
        except self._errors as error:
            await self.close()
            raise self._failed(str(error) or type(error).__name__) from None
        except BaseException:
            self._breaker.released()
            await self.close()  # the next caller must not get this one's answers
            raise
        return replies

    async def _follow_master(self) -> None:
        """With sentinels: find the master before connecting, and leave one that they no longer name. Raises NoMaster.

        A connection that is open never waits for them.
        """
        if self._finder is None:
            return
        if self._connection is not None and self._search is not None and self._search.done():
            server, self._search = self._search.result(), None
            if server is not None and server != self._server:
                _log.info("sentinels report a new master: %s (was %s)", server.display_name, self._server.display_name)
                await self.close()
                self._server = server
                return
        if self._connection is None:
            self._server = self._settings.for_server(await self._finder.find())
            self._searched_s = self._clock()
        elif self._search is None and self._clock() - self._searched_s >= RECHECK_S:
            self._searched_s = self._clock()
            self._search = asyncio.create_task(self._search_again(self._finder))

    async def _search_again(self, finder: MasterFinder) -> RedisSettings | None:
        try:
            return self._settings.for_server(await finder.find_by_majority())
        except NoMaster:
            return None  # no sentinel says otherwise

    async def _ask_sentinel(self, address: Address, command: Command) -> Reply:
        settings = self._settings.for_sentinel(address)
        connection = None
        try:
            connection = await self._opened(settings)
            (reply,) = await self._exchange(connection, [command])
        except self._errors as error:
            raise NoMaster(str(error) or type(error).__name__) from None
        finally:
            if connection is not None:
                await connection.disconnect(nowait=True)
        if isinstance(reply, Refusal):
            raise NoMaster(str(reply))
        return reply

    async def _connect(self) -> "Connection":
        connection = self._connection = await self._opened(self._server)
        if self._finder is not None:
            (role,) = await self._exchange(connection, [("ROLE",)])
            # Where ROLE is not allowed, the sentinels are believed.
            if not isinstance(role, Refusal) and not is_master(role):
                raise NoMaster(f"the sentinels point to {self._server.display_name}, which is not a master")
        self.health.connects += 1
        return connection

    async def _opened(self, settings: RedisSettings) -> "Connection":
        ca = settings.ca
        # In a thread: a hanging file system must block this link only. Read anew each time, since authorities change.
        authorities = None if ca is None else await asyncio.to_thread(read_authorities, Path(ca), "redis.ca")
        connection = _make_connection(settings, authorities)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # of theirs
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _exchange(self, connection: "Connection", commands: Sequence[Command]) -> list[Reply]:
        cast("BoundedReader", connection._reader).allow(most_bytes(commands))
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except self._refusals as refusal:
                replies.append(Refusal(str(refusal)))
        return replies

    async def _judge(self, replies: Sequence[Reply]) -> None:
        """Check that Redis executed the vital commands. Raises RedisDown."""
        for reply in replies:
            if isinstance(reply, Refusal):
                await self.close()  # after a failover the same address may lead to another server
                raise self._failed(str(reply))
        self._breaker.succeeded(self._clock())
        if not self.health.is_up:
            self.health.is_up = True
            _log.info("Redis at %s answers (%s)", self._server.display_name, self.health.use)

    def _failed(self, reason: str, kind: type[RedisDown] = RedisDown) -> RedisDown:
        self._breaker.failed(self._clock())
        self.health.failures += 1
        if self._finder is not None:
            self._finder.try_next_sentinel_first()
        if self.health.is_up or self.health.failures == 1:
            _log.warning("Redis at %s fails (%s): %s", self._server.display_name, self.health.use, reason)
        self.health.is_up, self.health.reason = False, reason
        return kind(reason)


def _error_classes() -> tuple[tuple[type[Exception], ...], type[Exception]]:
    try:
        from redis.exceptions import RedisError, ResponseError
    except ImportError as error:
        raise ConfigError(f"redis.url: {error.name} is not installed: `pip install 'tandem-serve[redis]'`") from None
    # ValueError, as asyncio's streams raise it for what no Redis would say; RecursionError, for lists within lists.
    # ConfigError, for a file of authorities that cannot be read now.
    return (RedisError, OSError, ValueError, EOFError, RecursionError, ConfigError, NoMaster), ResponseError


def _make_connection(settings: RedisSettings, authorities: str | None) -> "Connection":
    """`authorities`: trusted signers of the server's certificate, in PEM; None for those of the system."""
    from redis.asyncio import Connection, SSLConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "db": settings.database,
        "username": settings.username,
        "password": settings.password,
        # Timeouts and retries are RedisLink's.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    kind: Any = SSLConnection if settings.tls else Connection
    if settings.tls:
        options["ssl_ca_data"] = authorities

    class Bounded(kind):  # type: ignore[misc]
        """Bounds the bytes that its parser may read."""

        async def _connect(self) -> None:
            await super()._connect()
            self._reader: Any = BoundedReader(self._reader)
            self._reader.allow(_GREETING_BYTES)

    return cast("Connection", Bounded(**options))
