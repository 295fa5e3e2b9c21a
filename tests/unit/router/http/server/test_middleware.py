"""How an HTTP call is counted for every outcome, and its id in the logs."""

import asyncio
from typing import Any

import pytest

from router.access.audit_log import NO_AUDIT
from router.http.server.middleware import RequestMiddleware
from router.metrics.router_metrics import RouterMetrics
from tandem.telemetry.logs import REQUEST_ID, X_REQUEST_ID

SCOPE = {"type": "http", "method": "GET", "headers": [(b"x-request-id", b"mine")], "client": None}


async def nothing(*_: Any) -> Any:
    """Neither receives nor sends."""


async def call(metrics: RouterMetrics, app: Any) -> None:
    await RequestMiddleware(app, metrics, NO_AUDIT)(dict(SCOPE), nothing, nothing)


def counted(metrics: RouterMetrics) -> list[str]:
    name = "tandem_http_requests_total"
    return [one.labels["status"] for found in metrics.registry.collect() for one in found.samples if one.name == name]


async def test_middleware_answer_is_counted_and_logged_with_id() -> None:
    seen: list[tuple[str, int]] = []

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        seen.append((X_REQUEST_ID.get(), len(REQUEST_ID.get())))
        await send({"type": "http.response.start", "status": 204, "headers": []})

    metrics = RouterMetrics("m")
    await call(metrics, answer)
    assert (counted(metrics), seen, REQUEST_ID.get(), X_REQUEST_ID.get()) == (["204"], [("mine", 32)], "", "")


@pytest.mark.parametrize(("error", "status"), [(None, "499"), (RuntimeError("a bug"), "500")])
async def test_middleware_departed_client_counts_as_499(error: Exception | None, status: str) -> None:
    async def leave(*_: Any) -> None:
        if error is not None:
            raise error

    metrics = RouterMetrics("m")
    if error is None:
        await call(metrics, leave)
    else:
        with pytest.raises(type(error)):
            await call(metrics, leave)
    assert counted(metrics) == [status]


@pytest.mark.parametrize(("begun", "status"), [(False, "503"), (True, "200")])
async def test_middleware_unanswered_request_at_shutdown_is_503(begun: bool, status: str) -> None:
    async def is_ended(_scope: Any, _receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    metrics = RouterMetrics("m")
    await call(metrics, is_ended)
    assert counted(metrics) == [status]
