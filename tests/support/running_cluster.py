"""A cluster of real processes as tests see it: requests over HTTP, figures from /metrics."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.processes.effective_config import module_command
from cluster.processes.launcher import Command
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.process_view import SilentWatcher
from cluster.supervisor.supervisor import RestartPolicy
from tandem.config.cluster import load

WAIT_S = 60.0
"""For what must happen, however slow the machine is; no test passes or fails by how long it took."""


_TRACEBACK_LINES = 80


@dataclass(slots=True)
class Streamed:
    """What a stream has received so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


class Logs(SilentWatcher):
    """Keeps what the processes say, for the message of a failed test."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_note(self, note):
        self.lines.append(f"{note.name}: {note.text}")

    def on_log(self, name, line):
        self.lines.append(f"{name}: {line}")

    def tracebacks(self) -> list[str]:
        """Each process's lines from its first traceback on, at most `_TRACEBACK_LINES`."""
        names = dict.fromkeys(line.partition(": ")[0] for line in self.lines if "Traceback" in line)
        found: list[str] = []
        for name in names:
            own = [line for line in self.lines if line.startswith(f"{name}: ")]
            first = next(number for number, line in enumerate(own) if "Traceback" in line)
            found += own[max(0, first - 1) : first + _TRACEBACK_LINES]
        return found


class RunningCluster:
    """Processes and one HTTP client."""

    def __init__(self, local: LocalCluster, http: httpx.AsyncClient, logs: Logs) -> None:
        self.local = local
        self.http = http
        self.logs = logs

    async def complete(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the whole response to one prompt of token ids, greedy by default."""
        response = await self.http.post("/v1/completions", json=body(prompt, max_tokens, **more))
        assert response.status_code == 200, response.text
        return response.json()

    async def tokens(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """The generated token ids."""
        answer = await self.complete(prompt, max_tokens, **more)
        return answer["choices"][0]["token_ids"]

    async def stream(
        self, prompt: Sequence[int], max_tokens: int, *, on_token: Callable[[Streamed], None] | None = None, **more: Any
    ) -> Streamed:
        """Read one stream to its end."""
        got = Streamed()
        async for _ in self.chunks(prompt, max_tokens, got, **more):
            if on_token is not None and got.token_ids:
                on_token(got)
        assert got.finish_reason, "the stream broke off"
        return got

    async def chunks(
        self, prompt: Sequence[int], max_tokens: int, got: Streamed, **more: Any
    ) -> AsyncIterator[Streamed]:
        """Read one stream into `got`, chunk by chunk; closing the generator disconnects."""
        more = {"stream_options": {"include_usage": True}, **more, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body(prompt, max_tokens, **more)) as response:
            assert response.status_code == 200, (await response.aread(), *self.logs.lines[-20:])
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data:"))
                assert "error" not in chunk, chunk
                got.usage = chunk.get("usage") or got.usage
                for choice in chunk["choices"]:
                    got.text += choice["text"]
                    got.token_ids += choice.get("token_ids") or []
                    got.finish_reason = choice["finish_reason"] or got.finish_reason
                yield got

    async def figures(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Samples of one metric that bear these labels, by the values of their other labels in order of name."""
        text = (await self.http.get("/metrics")).text
        return {
            tuple(value for key, value in sorted(sample.labels.items()) if key not in labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    async def figure(self, name: str, **labels: str) -> float:
        """The sum of those."""
        return sum((await self.figures(name, **labels)).values())

    async def disaggregated(self) -> float:
        """Attempts so far whose prompt was sent to the prefill pool."""
        return await self.figure("tandem_placements_total", reason="disaggregated")

    async def until(self, reached: Callable[[], Any]) -> None:
        """Ask until it is so."""
        async with asyncio.timeout(WAIT_S):
            while not await reached():  # noqa: ASYNC110 - another process cannot wake us
                await asyncio.sleep(0.05)

    async def until_workers(self, count: int) -> None:
        """Until so many workers take part."""

        async def joined() -> bool:
            return len(await self.figures("tandem_worker_kv_blocks", state="used")) == count

        await self.until(joined)

    async def until_idle(self) -> None:
        """Until every worker has reported that it holds nothing but what is pinned; on failure says who holds what."""
        busy: Mapping[tuple[str, ...], float] = {}

        async def idle() -> bool:
            nonlocal busy
            blocks = {
                (state, *key): count
                for state in ("used", "quarantined")
                for key, count in (await self.figures("tandem_worker_kv_blocks", state=state)).items()
            }
            for key, count in (await self.figures("tandem_worker_pinned_blocks")).items():
                blocks["used", *key] = blocks.get(("used", *key), 0.0) - count
            requests = await self.figures("tandem_worker_requests")
            streams = {
                (name,): await self.figure(name) for name in ("vllm:num_requests_waiting", "vllm:num_requests_running")
            }
            busy = {key: count for key, count in (blocks | requests | streams).items() if count}
            return bool(blocks) and not busy

        try:
            await self.until(idle)
        except TimeoutError:
            raise AssertionError(f"not idle: {busy}; the last words:\n" + "\n".join(self.logs.lines[-40:])) from None

    async def kill_the_busiest(self, signum: int) -> tuple[str, int]:
        """Signal the decode worker that runs most requests; its name and pid."""
        running: dict[tuple[str, ...], float] = {}

        async def known() -> bool:
            running.update(await self.figures("tandem_worker_requests", role="decode", state="running"))
            return any(running.values())

        await self.until(known)
        (victim,) = max(running, key=lambda name: running[name])
        pid = self.pid(victim)
        assert pid is not None
        self.local.kill(victim, signum)
        return victim, pid

    async def comes_back(self, name: str, old_pid: int) -> None:
        """Until a process that was killed serves again."""
        await self.local.wait_ready(name, after_pid=old_pid)
        await self.until_workers(len(self.local.workers))

    def pid(self, name: str) -> int | None:
        """Of the process that has this name now."""
        return next(view.pid for view in self.local.processes if view.name == name)


def body(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion of exactly `max_tokens` tokens that shows their ids."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": list(prompt), "max_tokens": max_tokens, **fixed, **more}


_SETTINGS = {
    "router.port": 0,
    "router.grpc_port": 0,
    "engine.num_threads": 1,
    "standby_workers": 0,  # each would import PyTorch while a test runs
    # Tests of hand-offs need hand-offs: here computing is so cheap that routers would often rather have none.
    "router.max_local_prefill_tokens": 64,
}


@asynccontextmanager
async def running(
    *,
    command: Command = module_command,
    policy: RestartPolicy | None = None,
    believes: ssl.SSLContext | None = None,
    key: str = "",
    **overrides: Any,
) -> AsyncIterator[RunningCluster]:
    """Start a cluster on free ports; `a__b=1` sets `a.b`. Leaving drains it, or kills it when the test failed.

    `command`: how each process is started. `policy`: how patient its supervisor is. `believes`: of a client in TLS.
    `key`: the client's, where there are API keys.
    """
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load(None, {**_SETTINGS, **dotted})
    logs = Logs()
    limits = httpx.Limits(max_connections=None)
    async with (
        LocalCluster(config, watcher=logs, policy=policy, command=command) as local,
        httpx.AsyncClient(
            base_url=local.http_url, timeout=WAIT_S, limits=limits, trust_env=False, verify=believes or True
        ) as http,
    ):
        if key:
            http.headers["Authorization"] = f"Bearer {key}"
        cluster = RunningCluster(local, http, logs)
        await cluster.until_workers(len(local.workers))
        yield cluster
