"""A command in a pseudo-terminal: what it shows, and keys pressed in it."""

import asyncio
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0


class Terminal:
    """A `tandem` command in a terminal of its own."""

    def __init__(self, leader: int, follower: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.follower = follower
        self._leader = leader
        self._read = bytearray()
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(leader, self._take)

    def _take(self) -> None:
        self._read += os.read(self._leader, 1 << 16)
        self._more.set()

    def press(self, key: str) -> None:
        self._read.clear()
        os.write(self._leader, key.encode())

    async def shows(self, text: str) -> None:
        """Until it has written this since the last key."""
        async with asyncio.timeout(WAIT_S):
            while text.encode() not in self._read:
                self._more.clear()
                await self._more.wait()

    async def ends(self, status: int) -> None:
        """Wait for its end, with this exit code."""
        async with asyncio.timeout(WAIT_S):
            assert await self.process.wait() == status

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._leader)
        os.close(self._leader)
        os.close(self.follower)


@asynccontextmanager
async def terminal(*arguments: str, **environment: str) -> AsyncIterator[Terminal]:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, 120))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli.main", *arguments),
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    shown = Terminal(leader, follower, process)
    try:
        yield shown
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shown.close()
