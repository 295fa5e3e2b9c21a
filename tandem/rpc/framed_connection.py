"""Messages with their length before them over one connection: no task, and no future, for a message.

What is to be sent waits with the handler, which is asked for it once per turn of the event loop. So whatever a process
says to one peer in one turn is one write, and of what a peer does not read, only a bounded part waits here.

A side that has nothing more to say sends an empty frame, and its peer then closes the connection: the end of one that
was finished can be told from the death of its process, and whoever closes has read everything.
"""

import asyncio
from typing import Any, Protocol

LENGTH_BYTES = 4
"""Before every frame: its number of bytes, least significant first."""
MAX_FRAME_BYTES = 32 << 20
_END = bytes(LENGTH_BYTES)
_WRITE_BYTES = 256 << 10
"""Bytes after which frames are written before the next ones are asked for."""
_WRITES_PER_TURN = 4


class FrameError(Exception):
    """The peer sent something that is no frame."""


class FrameHandler(Protocol):
    """Whoever a connection belongs to. Called on the event loop."""

    def next_frame(self) -> bytes | None:
        """Return the next frame to send, which is not empty; None: there is none now."""
        ...

    def on_frame(self, frame: bytes) -> None:
        """Handle a frame. What it raises ends the connection."""
        ...

    def on_lost(self, error: Exception | None) -> None:
        """Handle the end, which comes once.

        `error`: None when either side has finished, or this one aborted; an OSError when the network or the peer broke
        off; FrameError; or what the handler raised.
        """
        ...


class FramedConnection(asyncio.Protocol):
    """One connection; `handler` may be replaced at any time, also while it handles a frame."""

    def __init__(self, handler: FrameHandler, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.handler = handler
        self.max_frame_bytes = max_frame_bytes
        self.lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._partial = bytearray()
        """Bytes of a frame that is not complete."""
        self._can_write = False
        self._is_due = False
        """Whether a write is due in this turn."""
        self._is_finishing = False
        self._has_ended = False
        """Whether the end that is to come is in order."""

    @property
    def was_open(self) -> bool:
        """Whether the connection was ever open."""
        return self._transport is not None

    def wake(self) -> None:
        """Ask the handler for frames, later in this turn, or as soon as the peer has read enough."""
        if self._can_write and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write)

    def finish(self) -> None:
        """Tell the peer, after the handler's last frame, that there are no more; it then closes the connection."""
        self._is_finishing = True
        self.wake()

    def abort(self) -> None:
        """Close the connection at once; what the peer has not read is dropped."""
        self._has_ended = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Called by the event loop: the connection is open."""
        self._transport = transport
        self._can_write = True
        self.wake()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: hand over all frames that are complete."""
        if self.lost.is_set():
            return
        try:
            if self._partial:
                self._partial += data
                del self._partial[: self._hand_over(self._partial)]
            elif (num_bytes := self._hand_over(data)) < len(data):
                self._partial += data[num_bytes:]
        except Exception as error:  # noqa: BLE001  # whatever the handler raises is its connection's end
            self._lose(_of_handler(error))

    def _hand_over(self, received: bytes | bytearray) -> int:
        """Return how many bytes of it were whole frames."""
        at, end = 0, len(received)
        while at + LENGTH_BYTES <= end:
            begin = at + LENGTH_BYTES
            size = int.from_bytes(received[at:begin], "little")
            if size > self.max_frame_bytes:
                raise FrameError(f"a frame of {size} bytes: at most {self.max_frame_bytes} are allowed")
            if begin + size > end:
                break
            at = begin + size
            if not size:
                self._lose(None)
                return end
            self.handler.on_frame(bytes(received[begin:at]))
            if self.lost.is_set():
                return end
        return at

    def pause_writing(self) -> None:
        """Called by the event loop: the peer does not read fast enough."""
        self._can_write = False

    def resume_writing(self) -> None:
        """Called by the event loop: the peer has read."""
        self._can_write = True
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop: the connection is over."""
        self._lose(None if self._has_ended else exc or ConnectionResetError("the peer is gone"))

    def _write(self) -> None:
        self._is_due = False
        if self.lost.is_set():
            return
        try:
            for _ in range(_WRITES_PER_TURN):
                if not (parts := self._next_parts()):
                    break
                self._transport.write(b"".join(parts))
            else:
                self.wake()
                return
            if self._is_finishing and self._can_write and not self._has_ended:
                self._has_ended = True
                self._transport.write(_END)
        except Exception as error:  # noqa: BLE001  # frames are missing now: the peer must not go on without them
            self._lose(_of_handler(error))

    def _next_parts(self) -> list[bytes]:
        parts: list[bytes] = []
        num_bytes = 0
        while self._can_write and num_bytes < _WRITE_BYTES and (frame := self.handler.next_frame()) is not None:
            parts += (len(frame).to_bytes(LENGTH_BYTES, "little"), frame)
            num_bytes += len(frame)
        return parts

    def _lose(self, error: Exception | None) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._can_write = False
            self._partial = bytearray()
            self._transport.abort()
            self.handler.on_lost(error)


def _of_handler(error: Exception) -> Exception:
    """Tell an OSError that a handler raised from those of the network."""
    if not isinstance(error, OSError):
        return error
    failure = RuntimeError(f"a message could not be handled: {error!r}")
    failure.__cause__ = error
    return failure
