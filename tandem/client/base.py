"""What both clients share: everything but waiting."""

import time
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import grpc

from tandem.client.answers import Model
from tandem.client.connection import Routers
from tandem.client.failures import came_from_server, error_of
from tandem.client.options import Options, Tls
from tandem.client.progress import StreamProgress
from tandem.errors import DeadlineExceeded, ServingError
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub

_HARMLESS = frozenset({"Embed", "Tokenize", "Detokenize", "ListModels", "GetCachedContent", "ListCachedContents"})
"""Calls that may be made twice."""
Trailing = Iterable[tuple[str, str | bytes]] | None


class ClientBase:
    """Channels to one cluster's routers."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        max_reconnects: int = 8,
    ) -> None:
        """`address`: host:port of a router's gRPC door, or of several. `max_reconnects`: in a row, in vain."""
        self._routers = Routers.of(address, api_key, tls)
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
        """The next attempt at a streamed answer. Raises DeadlineExceeded."""
        return self._stub().Generate(progress.request(), metadata=self._routers.metadata, timeout=_left_s(ends_s))

    def _asks_next(self, method: str, error: Any, num_asked: int) -> bool:
        """Whether another router is asked after a connection broke; if not, what is asked next begins there."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or came_from_server(error.trailing_metadata()):
            return False
        self._current += 1
        return method in _HARMLESS and num_asked < len(self._channels)

    def _begin(self, request: pb.GenerateRequest, options: Options) -> tuple[StreamProgress, float | None]:
        progress = StreamProgress(request, max_reconnects=self._max_reconnects, rng=self._rng)
        return progress, None if options.timeout_s is None else time.monotonic() + options.timeout_s

    def _wait_s(self, progress: StreamProgress, error: Any, trailing: Trailing, ends_s: float | None) -> float:
        """For how long to wait before the next attempt. Raises what the caller is told when there is none."""
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
        raise DeadlineExceeded("the answer's time is over")
    return left_s


def _failure(error: Any, trailing: Trailing) -> ServingError:
    return error_of(error.code() or grpc.StatusCode.UNKNOWN, error.details() or "", trailing)


def failure_of(error: Any) -> ServingError:
    """A call that is not tried again."""
    return _failure(error, error.trailing_metadata())


def models_of(answer: pb.ListModelsResponse) -> list[Model]:
    """Those that are served."""
    return [Model(id=m.id, max_model_len=m.max_model_len, created_s=m.created_s) for m in answer.models]
