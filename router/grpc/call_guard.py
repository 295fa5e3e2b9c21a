"""Guards every gRPC call: checks its API key, limits the calls under way, and turns errors into status codes.

The key is checked before anything is read and for every method name; every answer is counted.

All our calls take one message. For such calls gRPC would wait for it for ever, before the key is checked, and answer
malformed bytes with its own text and a stack trace in the log. So they are registered as taking a stream of messages,
of which the first is read here.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from router.access.api_keys import ApiCaller, ApiKeyStore
from router.access.audit_log import NO_AUDIT, AuditEntry, AuditLog, enter, leave
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, ServingError
from tandem.rpc.status_details import DETAILS_KEY, DOMAIN
from tandem.telemetry.logs import REQUEST_ID

MAX_METADATA_BYTES = 32 << 10
MESSAGE_TIMEOUT_S = 30.0
"""Time for a call's message to arrive, as for a body over HTTP."""
_RETRY_AFTER = "retry-after"
_PARAM = "tandem-error-param"
_OWN_SERVICE = "/tandem.v1."
_HEALTH_SERVICE = "/grpc.health.v1."
MOST_CALLS = 16384
"""Calls in progress at a time, over all clients: each has a task and buffers, tens of kilobytes in all."""
_AGAIN_S = 1.0
_UNKNOWN = "unknown"
_MOST_DETAIL_CHARS = 1000
"""Bound on an error message: a client accepts some kilobytes of metadata, and the message is in there twice."""
_log = logging.getLogger(__name__)
_Reading = Callable[[bytes], Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Wraps the handlers of our own services. Reflection requires a key too; health is open to all, like /health."""

    def __init__(
        self,
        metrics: RouterMetrics,
        keys: ApiKeyStore,
        audit: AuditLog = NO_AUDIT,
        *,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        most_calls: int = MOST_CALLS,
    ) -> None:
        """`message_timeout_s`: for a call's message to arrive. `most_calls`: further ones are refused with a
        Retry-After."""
        self._metrics = metrics
        self._keys = keys
        self._audit = audit
        self._message_timeout_s = message_timeout_s
        self._most_calls = most_calls
        self._num_calls = 0

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler, with its errors translated; without a key, not even whether the method exists is
        revealed."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OWN_SERVICE):
            is_health = handler is not None and details.method.startswith(_HEALTH_SERVICE)
            return handler if is_health else self._for_keys(handler, details)
        method = details.method.rpartition("/")[2]
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_stream is not None:
            call = self._translated(method, read, handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=write)
        call = self._translated(method, read, handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(call, response_serializer=write)

    def _for_keys(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Guard other services, and refusals: an unknown method is neither counted nor logged by its name."""
        try:
            caller_by(details.invocation_metadata, self._keys)
        except ServingError as error:
            method = _UNKNOWN if handler is None else details.method.rpartition("/")[2]
            return grpc.stream_stream_rpc_method_handler(self._translated(method, bytes, _raising(error)))
        return handler

    def _translated(self, method: str, read: _Reading, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Translate the errors of a call that returns one answer, or writes many to the context."""

        async def translated(_messages: Any, context: Any) -> Any:
            entry = AuditEntry(
                server="grpc",
                client=_address(context.peer()),
                began_s=time.monotonic(),
                route=method,
                is_kept=True,
            )
            token = enter(entry)
            REQUEST_ID.set(entry.own_id)  # the call's task ends with it
            try:
                entry.caller = caller_of(context, self._keys)
                answer = await self._answer(read, call, context)
            except ServingError as error:
                await self._abort(entry, context, error)
            except Exception:  # noqa: BLE001  # the interceptor: a bug becomes INTERNAL, its trace goes to the log
                await self._abort(entry, context, self._bug(method))
            else:
                entry.status = grpc.StatusCode.OK.name
                self._metrics.rpc_answered(method, entry.status)
                return answer
            finally:
                leave(token)
                # A call without a status has been cancelled.
                entry.status = entry.status or grpc.StatusCode.CANCELLED.name
                self._audit.keep(entry)

        return translated

    async def _answer(self, read: _Reading, call: Callable[[Any, Any], Awaitable[Any]], context: Any) -> Any:
        """Run the call. Raises what it raises, and Overloaded where too many are in progress."""
        if self._num_calls >= self._most_calls:
            raise Overloaded(f"{self._num_calls} calls are in progress", retry_after_s=_AGAIN_S)
        self._num_calls += 1
        try:
            return await call(await self._message(read, context), context)
        finally:
            self._num_calls -= 1

    async def _message(self, read: _Reading, context: Any) -> Any:
        """Read the call's message. Raises InvalidRequest, and DeadlineExceeded when it does not arrive."""
        try:
            async with asyncio.timeout(self._message_timeout_s):
                sent = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no message arrived within {self._message_timeout_s:g} s") from None
        if sent is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message")
        try:
            return read(sent)
        except DecodeError:
            raise InvalidRequest("the bytes sent are not a message of this call's type") from None

    def _bug(self, method: str) -> ServingError:
        _log.exception("%s failed", method)
        return InternalError("internal error")

    async def _abort(self, entry: AuditEntry, context: Any, error: ServingError) -> None:
        entry.status = error.code.value
        self._metrics.rpc_answered(entry.route, entry.status)
        code = grpc.StatusCode[error.code.value]
        trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status_details(error, code.value[0]))]
        if error.retry_after_s is not None:
            trailing.append((_RETRY_AFTER, f"{error.retry_after_s:.3f}"))
        if error.param is not None:
            trailing.append((_PARAM, error.param))
        try:
            await context.abort(code, error.message, tuple(trailing))
        except grpc.aio.InternalError:
            # The status could not be sent: the client left with its answer unread.
            _log.debug("%s: the client disconnected before it received status %s", entry.route, entry.status)


def caller_of(context: Any, keys: ApiKeyStore) -> ApiCaller:
    """Return the caller that a call's metadata prove. Raises Unauthenticated."""
    return caller_by(context.invocation_metadata(), keys)


def caller_by(metadata: Iterable[tuple[str, str | bytes]] | None, keys: ApiKeyStore) -> ApiCaller:
    """Return the caller that such metadata prove. Raises Unauthenticated."""
    sent: dict[str, str] = {}
    for key, value in metadata or ():
        if isinstance(value, str):
            sent.setdefault(key, value)
    return keys.authenticate(sent)


def _raising(error: ServingError) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse(_message: Any, _context: Any) -> None:
        raise error

    return refuse


def _address(peer: str) -> str:
    """Extract `10.0.0.1` from gRPC's `ipv4:10.0.0.1:4711`."""
    host = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host.strip("[]")


def status_details(error: ServingError, code: int) -> bytes:
    """Serialize google.rpc.Status (`code`: its number): ErrorInfo always; the wrong field and retry delay if known."""
    message = error.message[:_MOST_DETAIL_CHARS]
    status = Status(code=code, message=message)
    status.details.add().Pack(ErrorInfo(reason=error.word().upper(), domain=DOMAIN))
    if error.param is not None:
        violation = BadRequest.FieldViolation(field=error.param, description=message)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return bytes(status.SerializeToString())
