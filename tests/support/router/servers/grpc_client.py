"""The gRPC server in tests: the shortest conversation, and how its errors are read."""

from typing import Any

import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tandem.rpc.status_details import DETAILS_KEY
from tandem.v1 import inference_pb2 as pb

WAIT_S = 20.0
HELLO = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if hasattr(call, "__aiter__") else call)
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> tuple[Status, dict[type, Any]]:
    status = Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])
    found = {}
    for detail in status.details:
        for kind in (ErrorInfo, BadRequest, RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    return status, found
