"""What a client's regular expression finds in its answers: in a process that is killed when it takes too long."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tandem.errors import InvalidRequest, Overloaded

MAX_PATTERN_CHARS = 512
_MOST_S = 5.0
_MOST_WAIT_S = 15.0
_AT_ONCE = 2


class PatternSearch:
    """Searches, a few at once. One for all calls of a door."""

    def __init__(self, *, most_s: float = _MOST_S, most_wait_s: float = _MOST_WAIT_S) -> None:
        self._most_s = most_s
        self._most_wait_s = most_wait_s
        self._turns = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._most_wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded("too many searches wait for their turn", retry_after_s=self._most_s) from None
        try:
            yield
        finally:
            self._turns.release()

    async def check(self, pattern: str, param: str) -> None:
        """Raises InvalidRequest for what is no regular expression, before anything is computed for it.

        Here too, because to compile one of a few hundred characters may take seconds.
        """
        if not 1 <= len(pattern) <= MAX_PATTERN_CHARS:
            raise InvalidRequest(f"{param}: 1 to {MAX_PATTERN_CHARS} characters", param=param)
        await self.find(pattern, [], param)

    async def find(self, pattern: str, texts: Sequence[str], param: str) -> list[str | None]:
        """What is found first in each text: the first group, if there is one.

        Raises InvalidRequest for a pattern that is none, or takes too long, or too much memory; Overloaded when others'
        take so long that it has no turn.
        """
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pattern_worker.py"))]
        async with self._turn():
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            try:
                async with asyncio.timeout(self._most_s):
                    told, _ = await process.communicate(json.dumps([pattern, list(texts)]).encode())
            except TimeoutError:
                told = b""
            finally:
                with suppress(ProcessLookupError):  # it has ended by itself
                    process.kill()
                await process.wait()
        if not told:
            raise InvalidRequest(f"{param}: searching takes more than {self._most_s:g} s, or much memory", param=param)
        answer = json.loads(told)
        if "error" in answer:
            raise InvalidRequest(f"{param}: {answer['error'][:100]}", param=param)
        found: list[str | None] = answer["found"]
        return found
