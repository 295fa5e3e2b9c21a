"""The common part of both clients: channels to routers, and reconnecting, without any waiting."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from tandem.client.answers import Model
from tandem.client.failures import came_from_server, error_of
from tandem.client.options import Options, Tls
from tandem.client.progress import StreamProgress
from tandem.errors import DeadlineExceeded, ServingError
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub

_REPEATABLE = frozenset({"Embed", "Tokenize", "Detokenize", "ListModels", "GetCachedContent", "ListCachedContents"})
"""Calls that may be repeated."""
_ENDS_OF_ROUTERS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""Codes, without a status of ours, of calls whose router has ended or is leaving: a gRPC server that shuts down answers
calls that it has not passed on yet with a bare CANCELLED (https://github.com/grpc/grpc/issues/41785)."""
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    # A router whose machine is gone sends nothing: it must be given up while workers still keep its streams
    # (`router.takeover_s`). Only during calls, so that idle clients cost nothing; without a limit on pings, because a
    # client that reads a stream sends nothing, and gRPC's default allows two pings then.
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    # No keepalive ping is sent while another is unanswered, such as those that gRPC measures bandwidth with, for which
    # it would wait a minute.
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Time to connect: a router that hangs accepts and then sends nothing, while another may answer.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
Trailing = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """Addresses of one cluster's routers, and how to connect to them."""

    addresses: tuple[str, ...]
    api_key: str | None = None
    tls: Tls | None = None

    @classmethod
    def from_address(cls, address: str | Sequence[str], api_key: str | None, tls: Tls | None) -> "Routers":
        """From one `host:port`, or several of one cluster. Raises ValueError when there is none."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses:
            raise ValueError("address must name at least one router")
        return cls(addresses=addresses, api_key=api_key, tls=tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    @property
    def options(self) -> list[tuple[str, int | str]]:
        name = None if self.tls is None else self.tls.server_name
        return [*_CHANNEL_OPTIONS, *([] if name is None else [("grpc.ssl_target_name_override", name)])]

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a plaintext connection."""
        tls = self.tls
        return None if tls is None else grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


class ClientBase:
    """Channels to one cluster's routers, and the router currently used."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        max_reconnects: int = 8,
    ) -> None:
        """`address`: host:port of a router's gRPC server, or of several. `max_reconnects`: consecutive failed ones."""
        self._routers = Routers.from_address(address, api_key, tls)
        self._max_reconnects = max_reconnects
        self._rng = Random()
        self._channels: list[Any] = []
        self._current = 0

    def _open(self, library: Any) -> None:
        """`library`: grpc or grpc.aio."""
        credentials, options = self._routers.credentials, self._routers.options
        for address in self._routers.addresses:
            if credentials is None:
                self._channels.append(library.insecure_channel(address, options=options))
            else:
                self._channels.append(library.secure_channel(address, credentials, options=options))

    def _leave(self) -> list[Any]:
        channels, self._channels = self._channels, []
        return channels

    def _stub(self) -> Any:
        if not self._channels:
            raise RuntimeError("the client is not open: use it in a `with` statement")
        return InferenceStub(self._channels[self._current % len(self._channels)])  # type: ignore[no-untyped-call]

    def _call(self, progress: StreamProgress, ends_s: float | None) -> Any:
        """Begin the next attempt at a streamed answer. Raises DeadlineExceeded."""
        return self._stub().Generate(progress.request(), metadata=self._routers.metadata, timeout=_left_s(ends_s))

    def _asks_next(self, method: str, error: Any, num_asked: int) -> bool:
        """Whether to repeat the call at the next router after a broken connection; later calls begin there.

        The first router is asked once more at the end: a successor may have its port.
        """
        if error.code() not in _ENDS_OF_ROUTERS or came_from_server(error.trailing_metadata()):
            return False
        self._current += 1
        return method in _REPEATABLE and num_asked <= len(self._channels)

    def _begin(self, request: pb.GenerateRequest, options: Options) -> tuple[StreamProgress, float | None]:
        progress = StreamProgress(request, max_reconnects=self._max_reconnects, rng=self._rng)
        return progress, None if options.timeout_s is None else time.monotonic() + options.timeout_s

    def _wait_s(self, progress: StreamProgress, error: Any, trailing: Trailing, ends_s: float | None) -> float:
        """Seconds to wait before the next attempt. Raises the stream's error when there is none."""
        failure = _failure(error, trailing)
        again = progress.after(failure, from_server=came_from_server(trailing))
        if again is None:
            raise failure from None
        self._current += again.next_router
        left_s = _left_s(ends_s)
        return again.wait_s if left_s is None else min(again.wait_s, left_s)


def _left_s(ends_s: float | None) -> float | None:
    if ends_s is None:
        return None
    left_s = ends_s - time.monotonic()
    if left_s <= 0.0:
        raise DeadlineExceeded("timeout_s ended before the answer was complete")
    return left_s


def _failure(error: Any, trailing: Trailing) -> ServingError:
    return error_of(error.code() or grpc.StatusCode.UNKNOWN, error.details() or "", trailing)


def failure_of(error: Any) -> ServingError:
    """The error of a call that is not retried."""
    return _failure(error, error.trailing_metadata())


def models_of(answer: pb.ListModelsResponse) -> list[Model]:
    return [
        Model(id=m.id, max_model_len=m.max_model_len, created_s=m.created_s, parent=m.parent) for m in answer.models
    ]
