"""`python -m tandem_bench.router.client_process URL ...`: a client in its own process, at no cost to the router."""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any
from urllib.parse import SplitResult, urlsplit


@dataclass(slots=True)
class Tally:
    """Counts of what the client received."""

    requests: int = 0
    events: int = 0
    bad: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """Of an open loop: from when each request was due to its first event."""


async def load(url: str, body: Mapping[str, Any], *, connections: int, requests: int, salt: str | None = None) -> Tally:
    """Send the requests over keep-alive connections; with `salt`, no request shares another's cache."""
    tally, address = Tally(), urlsplit(url)
    same = _request(address, body)
    left = requests

    async def client() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
        while left > 0:
            left -= 1
            writer.write(same if salt is None else _request(address, {**body, "cache_salt": f"{salt}-{left}"}))
            ok, events = await _answer(reader)
            tally.requests += 1
            tally.events += events
            tally.bad += not ok
        writer.close()

    started_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(connections)))
    tally.seconds = time.monotonic() - started_s
    return tally


async def open_load(url: str, body: Mapping[str, Any], *, rate: float, requests: int) -> Tally:
    """Send requests of a Poisson process, over as many keep-alive connections as it takes."""
    tally, address, rng = Tally(), urlsplit(url), Random(1)
    request = _request(address, body)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(due_s: float) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(address.hostname, address.port)
        writer.write(request)
        ok, events = await _answer(reader, lambda: tally.first_s.append(time.monotonic() - due_s))
        idle.append((reader, writer))
        tally.requests += 1
        tally.events += events
        tally.bad += not ok

    due_s = started_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(requests):
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.create_task(send(due_s))
    for _, writer in idle:
        writer.close()
    tally.seconds = time.monotonic() - started_s
    return tally


def _request(address: SplitResult, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _answer(reader: asyncio.StreamReader, on_first: Callable[[], None] = lambda: None) -> tuple[bool, int]:
    """Return whether the status was 200, and how many events a stream had. `on_first`: called at the first of them."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    ok = b" 200 " in head.split(b"\r\n", 1)[0]
    if b"transfer-encoding: chunked" not in head:
        size = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        await reader.readexactly(size)
        return ok, 0
    events = 0
    while size := int(await reader.readline(), 16):
        if not events:
            on_first()
        events += (await reader.readexactly(size + 2)).count(b"data: ")
    await reader.readline()
    return ok, events


def main() -> None:
    """Send the requests and print the counts as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.router.client_process", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--body", required=True, help="JSON")
    loop = parser.add_mutually_exclusive_group(required=True)
    loop.add_argument("--connections", type=int, help="that many requests at a time")
    loop.add_argument("--rate", type=float, help="requests per second, however long they take")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--salt", help="prefix of each request's own cache salt")
    options = parser.parse_args()
    body = json.loads(options.body)
    if options.rate is not None:
        work = open_load(options.url, body, rate=options.rate, requests=options.requests)
    else:
        work = load(options.url, body, connections=options.connections, requests=options.requests, salt=options.salt)
    tally = asyncio.run(work)
    print(json.dumps(asdict(tally)))


if __name__ == "__main__":
    main()
