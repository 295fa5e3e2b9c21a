"""Converts a gRPC status to an error of `tandem.errors`, with the field (`param`) and the time to retry."""

from collections.abc import Iterable, Iterator

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
    Unauthenticated,
    Unavailable,
)
from tandem.rpc.status_details import DETAILS_KEY, DOMAIN

_BY_CODE: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def error_of(code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, str | bytes]] | None) -> ServingError:
    """The error that the server reported, or that the end of its connection stands for."""
    kind, param, retry_after_s = _BY_CODE.get(code, InternalError), None, None
    status = _status(trailing)
    for detail in () if status is None else status.details:
        info, wrong, retry = ErrorInfo(), BadRequest(), RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind = _KINDS.get(info.reason.lower(), kind)
        elif detail.Unpack(wrong) and wrong.field_violations:
            param = wrong.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(message, param=param, retry_after_s=retry_after_s)


def came_from_server(trailing: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a router sent the error; otherwise a connection broke."""
    return _status(trailing) is not None


def _status(trailing: Iterable[tuple[str, str | bytes]] | None) -> Status | None:
    sent = next((value for key, value in trailing or () if key == DETAILS_KEY), None)
    try:
        return Status.FromString(sent) if isinstance(sent, bytes) else None
    except DecodeError:
        return None


def _kinds(base: type[ServingError]) -> Iterator[type[ServingError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


_KINDS = {kind.word(): kind for kind in _kinds(ServingError)}
