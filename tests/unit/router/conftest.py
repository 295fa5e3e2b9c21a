"""What the tests of the router's servers share."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fastapi.dependencies.models
import httpx
import pytest
import uvicorn.server
from starlette.types import ASGIApp

from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import app_of, client_of

_LOOK_S = 0.005


class _ShortSleeps:
    """asyncio for a module that looks again and again whether something has changed: it looks more often."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(min(delay, _LOOK_S))


@pytest.fixture(scope="session", autouse=True)
def servers_stop_at_once() -> Iterator[None]:
    """uvicorn looks ten times a second whether it shall stop, and for a tenth more whether its connections have ended:
    each of the hundreds of servers that tests start would take a fifth of a second to go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _ShortSleeps())
        yield


@pytest.fixture(scope="module", autouse=True)
def applications_are_forgotten() -> Iterator[None]:
    """FastAPI remembers the functions of every application for good: a thousand of them, which every search for cycles
    would look through."""
    yield
    for one in vars(fastapi.dependencies.models).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


@pytest.fixture(scope="module")
def refusing_app(refusing: fakes.Servers) -> ASGIApp:
    """One application over a module's `refusing` parts, for requests that are refused before they change anything: to
    make one takes several times as long as to refuse."""
    return app_of(refusing)


@pytest.fixture
async def refusing_client(refusing_app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(refusing_app) as client:
        yield client
