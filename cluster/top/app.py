"""`tandem top`: a live view of a cluster in the terminal, from the status of its routers.

A router that does not answer is named and retried; the others are shown meanwhile.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cluster.router_client import ChatClient, ClientError
from cluster.top.status import ClusterStatus, SortOrder, merge_statuses
from cluster.top.view import View

EXIT_UNREACHABLE = 1


class Watch:
    """Latest status of the routers, and how it is displayed."""

    def __init__(self, clients: Sequence[ChatClient], *, interactive: bool) -> None:
        self._clients = clients
        self._interactive = interactive
        self._status: ClusterStatus | None = None
        self._heard_s = 0.0
        self._errors: list[str] = []
        self._order = SortOrder.NAME
        self._reverse = False
        self.changed = asyncio.Event()
        self.over = False

    @property
    def is_known(self) -> bool:
        """Whether any router has answered so far."""
        return self._status is not None

    @property
    def errors(self) -> Sequence[str]:
        """Errors of the routers that did not answer the last time."""
        return self._errors

    async def refresh(self) -> None:
        """Query all routers at once; the earlier status stays when none of them answers."""
        answers = await asyncio.gather(*map(_status, self._clients))
        self._errors = [str(one) for one in answers if isinstance(one, ClientError)]
        if statuses := [one for one in answers if isinstance(one, ClusterStatus)]:
            self._status = merge_statuses(statuses)
            self._heard_s = asyncio.get_running_loop().time()

    def press(self, key: str) -> None:
        """Handle a key of the user; unknown keys do nothing."""
        match key:
            case "q" | "Q" | "\x1b":
                self.over = True
            case "s" | "S":
                self._order = self._order.following()
            case "r" | "R":
                self._reverse = not self._reverse
        self.changed.set()

    def quit(self) -> None:
        """Quit, like the user's q."""
        self.press("q")

    def view(self) -> View:
        return View(
            status=self._status,
            errors=tuple(self._errors),
            age_s=asyncio.get_running_loop().time() - self._heard_s,
            num_routers=len(self._clients),
            order=self._order,
            reverse=self._reverse,
            interactive=self._interactive,
        )


async def _status(client: ChatClient) -> ClusterStatus | ClientError:
    try:
        return await client.status(ClusterStatus.read)
    except ClientError as error:
        return error


async def top(clients: Sequence[ChatClient], *, interval_s: float, once: bool, console: Console) -> int:
    """Show the status until the user quits, or `once`, and return the exit code; closes the clients, one per router."""
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
        watch = Watch(clients, interactive=not once)
        await watch.refresh()
        if once:
            return _print(watch, console)
        with _keys(watch.press), Live(watch.view(), console=console, screen=True, auto_refresh=False) as live:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, watch.quit)
            try:
                await _follow(watch, live, interval_s)
            finally:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    return 0


def _print(watch: Watch, console: Console) -> int:
    if watch.is_known:
        console.print(watch.view())
        return 0
    errors = Console(stderr=True, highlight=False)
    for error in watch.errors:
        errors.print(Text(f"error: {error}", style="red"), soft_wrap=True)
    return EXIT_UNREACHABLE


async def _follow(watch: Watch, live: Live, interval_s: float) -> None:
    """Query once per interval, and show at once what a key changes."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + interval_s
    while not watch.over:
        live.update(watch.view(), refresh=True)
        watch.changed.clear()
        try:
            async with asyncio.timeout_at(due_s):
                await watch.changed.wait()
        except TimeoutError:
            await watch.refresh()
            due_s = loop.time() + interval_s


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with each key, where there is a keyboard; the terminal's settings are restored afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        pressed = os.read(descriptor, 64).decode(errors="replace")
        # More input after an escape belongs to the same key, such as an arrow.
        for key in () if len(pressed) > 1 and pressed[0] == "\x1b" else pressed or "q":
            press(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
