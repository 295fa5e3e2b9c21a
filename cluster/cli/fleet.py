"""Commands that change a running cluster, and `tandem ps`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from cluster.control.wire import ControlReply
import socket

from pydantic import ValidationError

from cluster.control.wire import ControlMessage, ControlReply, encode_message
from tandem.process.runtime_folder import is_trusted_peer

_CONNECT_S = 5.0


class NoCluster(Exception):
    """No cluster answers on the socket, or it stopped before its reply was complete."""


def send_request(path: Path, request: ControlMessage) -> Iterator[ControlReply]:
    """Send a request and yield the replies up to the last; a change may take any time. Raises NoCluster."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_CONNECT_S)
        try:
            link.connect(str(path))
        except OSError as error:
            raise NoCluster(
                f"no cluster answers at {path} ({error.strerror or error}): start one with `tandem up`, "
                "or give its HTTP port with --port"
            ) from None
        try:
            if not is_trusted_peer(link):
                raise NoCluster(f"another user answers at {path}")
            link.sendall(encode_message(request))
            link.settimeout(None)
            with link.makefile("rb") as lines:
                for line in lines:
                    reply = ControlReply.model_validate_json(line)
                    yield reply
                    if reply.done is not None:
                        return
        except (OSError, ValidationError) as error:
            raise NoCluster(f"no cluster answers at {path}: {error}") from None
    raise NoCluster("the cluster stopped before the change was complete")


PortOption = Annotated[int, typer.Option(help="HTTP port of the cluster; its control socket is named after it.")]
SocketOption = Annotated[Path | None, typer.Option(help="Path of the control socket, if [b]control_socket[/b] is set.")]
_ROLES = ("prefill", "decode", "router")
_LEAVING_STATES = ("retiring", "abandoned", "exited")
_EXIT_NOT_DONE = 1
_EXIT_INTERRUPTED = 130


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="prefill=N|decode=N ...", help="Number of workers per pool.")],
    port: PortOption = 8000,
    socket: SocketOption = None,
) -> None:
    """Change the number of workers of a running cluster; new ones serve before others leave."""
    from cluster.control.wire import ScaleRequest

    counts = {}
    for size in sizes:
        name, _, count = size.partition("=")
        if name not in ("prefill", "decode") or name in counts or not count.isascii() or not count.isdigit():
            raise typer.BadParameter(f"{size!r} is not prefill=N or decode=N, each at most once")
        counts[name] = int(count)
    _change(ScaleRequest, counts, port, socket)


def flip(
    to: Annotated[str, typer.Argument(metavar="prefill|decode", help="The pool that gains a worker.")],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Proceed even if this takes the last prefill worker.")
    ] = False,
    port: PortOption = 8000,
    socket: SocketOption = None,
) -> None:
    """Move a worker of a running cluster from the other pool to this one."""
    from cluster.control.wire import FlipRequest

    if to not in ("prefill", "decode"):
        raise typer.BadParameter(f"{to!r} is neither prefill nor decode")
    if to == "decode" and not yes:
        _require_another_prefill_worker(port, socket)
    _change(FlipRequest, {"to": to}, port, socket)


def restart(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="prefill|decode|router|NAME ...", help="Roles, or processes such as decode-0; default: all."
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place", help="Stop each worker before starting its replacement, when there is no room for both."
        ),
    ] = False,
    port: PortOption = 8000,
    socket: SocketOption = None,
) -> None:
    """Replace the processes of a running cluster one after another, without losing a request."""
    from cluster.control.wire import RestartRequest

    roles = tuple(one for one in which or () if one in _ROLES)
    names = tuple(one for one in which or () if one not in _ROLES)
    for name in names:
        role, _, index = name.partition("-")
        if role not in _ROLES or not index.isascii() or not index.isdigit():
            raise typer.BadParameter(f"{name!r} is neither a role ({', '.join(_ROLES)}) nor a process such as decode-0")
    _change(RestartRequest, {"roles": roles, "names": names or None, "in_place": in_place or None}, port, socket)


def abort(port: PortOption = 8000, socket: SocketOption = None) -> None:
    """Abort the change in progress, including one requested elsewhere; finished steps stay."""
    from cluster.control.wire import AbortRequest

    _change(AbortRequest, {}, port, socket)


def ps(port: PortOption = 8000, socket: SocketOption = None) -> None:
    """Show the processes of a running cluster and their pids."""
    from cluster.control.wire import StatusRequest

    for reply in _answers(StatusRequest, {}, port, socket):
        for one in reply.processes or ():
            print(f"{one.name:<12} {one.state:<12} pid {one.pid or '-':<9} {one.address}")
        if reply.changing:
            print("a change is in progress")


def _require_another_prefill_worker(port: int, socket: Path | None) -> None:
    """Exit the command if a flip would leave no prefill worker."""
    from rich.console import Console
    from rich.text import Text

    from cluster.control.wire import StatusRequest

    processes = [one for reply in _answers(StatusRequest, {}, port, socket) for one in reply.processes or ()]
    staying = [one.name for one in processes if one.role == "prefill" and one.state not in _LEAVING_STATES]
    if len(staying) != 1:
        return
    warning = (
        f"warning: {staying[0]} is the last prefill worker: without it, decode workers compute all prompts themselves, "
        "which delays answers in progress. Nothing was changed; add --yes to proceed."
    )
    Console(stderr=True, highlight=False).print(Text(warning, style="bold yellow"), soft_wrap=True)
    raise typer.Exit(_EXIT_NOT_DONE)


def _change(kind: type, fields: Mapping[str, object], port: int, socket: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    err = Console(stderr=True, highlight=False)
    try:
        for reply in _answers(kind, fields, port, socket):
            if reply.progress is not None:
                err.print(Text(reply.progress, style="dim"), soft_wrap=True)
    except KeyboardInterrupt:
        err.print("Interrupting the command does not cancel the change; `tandem abort` does.")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    err.print("done")


def _answers(kind: type, fields: Mapping[str, object], port: int, socket: Path | None) -> Iterator["ControlReply"]:
    """Yield the cluster's replies, and exit the command if the change is not done."""
    from pydantic import ValidationError
    from rich.console import Console
    from rich.text import Text

    from cluster.control.server import default_path
    from cluster.control.wire import MalformedRequest

    reason: str | None = None
    try:
        request = cast("ControlMessage", kind(**fields))
        for reply in send_request(socket or default_path(port), request):
            yield reply
            reason = reply.reason
    except ValidationError as error:
        wrong = error.errors()[0]
        raise typer.BadParameter(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    except (NoCluster, MalformedRequest) as error:
        reason = str(error)
    if reason is not None:
        Console(stderr=True, highlight=False).print(Text(f"not done: {reason}", style="red"), soft_wrap=True)
        raise typer.Exit(_EXIT_NOT_DONE)
