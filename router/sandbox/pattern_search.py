"""Searches answers for a client's regular expression, in a process that is killed when it takes too long."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from tandem.errors import InvalidRequest, Overloaded

MAX_PATTERN_CHARS = 512
_MOST_S = 5.0
_MOST_WAIT_S = 15.0
_AT_ONCE = 2
_TRIES = 3
_BEGUN = b"."
"""First byte that the process writes."""


class PatternSearch:
    """Runs a few searches at once, one per tenant. One instance serves all calls of a server."""

    def __init__(self, *, most_s: float = _MOST_S, most_wait_s: float = _MOST_WAIT_S) -> None:
        self._most_s = most_s
        self._most_wait_s = most_wait_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # Alive while a caller holds one or waits for it: a tenant's slow patterns delay only that tenant.
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._most_wait_s):
                await turns.acquire()
        except TimeoutError:
            raise Overloaded("too many searches are queued", retry_after_s=self._most_s) from None
        try:
            yield
        finally:
            turns.release()

    async def check(self, pattern: str, param: str, tenant: str) -> None:
        """Check a regular expression before anything is computed for it. Raises InvalidRequest.

        This also runs in the process, because compiling a pattern of a few hundred characters may take seconds.
        """
        if not 1 <= len(pattern) <= MAX_PATTERN_CHARS:
            raise InvalidRequest(f"{param} must have 1 to {MAX_PATTERN_CHARS} characters", param=param)
        await self.find(pattern, [], param, tenant)

    async def find(self, pattern: str, texts: Sequence[str], param: str, tenant: str) -> list[str | None]:
        """Return the first match in each text: its first group, if there is one.

        Raises InvalidRequest for a pattern that is invalid, or takes too long, or too much memory; Overloaded when
        others take so long that it gets no turn.
        """
        own = self._own.get(tenant)
        if own is None:
            own = self._own[tenant] = asyncio.Semaphore(1)
        async with self._turn(own), self._turn(self._turns):
            reply = await self._search([pattern, list(texts)])
        if not reply:
            reason = f"searching takes more than {self._most_s:g} s, or too much memory"
            raise InvalidRequest(f"{param}: {reason}", param=param)
        answer = json.loads(reply)
        if "error" in answer:
            raise InvalidRequest(f"{param}: {answer['error'][:100]}", param=param)
        found: list[str | None] = answer["found"]
        return found

    async def _search(self, query: list[object]) -> bytes:
        """Run a query; return nothing when it took too long or too much memory."""
        for _ in range(_TRIES):
            reply = await self._try(query)
            if reply.startswith(_BEGUN):
                return reply.removeprefix(_BEGUN)
        raise Overloaded("patterns cannot be searched now", retry_after_s=1.0)

    async def _try(self, query: list[object]) -> bytes:
        """Return _BEGUN and the reply; nothing from a process that died at the start, as one forked beside gRPC's
        threads may.
        """
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pattern_worker.py"))]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        try:
            async with asyncio.timeout(self._most_s):
                reply, _ = await process.communicate(json.dumps(query).encode())
        except TimeoutError:
            return _BEGUN
        except RuntimeError:
            return b""  # uvloop raises this for a pipe without a reader
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                process.kill()
            await process.wait()
        return reply
