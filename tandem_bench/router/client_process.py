"""`python -m tandem_bench.router.client_process URL ...`: a client in its own process, at no cost to the router."""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit


@dataclass(slots=True)
class Tally:
    """Counts of what the client received."""

    requests: int = 0
    events: int = 0
    bad: int = 0
    seconds: float = 0.0


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


def _request(address: SplitResult, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _answer(reader: asyncio.StreamReader) -> tuple[bool, int]:
    """Return whether the status was 200, and how many events a stream had."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    ok = b" 200 " in head.split(b"\r\n", 1)[0]
    if b"transfer-encoding: chunked" not in head:
        size = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        await reader.readexactly(size)
        return ok, 0
    events = 0
    while size := int(await reader.readline(), 16):
        events += (await reader.readexactly(size + 2)).count(b"data: ")
    await reader.readline()
    return ok, events


def main() -> None:
    """Send the requests and print the counts as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.router.client_process", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--body", required=True, help="JSON")
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--salt", help="prefix of each request's own cache salt")
    options = parser.parse_args()
    body, bounds = json.loads(options.body), {"connections": options.connections, "requests": options.requests}
    tally = asyncio.run(load(options.url, body, salt=options.salt, **bounds))
    print(json.dumps(asdict(tally)))


if __name__ == "__main__":
    main()
