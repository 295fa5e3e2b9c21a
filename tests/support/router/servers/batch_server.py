"""A router's HTTP server with a folder for batches, in process, and who runs them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from router.http.app import OptionalRoutes, create_app
from router.process.batch_setup import make_batches
from tests.support.router.servers import fakes

WAIT_S = 20.0


class Room:
    """A stand-in for admission."""

    closed = False

    def __init__(self) -> None:
        self.is_there = True

    def has_idle_room(self) -> bool:
        return self.is_there


class World:
    """One router process with a folder."""

    def __init__(self, parts: fakes.Servers, folder: Path, **bounds: Any) -> None:
        self.parts = parts
        self.room = Room()
        config = parts.config.model_copy(
            update={"batches": parts.config.batches.model_copy(update={"path": str(folder), **bounds})}
        )
        made = make_batches(parts.frontend, parts.generator, self.room, config, parts.metrics)
        assert made is not None
        routes, self.runner = made
        app = create_app(
            parts.frontend, parts.generator, parts.ready, config, parts.metrics, OptionalRoutes(batches=routes)
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://localhost",
            headers={"Authorization": "Bearer one"},
        )

    async def upload(self, *lines: Any, **more: Any) -> str:
        text = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        answer = await self.http.post(
            "/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}, **more
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def create(self, file_id: str, **more: Any) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **more}
        answer = await self.http.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def batch(self, name: str) -> dict[str, Any]:
        return (await self.http.get(f"/v1/batches/{name}")).json()

    async def until(self, reached: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def ended(self, name: str) -> dict[str, Any]:
        return await self.comes_to(name, "completed", "failed", "expired", "cancelled")

    async def comes_to(self, name: str, *states: str) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while (batch := await self.batch(name))["status"] not in states:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return batch

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in (await self.http.get(f"/v1/files/{file_id}/content")).text.splitlines()]


@asynccontextmanager
async def running(parts: fakes.Servers, folder: Path, **bounds: Any) -> AsyncIterator[World]:
    world = World(parts, folder, **bounds)
    async with world.http, world.runner:
        yield world
