"""Writes streamed tokens to their clients natively: one call for each message of a worker, however many streams it has.

Most tokens of most streams are plain text for a plain connection, and differ from the one before in nothing but that
text. Native code (csrc/) writes those straight from a message's columns to the clients' sockets; it keeps the few bytes
around the text, and the texts of the vocabulary escaped for JSON. Everything else comes back to Python token by token,
which first learns of what was written: tokens with part of a character, special tokens and those that may stop, any
event, a client that does not read, and every `MOST_TOKENS`th token, or the first after `MOST_S`, so that no count is
further behind.

Without a compiler, over TLS, and under an event loop that holds writes back, all tokens go through Python, and clients
see no difference.
"""

import ctypes
import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from router.types.session_events import StreamOffer
from tandem.native.build import NativeUnavailable, Recipe, build
from tandem.native.library import NativeLibrary

RECIPE = Recipe(
    name="native-streams",
    sources=Path(__file__).parent / "csrc",
    flags=("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"),
)
MOST_TOKENS = 32
MOST_S = 1.0
_AGAIN_S = 1.0
"""Pause after a socket could not be duplicated: the process has no more descriptors."""
_WARN_EVERY_S = 60.0
_LEAST_COLUMNS = 256
_log = logging.getLogger(__name__)


class StreamRoom:
    """How many streams of all sessions may be written natively: each has a descriptor of its own meanwhile."""

    def __init__(self, most: int) -> None:
        self.most = most
        """0 where native code is not to be had."""
        self.num_open = 0
        self.again_s = 0.0
        """When to try again, on `time.monotonic`, after there was no descriptor."""
        self.num_full = self.num_without_descriptor = 0
        """Tokens that Python wrote while there was no room, or no descriptor, for a further stream."""
        self._full_warned_s = self._descriptor_warned_s = -math.inf

    def on_opened(self, now_s: float) -> None:
        """Count one more stream; warn when that was the last one, at a bounded rate."""
        self.num_open += 1
        if self.num_open == self.most and now_s - self._full_warned_s >= _WARN_EVERY_S:
            self._full_warned_s = now_s
            _log.warning(
                "%d streams are written natively, and no more may be (an eighth of the limit of open files): Python "
                "writes the tokens of further ones, for more processor time; raise `ulimit -n`, or run more routers",
                self.most,
            )

    def on_no_descriptor(self, now_s: float) -> None:
        """Open no stream for a while; warn at a bounded rate."""
        self.again_s = now_s + _AGAIN_S
        if now_s - self._descriptor_warned_s >= _WARN_EVERY_S:
            self._descriptor_warned_s = now_s
            _log.warning(
                "a client's socket could not be duplicated, with %d streams written natively: Python writes the tokens "
                "of further ones, for more processor time; are there no more descriptors (`ulimit -n`)?",
                self.num_open,
            )


class NativeStreams:
    """The streams of one session that native code writes. Belongs to one thread."""

    def __init__(self, library: NativeLibrary, room: StreamRoom) -> None:
        self._room = room
        self._new = library.bind("native_streams_new", "", "p")
        self._free = library.bind("native_streams_free", "p")
        self._open = library.bind("native_streams_open", "ppdd", "i")
        self._close = library.bind("native_streams_close", "pipp", "i")
        self._write = library.bind("native_streams_write", "ppppidppp", "i")
        self._streams: int | None = self._new()
        self._offers: dict[int, StreamOffer] = {}
        self._token_ids = array("q", bytes(8 * MOST_TOKENS))
        self._gaps_s = array("d", bytes(8 * MOST_TOKENS))
        self._left = self._unsent = array("q")
        self._make_room(_LEAST_COLUMNS)
        self._rests = ctypes.c_void_p()

    def __bool__(self) -> bool:
        """Whether there is any stream."""
        return bool(self._offers)

    @property
    def has_room(self) -> bool:
        """Whether another stream may be opened; where not, counts the token after which that is asked."""
        room = self._room
        if self._streams is None:
            return False
        if room.num_open >= room.most:
            room.num_full += 1
            return False
        if room.again_s and time.monotonic() < room.again_s:
            room.num_without_descriptor += 1
            return False
        return True

    def open(self, handle: int, offer: StreamOffer) -> None:
        """Write the next tokens of a stream from now on; not where its socket cannot be duplicated."""
        events, texts, stop_ids = offer.stream.events, offer.stream.texts, array("q", offer.stream.stop_ids)
        before, after, now_s = events.before, events.after, time.monotonic()
        # csrc/native_streams.cpp: Offer
        packed = array(
            "q",
            (
                handle,
                events.descriptor,
                offer.next_index,
                MOST_TOKENS,
                _address(texts.text),
                texts.offsets.buffer_info()[0],
                len(texts.offsets) - 1,
                _address(before),
                len(before),
                _address(after),
                len(after),
                stop_ids.buffer_info()[0],
                len(stop_ids),
            ),
        )
        if self._open(self._streams, packed.buffer_info()[0], offer.stream.last_s, now_s + MOST_S):
            # It also keeps the vocabulary in memory.
            self._offers[handle] = offer
            self._room.on_opened(now_s)
        else:
            self._room.on_no_descriptor(now_s)

    def close(self, handle: int) -> None:
        """End a stream, if there is one, and report what was written of it."""
        if (offer := self._offers.pop(handle, None)) is None:
            return
        self._room.num_open -= 1
        token_ids, gaps_s = self._token_ids, self._gaps_s
        count = self._close(self._streams, handle, token_ids.buffer_info()[0], gaps_s.buffer_info()[0])
        if count:
            offer.on_written(token_ids[:count].tolist(), gaps_s[:count].tolist())

    def close_all(self) -> None:
        """End all streams, as `close` does, and free the memory."""
        try:
            for handle in list(self._offers):
                self.close(handle)
        finally:
            streams, self._streams = self._streams, None
            if streams is not None:
                self._free(streams)

    def write(self, handles: Sequence[int], indexes: Sequence[int], token_ids: Sequence[int]) -> Sequence[int]:
        """Write the tokens of a message, in columns of equal length, as far as they belong to streams that are open.

        Returns the positions of the others, in order. A stream must be closed before another of its tokens is handled.
        """
        count = len(handles)
        if count > len(self._left):
            self._make_room(2 * count)
        columns = [array("Q", handles), array("q", indexes), array("q", token_ids)]
        num_left = self._write(
            self._streams,
            *[column.buffer_info()[0] for column in columns],
            count,
            time.monotonic(),
            self._left.buffer_info()[0],
            self._unsent.buffer_info()[0],
            ctypes.byref(self._rests),
        )
        left: list[int] = []
        first = self._rests.value or 0
        for position, num_bytes in zip(self._left[:num_left], self._unsent, strict=False):
            if position >= 0:
                left.append(position)
                continue
            # csrc/native_streams.cpp: the socket did not take all of this token.
            rest, handle = ctypes.string_at(first, num_bytes), handles[-1 - position]
            first += num_bytes
            offer = self._offers.get(handle)
            self.close(handle)
            if offer is not None:
                offer.write_rest(rest)
        return left

    def _make_room(self, count: int) -> None:
        self._left = array("q", bytes(8 * count))
        self._unsent = array("q", bytes(8 * count))


def _address(data: bytes) -> int:
    """The address of the content, which stays while the object does."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def native_streams(room: StreamRoom) -> Callable[[], NativeStreams] | None:
    """Return what makes the streams of each session, in all so many at a time; None where native code is not to be had.
    Blocks while it compiles.
    """
    try:
        library = NativeLibrary(build(RECIPE))
    except NativeUnavailable as error:
        _log.warning("native token writing is unavailable, using Python at 1.6 times the processor time: %s", error)
        room.most = 0
        return None
    return partial(NativeStreams, library, room)
