"""Checks whether workers can follow a grammar, once per grammar, in a process that can be killed.

Grammars are checked one at a time, of each tenant one in turn: a tenant's slow ones delay another's by the time limit
of one, and too many of one tenant are refused.
"""

import asyncio
import hashlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from router.sandbox.grammar_frames import FOLLOWED, LENGTH, REFUSED
from tandem.errors import InvalidRequest, Overloaded
from tandem.values.sampling import MAX_GRAMMAR_CHARS

_MAX_KEPT = 1024
_MAX_WAITING = 64
"""Grammars of one tenant."""
_START_S = 30.0
_TRIES = 3
_MAX_ANSWER_BYTES = 4 * MAX_GRAMMAR_CHARS + 1
_RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)


class GrammarChecker(Protocol):
    """Checks whether workers can follow a grammar."""

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        """Return the grammar for workers. Raises InvalidRequest, naming `param`, when none can follow it; Overloaded
        when too many of the tenant's wait."""


class GrammarProcess:
    """Checks grammars for one event loop; the process starts with the first one."""

    def __init__(
        self, tokenizer: Path, *, vocab_size: int, eos_token_ids: Sequence[int], compile_s: float, compile_bytes: int
    ) -> None:
        """`tokenizer`: a tokenizer.json. `compile_s`, `compile_bytes`: bounds on the compilation of one grammar."""
        ends = ",".join(map(str, eos_token_ids))
        self._arguments = [str(tokenizer), str(vocab_size), ends, str(compile_bytes)]
        self._compile_s = compile_s
        self._verdicts: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending: dict[str, dict[bytes, asyncio.Future[bytes]]] = {}
        """By tenant: what two tenants send alike is not one, or the second would wait for all that the first sent
        before."""
        self._turn = asyncio.Lock()
        # Alive while a grammar has one or waits for it.
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._process: Process | None = None

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        data = grammar.encode()
        key = hashlib.sha256(data).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judged(key, data, tenant)
        else:
            self._verdicts.move_to_end(key)
        if verdict.startswith(REFUSED):
            raise InvalidRequest(f"{param}: {verdict[1:].decode()}", param=param)
        # A grammar that was not rewritten is not stored twice.
        return verdict[1:].decode() or grammar

    async def close(self) -> None:
        """End the process, if one runs."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _judged(self, key: bytes, data: bytes, tenant: str) -> bytes:
        """Check the grammar for the tenant's first caller; its later callers, whose number `PreparationLimit` bounds,
        wait for the same verdict."""
        own = self._pending.get(tenant, {})
        pending = own.get(key)
        if pending is None:
            if len(own) >= _MAX_WAITING:
                raise Overloaded(f"{len(own)} grammars are waiting to be compiled", retry_after_s=_RETRY_AFTER_S)
            # A task of its own: its first caller may leave while others wait for it.
            pending = asyncio.ensure_future(self._judge(key, data, tenant))
            self._pending.setdefault(tenant, {})[key] = pending
        return await asyncio.shield(pending)

    async def _judge(self, key: bytes, data: bytes, tenant: str) -> bytes:
        turn = self._own.get(tenant)
        if turn is None:
            turn = self._own[tenant] = asyncio.Lock()
        try:
            async with turn, self._turn:
                # Another tenant may have sent the same meanwhile.
                if (verdict := self._verdicts.get(key)) is not None:
                    return verdict
                verdict = await self._compile(data)
        finally:
            del self._pending[tenant][key]
            if not self._pending[tenant]:
                del self._pending[tenant]
        if verdict == FOLLOWED + data:
            verdict = FOLLOWED
        self._verdicts[key] = verdict
        while len(self._verdicts) > _MAX_KEPT:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compile(self, data: bytes) -> bytes:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        try:
            async with asyncio.timeout(self._compile_s):
                return await _exchange(process, data)
        except TimeoutError:
            await self.close()
            return REFUSED + f"takes more than {self._compile_s:g} s to compile".encode()
        except (asyncio.IncompleteReadError, OSError, RuntimeError):  # uvloop raises the last one for a closed pipe
            await self.close()
            return REFUSED + b"needs too much memory to compile"

    async def _start(self) -> Process:
        for _ in range(_TRIES):
            if (process := await self._begun()) is not None:
                return process
        raise Overloaded("grammars cannot be compiled now", retry_after_s=_RETRY_AFTER_S)

    async def _begun(self) -> Process | None:
        """Start the process; None if it died at the start, as one forked beside gRPC's threads may."""
        command = [sys.executable, "-m", "router.sandbox.grammar_worker", *self._arguments]
        # A single arena: further ones reserve address space, and the limit would have to be far above the real use.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        try:
            async with asyncio.timeout(_START_S):
                await _read_answer(process)
        except TimeoutError:
            await _end(process)
            log.error("the grammar compiler process did not start within %g s", _START_S)
            raise Overloaded("grammars cannot be compiled now", retry_after_s=_RETRY_AFTER_S) from None
        except (asyncio.IncompleteReadError, OSError) as error:
            await _end(process)
            log.error("the grammar compiler process failed to start: %s", type(error).__name__)
            return None
        return process


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):  # it may just have ended by itself
        process.kill()
    await process.wait()


async def _exchange(process: Process, data: bytes) -> bytes:
    if process.stdin is None:
        raise OSError("no pipe")
    process.stdin.write(LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    return await _read_answer(process)


async def _read_answer(process: Process) -> bytes:
    if process.stdout is None:
        raise OSError("no pipe")
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if size > _MAX_ANSWER_BYTES:
        raise OSError("the answer is too large")
    return await process.stdout.readexactly(size)
