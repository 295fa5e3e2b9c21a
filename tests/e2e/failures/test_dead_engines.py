"""All decode workers have live sessions and dead engines: a real router reports it, and stays in its Service."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.processes.effective_config import PortDrawer
from tests.support.fake_worker import SECRET, FakeWorker, answer, hold
from tests.support.running_cluster import WAIT_S

BUILTIN_VOCABULARY = 2048
ASKED = {"prompt": "a", "max_tokens": 1}


async def status_of(client: httpx.AsyncClient, path: str) -> int:
    """A GET's status; 0 while nothing listens."""
    try:
        return (await client.get(path)).status_code
    except httpx.TransportError:
        return 0


async def until(client: httpx.AsyncClient, path: str, status: int) -> None:
    """Return once a GET has this status."""
    while await status_of(client, path) != status:  # noqa: ASYNC110 - a process of its own
        await asyncio.sleep(0.1)


@pytest.mark.turn(1)
async def test_router_with_dead_engines_answers_503_and_stays_ready(tmp_path: Path) -> None:
    with PortDrawer() as ports:
        http, grpc = (ports.draw("127.0.0.1", "router.host") for _ in range(2))
    async with FakeWorker("decode-0") as worker:
        worker.hello.vocab_size = BUILTIN_VOCABULARY
        config = {
            "secret": SECRET.decode(),
            "prefill": {"replicas": 0},
            "decode": {"addresses": [worker.address]},
            "router": {"port": http, "grpc_port": grpc, "worker_silence_s": 60.0},  # a fake has no heartbeat
        }
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(config))
        command = (sys.executable, "-m", "router", "--config", str(tmp_path / "cluster.yaml"))
        router = await asyncio.create_subprocess_exec(*command, env=os.environ)
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=WAIT_S, trust_env=False) as client,
                asyncio.timeout(2 * WAIT_S),
            ):
                await until(client, "/readyz", 200)
                worker.script = hold
                await until(client, "/readyz", 503)
                refused = await client.post("/v1/completions", json=ASKED)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert "no decode worker produces tokens" in refused.text
                assert await status_of(client, "/readyz?exclude=workers") == 200
                worker.script = answer
                await until(client, "/readyz", 200)
                assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        finally:
            if router.returncode is None:
                router.send_signal(signal.SIGTERM)
            await router.wait()
