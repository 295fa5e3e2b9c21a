"""An error as gRPC's clients of every language can take it apart: `google.rpc.Status`, beside code and message."""

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tandem.errors import ServingError
from tandem.rpc.status_details import DOMAIN

_MOST_CHARS = 1000
"""Of a message: a client takes some kilobytes of metadata, and this stands there twice."""


def status_details(error: ServingError, code: int) -> bytes:
    """`code`: the status's number. ErrorInfo always; the field that is wrong and the time to come back if known."""
    message = error.message[:_MOST_CHARS]
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
