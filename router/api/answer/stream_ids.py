"""The `id` of a stream's events: the client's position in its answer, signed, so that any router can continue there.

It names the request, its seed (chosen by the first router), and for each choice the worker that computes it and what
the client has. A client whose stream broke sends the same body again with the last id as `Last-Event-ID` (HTML Living
Standard, "Server-sent events"), or over gRPC as `last_stream_id`. The signature also covers a digest of the request, so
that an id cannot be used with another body, tenant or salt. An id is valid for as long as the request that it belongs
to could last; `router.admission.continuations` and `router.admission.rate_limits` decide what a continuation costs its
tenant, and how often it may be requested.
"""

import base64
import binascii
import hmac
import struct
import time
from collections.abc import Callable, Sequence

from router.types.request_digest import DIGEST_BYTES
from router.types.stream_position import ChoicePosition, StreamHead, StreamPosition
from tandem.errors import InvalidRequest
from tandem.values.ids import Incarnation

LAST_EVENT_ID = "Last-Event-ID"
MAX_CHOICES = 16
"""Most choices of a stream for its events to have ids."""
_MAC_BYTES = 16
_VERSION = 1
# Version, request, seed, created (unix seconds), resumptions, whether usage was sent, digest of the request.
_HEAD = struct.Struct(f"<B16sQIBB{DIGEST_BYTES}s")
_CHOICE = struct.Struct("<QII?")
_MAX_RESUMPTIONS = 255


class StreamIds:
    """Writes and reads ids; every router of the cluster has the same key."""

    def __init__(self, secret: bytes, *, most_s: float, wall_clock: Callable[[], float] = time.time) -> None:
        """`most_s`: the longest that a request can last; ids of older ones are refused."""
        self._most_s = most_s
        self._wall_clock = wall_clock
        self._mac = hmac.new(hmac.digest(secret, b"tandem stream id v1", "sha256"), digestmod="sha256")

    def write(self, head: StreamHead, choices: Sequence[ChoicePosition], *, usage_sent: bool = False) -> bytes:
        """Write an id; it contains no line break."""
        parts = [
            _HEAD.pack(
                _VERSION,
                bytes.fromhex(head.request_id),
                head.seed,
                head.created_s,
                head.resumptions,
                usage_sent,
                head.digest,
            )
        ]
        parts += [_CHOICE.pack(c.worker, c.num_tokens, c.num_chars, c.ended) for c in choices]
        data = b"".join(parts)
        return base64.urlsafe_b64encode(data + self._sign(data))

    def read(self, text: str, *, param: str = LAST_EVENT_ID) -> StreamPosition:
        """Parse an id. Raises InvalidRequest for anything that no router of this cluster has written, and for expired
        ids.

        `param`: the field that it was sent in.
        """
        try:
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError, ValueError):
            raise _foreign(param) from None
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        count, rest = divmod(len(body) - _HEAD.size, _CHOICE.size)
        # The signature first: the code that follows only reads what one of our routers has written.
        if not hmac.compare_digest(mac, self._sign(body)) or rest or not 1 <= count <= MAX_CHOICES:
            raise _foreign(param)
        version, request, seed, created_s, resumptions, usage_sent, digest = _HEAD.unpack_from(body)
        if version != _VERSION:
            raise _foreign(param)
        if resumptions >= _MAX_RESUMPTIONS:
            raise InvalidRequest(f"{param}: already continued {_MAX_RESUMPTIONS} times", param=param)
        # Times are in whole seconds, rounded down, and another router's clock may be ahead.
        if (age_s := max(0.0, self._wall_clock() - created_s - 1.0)) >= self._most_s:
            raise InvalidRequest(f"{param}: the stream began more than {self._most_s:g} s ago", param=param)
        choices = (_CHOICE.unpack_from(body, _HEAD.size + i * _CHOICE.size) for i in range(count))
        return StreamPosition(
            head=StreamHead(
                request_id=request.hex(), seed=seed, created_s=created_s, digest=digest, resumptions=resumptions
            ),
            choices=tuple(
                ChoicePosition(worker=Incarnation(worker), num_tokens=tokens, num_chars=chars, ended=ended)
                for worker, tokens, chars, ended in choices
            ),
            usage_sent=bool(usage_sent),
            age_s=age_s,
        )

    def _sign(self, data: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(data)
        return mac.digest()[:_MAC_BYTES]


def _foreign(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not an event id of this cluster", param=param)
