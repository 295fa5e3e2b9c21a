"""Keeps a session with every worker that the directory names: connects, and reconnects after a loss.

An open session outlives its address: a directory that drops a worker only ends the attempts to reach it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from types import TracebackType

import grpc
import grpc.aio

from router.fleet.session_carriers import Connect, DirectFailed
from router.fleet.session_wire import ProtocolError
from router.fleet.worker_session import SessionListener, SessionSettings, WorkerSession
from router.types.worker_view import WorkerKey
from router.workers.expected_workers import ExpectedWorkers
from router.workers.registry import WorkerRejected
from tandem.backoff import Backoff
from tandem.errors import ConfigError
from tandem.rpc.cluster_grpc import ChannelOpener
from tandem.rpc.worker_directory import WorkerAddress, WorkerDirectory
from tandem.values.roles import WorkerRole

logger = logging.getLogger(__name__)

RECONNECTS = Backoff(growth=1.25)
"""Slow growth: a worker restarts within a second or two, and its requests wait for it to be found."""
_STAYS_S = 60.0
"""How long sessions with a worker begin over gRPC alone after a direct connection was not possible."""


class WorkerFleet:
    """All sessions of one router; an async context manager."""

    def __init__(
        self,
        *,
        directory: WorkerDirectory,
        listener: SessionListener,
        open_channel: ChannelOpener,
        settings: SessionSettings,
        rng: Random,
        connect: Connect | None = None,
        knock: Callable[[str], Awaitable[None]] | None = None,
        backoff: Backoff | None = None,
        expected: ExpectedWorkers | None = None,
    ) -> None:
        """`connect`: opens connections to workers' direct ports; None: sessions stay with gRPC. `knock`: finds out
        whether anybody listens at an address, before a channel is opened there again. `expected` is informed of every
        worker that is found or lost.
        """
        self._directory = directory
        self._listener = listener
        self._open_channel = open_channel
        self._connect = connect
        self._knock = knock
        self._settings = settings
        self._rng = rng
        self._backoff = backoff or RECONNECTS
        self._expected = expected
        self._stack = AsyncExitStack()
        self._follower: asyncio.Task[None] | None = None
        self._wanted: frozenset[WorkerAddress] = frozenset()
        self._keepers: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._in_session: dict[WorkerAddress, WorkerKey] = {}
        self._stays_until_s: dict[WorkerAddress, float] = {}
        """When to try for a direct connection again: it costs a wait, in which the worker cannot be used."""

    async def __aenter__(self) -> "WorkerFleet":
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._follower = tasks.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._follower is not None:
            self._follower.cancel()
        # Closed without `error`: the task group would wrap it in a group of its own.
        await self._stack.aclose()

    def addresses(self) -> dict[WorkerKey, str]:
        """The address of each worker whose session is open."""
        return {key: address.address for address, key in self._in_session.items()}

    async def _follow(self) -> None:
        keepers = self._keepers
        async with asyncio.TaskGroup() as tasks:
            async for addresses in self._directory.watch():
                self._wanted = addresses
                if self._expected is not None:
                    self._expected.named({one.address for one in addresses if one.role is WorkerRole.DECODE})
                for gone in keepers.keys() - addresses - self._in_session.keys():
                    keepers.pop(gone).cancel()
                    self._stays_until_s.pop(gone, None)
                for new in addresses - keepers.keys():
                    keepers[new] = tasks.create_task(self._keep(new))

    async def _keep(self, address: WorkerAddress) -> None:
        num_failures = 0
        logged = ""
        while address in self._wanted:
            unreached = await self._unreached(address) if num_failures else None
            reason, lived = unreached or await self._converse(address)
            num_failures = 1 if lived else num_failures + 1
            if not lived and reason != logged:
                logger.warning("no session with %s: %s", address.address, reason)
            logged = reason
            await asyncio.sleep(self._backoff.wait_s(num_failures, self._rng))
        # Reached only when a session outlived its address: otherwise the code that cancels this task removes it.
        del self._keepers[address]
        self._stays_until_s.pop(address, None)

    async def _unreached(self, address: WorkerAddress) -> tuple[str, bool] | None:
        """Return, as `_converse` does, that nobody listens there; None: somebody does, or it is no address.

        Many workers may be gone at once, and a channel that fails costs much.
        """
        if self._knock is None:
            return None
        try:
            async with asyncio.timeout(self._settings.hello_timeout_s):
                await self._knock(address.address)
        except ConfigError:
            return None  # the channel says it, too
        except OSError:
            return "nobody listens there", False
        return None

    async def _open_session(self, channel: grpc.aio.Channel, address: WorkerAddress) -> WorkerSession:
        """Exchange HELLOs; where no direct connection is possible, again and for a session that stays with gRPC."""
        opened = partial(WorkerSession.open, channel, self._settings, num_workers=len(self._wanted))
        now_s = asyncio.get_running_loop().time()
        if self._connect is not None and now_s >= self._stays_until_s.get(address, 0.0):
            try:
                return await opened(address.address, self._connect)
            except DirectFailed as error:
                session = await opened()
                # Not before: a worker that has just died says nothing about the way to its successor's port.
                self._stays_until_s[address] = now_s + _STAYS_S
                logger.warning("the session with %s remains on gRPC: %s", address.address, error)
                return session
        return await opened()

    async def _converse(self, address: WorkerAddress) -> tuple[str, bool]:
        """Run one session; return why it ended, and whether it was ever open."""
        try:
            async with AsyncExitStack() as until_moved:
                channel = await until_moved.enter_async_context(self._open_channel(address.address))
                session = await self._open_session(channel, address)
                if session.info.is_direct:
                    # It has done its part, and takes 56 KB and a connection.
                    await until_moved.aclose()
                if session.info.role is not address.role:
                    session.close()
                    return f"expected a {address.role.value} worker, found a {session.info.role.value} worker", False
                self._in_session[address] = session.info.key
                if self._expected is not None:
                    self._expected.found(address.address, session.info.key)
                try:
                    return await session.converse(self._listener), True
                finally:
                    del self._in_session[address]
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}", False
        except TimeoutError:
            return f"no hello within {self._settings.hello_timeout_s:g} s", False
        except (ProtocolError, WorkerRejected, ConfigError, OSError) as error:
            return str(error), False
