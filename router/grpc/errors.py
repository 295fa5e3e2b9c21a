"""The gRPC door's one interceptor: errors of `tandem.errors` become status codes, and every answer is counted."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from router.grpc.status_details import status_details
from router.metrics import RouterMetrics
from tandem.errors import InternalError, ServingError
from tandem.rpc_details import DETAILS_KEY

MAX_METADATA_BYTES = 32 << 10
_RETRY_AFTER = "retry-after"
_PARAM = "tandem-error-param"
_OWN_SERVICE = "/tandem.v1."
_log = logging.getLogger(__name__)
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Wraps the handlers of our own services; health and reflection answer for themselves."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """The handler, with its errors translated."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OWN_SERVICE):
            return handler
        method = details.method.rpartition("/")[2]
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._translated(method, handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._translated(method, handler.unary_unary), **codecs)

    def _translated(self, method: str, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """One answer returned, or many written to the context."""

        async def translated(request: Any, context: Any) -> Any:
            try:
                answer = await call(request, context)
            except ServingError as error:
                await self._abort(method, context, error)
            except Exception:  # noqa: BLE001  # the interceptor: a bug becomes INTERNAL, its trace goes to the log
                await self._abort(method, context, self._bug(method))
            else:
                self._metrics.rpc_answered(method, grpc.StatusCode.OK.name)
                return answer

        return translated

    def _bug(self, method: str) -> ServingError:
        _log.exception("%s failed", method)
        return InternalError("internal error")

    async def _abort(self, method: str, context: Any, error: ServingError) -> None:
        self._metrics.rpc_answered(method, error.code.value)
        code = grpc.StatusCode[error.code.value]
        trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status_details(error, code.value[0]))]
        if error.retry_after_s is not None:
            trailing.append((_RETRY_AFTER, f"{error.retry_after_s:.3f}"))
        if error.param is not None:
            trailing.append((_PARAM, error.param))
        try:
            await context.abort(code, error.message, tuple(trailing))
        except grpc.aio.InternalError:
            # Its status could not be sent: the client left with its answer unread.
            _log.debug("%s: the client left before it was told of %s", method, error.code.value)
