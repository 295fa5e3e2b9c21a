"""One HTTP connection: uvicorn's protocol with bounded heads, bounded waiting, and a `Link` for each request.

Closing a socket whose client is still sending resets it, and destroys an answer that the client has not read yet. So
after a final answer the connection waits for the client's own end, reading on meanwhile, within bounds of bytes and
time.
"""

import asyncio
import logging
import select
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.http.body.client_link import EXTENSION, WHOLE_ANSWER
from router.http.body.errors import error_object
from router.http.server.connection_limits import ConnectionTable
from router.http.server.request_head import MAX_HEADER_BYTES, HeadTooLarge, TargetTooLong, check_framing
from tandem.errors import InvalidRequest, ServingError, Unavailable

_MAX_URL_BYTES = 8 << 10
_MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""Beyond what the application itself refuses, the connection ends with the answer: a head might otherwise be
endless."""
_MOST_BEHIND_HEAD = 1 << 20
"""Bytes read and discarded after the answer to a refused head."""
_MOST_BEHIND_BODY = 256 << 20
"""Bytes read and discarded after an answer that came before its request's body had ended."""
_MOST_AHEAD = 64
"""Pipelined requests without an answer; a small one takes a hundred times its bytes here."""
_FRAMING = (b"content-length", b"transfer-encoding")
"""Headers of a request with a body."""
CLOSE_HEADER = (b"connection", b"close")
"""Header of an answer after which the connection is closed."""
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""The last one is Linux's; elsewhere a paused client's orderly end is noticed when its answer is written."""
_MAX_CHECK_S = 1.0
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")
"""uvicorn's logger without its warnings, which any client can cause; `ConnectionWatch.refused` counts these."""
_protocol_log.setLevel(logging.ERROR)


def _refusal(error: ServingError, *headers: str) -> bytes:
    """Build an answer without the application, the last one of its connection."""
    body, status = orjson.dumps(error_object(error)), HTTPStatus(error.http_status)
    line = f"HTTP/1.1 {status.value} {status.phrase}"
    head = (line, "content-type: application/json", "connection: close", f"content-length: {len(body)}", *headers)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class ConnectionWatch:
    """Closes overdue connections, which it periodically asks the table for."""

    def __init__(self, connections: "ConnectionTable[Connection]", loop: asyncio.AbstractEventLoop) -> None:
        self.table = connections
        self._loop = loop
        limits = connections.limits
        least_s = min(limits.head_timeout_s, limits.keep_alive_s, limits.write_timeout_s)
        self._check_s = min(_MAX_CHECK_S, least_s / 4)
        self._warned_s = -_WARN_EVERY_S
        self._logged_s = -_WARN_EVERY_S
        self._num_unlogged = 0
        self._timer = loop.call_later(self._check_s, self._check)

    def now_s(self) -> float:
        """The time on the table's clock."""
        return self._loop.time()

    def opened(self, connection: "Connection") -> bool:
        """Register a connection; False when it was refused."""
        gone = self.table.opened(connection, self.now_s())
        if gone is None:
            return True
        self._warn_full()
        if gone is not connection:
            gone.give_up()
        return gone is not connection

    def make_room(self, num_beside: int) -> bool:
        """Close the connection idle longest if there could be no other beside `num_beside` that are not open yet; False
        when all have a request in progress."""
        if len(self.table) + num_beside < self.table.limits.most:
            return True
        self._warn_full()
        if (gone := self.table.remove_idlest()) is not None:
            gone.give_up()
        return gone is not None

    def _warn_full(self) -> None:
        if self.now_s() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = self.now_s()
            _log.warning("%d connections are open: closing the one idle longest", self.table.limits.most)

    def refused(self, error: ServingError) -> None:
        """Log a malformed request, at a bounded rate: any client could otherwise fill the disk with such lines."""
        if self.now_s() - self._logged_s < _WARN_EVERY_S:
            self._num_unlogged += 1
            return
        more = f"; {self._num_unlogged} more were refused since the last such message" if self._num_unlogged else ""
        self._logged_s, self._num_unlogged = self.now_s(), 0
        _log.warning("refused a malformed HTTP request: %s%s", error, more)

    def close_idle(self, least_s: float) -> None:
        """Close the connections that have had no request for so long."""
        for connection in self.table.idle(self.now_s(), least_s):
            connection.leave_if_idle()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        try:
            for connection in self.table.overdue(self.now_s(), lambda one: one.transport.get_write_buffer_size()):
                connection.give_up()
            for connection in list(self.table.asking):
                connection.notice_leave()
        finally:
            # Whatever one connection does, the others keep their timeouts.
            self._timer = self._loop.call_later(self._check_s, self._check)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds; httptools itself collects heads of any size.

    uvicorn has no public interface for any of this: the overridden methods and attributes are internal, and may change
    with any of its versions. So pyproject.toml caps the version, and `tests/unit/router/http/server` tests everything
    that is relied on over real sockets.
    """

    _head_bytes = 0
    _unreported_bytes = 0
    """Bytes fed to the parser since its last callback: it collects one header of any length before it calls back."""
    _is_in_head = False
    _is_muted = False
    """Whether the parser is fed a head that no client has sent."""
    _is_receiving = False
    """Whether a request's head or body has begun and not ended."""
    _refused: ServingError | None = None
    """The error after which no more of this connection is read."""
    _most_behind: int | None = None
    """Bytes still read while it ends after an answer."""
    _links: "tuple[_DirectLink, ...]" = ()
    """Links of requests without a complete answer: several when a client pipelines requests."""

    def __init__(self, watch: ConnectionWatch, **others: Any) -> None:
        """`others`: arguments from uvicorn."""
        super().__init__(**others)
        self.logger = _protocol_log
        self.app = partial(_serve, self.app)
        self._watch = watch
        self._table = watch.table

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or refuse it when there is no room."""
        super().connection_made(transport)
        self._answers = _AnswerTransport(self)
        if not self._watch.opened(self):
            transport.write(_FULL)
            transport.close()

    def close_behind_answer(self) -> None:
        """Close after the last answer; the client may not have sent all of its request."""
        if self.is_ending:
            return
        if self._is_receiving or _has_come(self.transport):
            self._end_when_read(_MOST_BEHIND_BODY)
        else:
            self.transport.close()

    @property
    def is_ending(self) -> bool:
        """Whether nothing more will be written."""
        return self._most_behind is not None or self.transport.is_closing()

    def give_up(self) -> None:
        """Close it; what the client has not read by now is lost."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests, or discard what follows the last answer."""
        if self._most_behind is not None:
            self._most_behind -= len(data)
            if self._most_behind < 0:
                self.transport.close()
            return
        self._unreported_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._unreported_bytes > _MAX_HEAD_BYTES and self._refused is None:
            self._refused = HeadTooLarge(f"a header or chunk extension has more than {_MAX_HEAD_BYTES} bytes")
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        """Parse bytes of requests. No other protocol is spoken here: a request that offers to change to one is answered
        as if it did not. Raises httptools.HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if self._is_receiving:
                # The parser takes this request's body for the other protocol: as the body of another head it is read.
                self._is_muted = True
                framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
                self._is_muted = False

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request if no other answer is in progress, and end the connection. Called for errors of
        the parser, and for ours while it parses. `msg`: uvicorn's text."""
        cycle = self.cycle
        is_next = cycle is None or cycle.response_complete
        # Or this very request had a valid head, and its body is malformed.
        if is_next or not (self._is_in_head or self.pipeline or cycle.response_started):
            self.transport.write(_refusal(self._refused or InvalidRequest(msg)))
        self._refused = self._refused or InvalidRequest(msg)
        self._watch.refused(self._refused)
        self._lose_clients()
        self._end_when_read(_MOST_BEHIND_HEAD)

    def _end_when_read(self, most_bytes: int) -> None:
        """Close the connection when its client has closed it, has sent so many more bytes, or has taken too long."""
        if self.is_ending:
            return
        self._most_behind = most_bytes
        self._table.answered(self, self._watch.now_s(), is_sending=True)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def end_behind_answer(self) -> None:
        """End the connection after the answer in progress; the client's next request goes to another process."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not self.pipeline:
            cycle.keep_alive = False

    def leave_if_idle(self) -> None:
        """Close it if nothing is arriving. Otherwise a request would be lost with it, and its client reset."""
        if not self._is_receiving and not _has_come(self.transport):
            self.transport.close()

    def notice_leave(self) -> None:
        """Check whether the client has left: a paused connection, such as one with a pipelined request, is not read, so
        its end goes unnoticed."""
        if self.flow.read_paused and _has_hung_up(self.transport):
            self.transport.abort()

    def pause_writing(self) -> None:
        """Note that the client does not read its answer, which is allowed for a limited time."""
        super().pause_writing()
        self._table.unread(self, self._watch.now_s(), self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._table.read(self)

    def on_message_begin(self) -> None:
        if self._is_muted:
            return
        self._head_bytes = self._unreported_bytes = 0
        self._is_in_head = self._is_receiving = True
        self._table.head_begins(self, self.loop.time())
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_muted:
            return
        self.url += url  # all that uvicorn does with it
        self._unreported_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes > _MAX_URL_BYTES:
            self._refuse(TargetTooLong(f"the request's target is longer than {_MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header, or a trailer of a chunked body, which is ignored."""
        if self._is_muted:
            return
        if self._is_in_head:
            # All that uvicorn does with it.
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))
        self._unreported_bytes = 0
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"more than {_MAX_HEAD_BYTES} bytes of headers"))

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        if self._is_muted:
            return
        self._unreported_bytes = 0
        try:
            check_framing(self.headers, self.parser.get_http_version())
        except InvalidRequest as error:
            self._refuse(error)
        super().on_headers_complete()
        self._is_in_head = False
        # An exchange that is over closes here, and not while its client is still sending.
        self.cycle.transport = self._answers  # type: ignore[assignment]
        self._table.head_complete(self)
        if len(self.pipeline) > _MOST_AHEAD:
            self._refuse(InvalidRequest(f"more than {_MOST_AHEAD} requests sent ahead"))
        # The application has not begun: its task runs later.
        link = _DirectLink(self)
        self._links = (*self._links, link)
        self.scope["extensions"] = {EXTENSION: link}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported_bytes = 0
        if self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers):
            return  # only for the parser, see `_feed`
        super().on_message_complete()
        self._is_receiving = False

    def on_response_complete(self) -> None:
        """Handle the end of an answer: its last byte has been passed to the transport."""
        links = self._links
        if len(links) == 1 and links[0].answered():  # nearly always
            self._links = ()
        else:
            self._links = tuple([link for link in links if not link.answered()])
        if self._most_behind is not None:
            # Requests after the last answer get none.
            self.pipeline.clear()
            self._lose_clients()
        goes_on = bool(self.pipeline)
        if self._most_behind is None:
            # What uvicorn does, but without its own timer for idle connections: the table bounds their time.
            self.server_state.total_requests += 1
            if not self.transport.is_closing():
                if self.flow.read_paused:
                    self.flow.resume_reading()
                if self.pipeline:
                    self._start_asgi_task(*self.pipeline.pop())
        now_s = self.loop.time()
        if not goes_on:
            self._table.answered(self, now_s, is_sending=self._is_receiving)
        if num_bytes := self.transport.get_write_buffer_size():
            self._table.unread(self, now_s, num_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._table.closed(self)
        self._lose_clients()
        self._answers.lost()

    def _lose_clients(self) -> None:
        """Notify requests that get no answer any more."""
        for link in self._links:
            link.client_left()
        self._links = ()

    def _refuse(self, error: ServingError) -> NoReturn:
        """Raise from within the parser, which stops: `send_400_response` is called next."""
        self._refused = error
        raise error


def _has_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the kernel knows that the client has hung up, which it does before all data is read."""
    return (found := _poll(transport, _HUNG_UP)) is None or found


def _has_come(transport: asyncio.Transport) -> bool:
    """Whether there is data that the event loop has not seen yet."""
    return _poll(transport, select.POLLIN) or False


def _poll(transport: asyncio.Transport, events: int) -> bool | None:
    """Whether the kernel reports any of these events; None once the socket is closed, which TLS does before it says
    so."""
    sock = transport.get_extra_info("socket")
    if sock is None or (descriptor := sock.fileno()) < 0:
        return None
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


def _serve(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Call the application, which may send its whole answer in one message."""
    link: _DirectLink = scope["extensions"][EXTENSION]

    def either(message: Message) -> Awaitable[None]:
        return link.answer(message, send) if message["type"] == WHOLE_ANSWER else send(message)

    return app(scope, receive, either)


def _stays_open(cycle: RequestResponseCycle) -> bool:
    """Whether an answer that begins now leaves the connection open, and has somebody to read it."""
    is_wanted = cycle.keep_alive and CLOSE_HEADER not in cycle.default_headers
    return is_wanted and not cycle.response_started and not cycle.disconnected


class _AnswerTransport:
    """The transport that uvicorn's exchanges see: only the connection decides when to close it."""

    __slots__ = ("_connection", "write")

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        """None once it is lost: it holds its last exchange, which holds this."""
        self.write = connection.transport.write

    def is_closing(self) -> bool:
        return self._connection is None or self._connection.is_ending

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close_behind_answer()

    def lost(self) -> None:
        self._connection = None


class _DirectLink:
    """The `router.http.body.client_link.Link` of a request to this server."""

    def __init__(self, protocol: Connection) -> None:
        self._transport = protocol.transport
        self._write = protocol.transport.write
        self._flow = protocol.flow
        self._cycle: RequestResponseCycle | None = protocol.cycle
        """None once nothing more can be sent: its scope holds this link, and only a collection would free the two."""
        self._awaits_continue = protocol.expect_100_continue
        """Whether the client may be waiting with its body."""
        self._on_leave: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    async def answer(self, whole: Message, send: Send) -> None:
        cycle, flow = self._cycle, self._flow
        if cycle is None or not _stays_open(cycle) or self._awaits_continue or flow.write_paused:
            await send({"type": "http.response.start", "status": whole["status"], "headers": whole["headers"]})
            await send({"type": "http.response.body", "body": whole["body"], "more_body": False})
            return
        # What uvicorn does for the two messages.
        parts = [STATUS_LINE[whole["status"]]]
        for name, value in (*cycle.default_headers, *whole["headers"]):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n", whole["body"])
        self._write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()

    def write(self, body: bytes) -> bool:
        if self._cycle is None or self._cycle.disconnected:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return self._flow.write_paused

    def descriptor(self) -> int | None:
        transport = self._transport
        if self._cycle is None or self._cycle.disconnected or transport.is_closing():
            return None
        if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext") is not None:
            return None
        return int(transport.get_extra_info("socket").fileno())

    def write_rest(self, rest: bytes) -> bool:
        if self._cycle is None or self._cycle.disconnected:
            return False
        self._write(rest)
        return self._flow.write_paused

    def whole_body(self) -> bytes | None:
        return None if self._cycle is None or self._cycle.more_body else bytes(self._cycle.body)

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        self._on_leave = callback
        if callback is None:
            return
        if self._flow.read_paused:
            # The end of a connection goes unnoticed behind a body that is too large to be read.
            self._flow.resume_reading()
        if self._cycle is None or self._cycle.disconnected:
            callback()

    def answered(self) -> bool:
        """Whether the whole answer has been written, in which case the link has ended."""
        if self._cycle is not None and self._cycle.response_complete:
            self._cycle = None
        return self._cycle is None

    def client_left(self) -> None:
        """Record that the client left: uvicorn notifies only the newest request."""
        cycle, self._cycle = self._cycle, None
        if cycle is None or cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if self._on_leave is not None:
            self._on_leave()


_FULL = _refusal(Unavailable("too many connections, all of them with a request in progress"), "retry-after: 1")
