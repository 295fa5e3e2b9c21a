"""`python -m tandem_bench.router.upstream --port P`: an HTTP server with fixed answers, for peers that are proxies.

It answers each request with a fixed answer, or with a stream of as many events as `max_tokens`, one in each step.
"""

import argparse
import asyncio
import json
from functools import partial
from typing import Any

_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
_ANSWER = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 16}}]}).encode()


async def _serve(step_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        _, found, rest = head.partition(b"content-length: ")
        body = json.loads(await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))) if found else {}
        if body.get("stream"):
            await _stream(writer, body, step_s)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(_ANSWER), _ANSWER))


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any], step_s: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    # sglang's router sends OpenAI's older field under its newer name.
    for _ in range(body.get("max_completion_tokens") or body["max_tokens"]):
        if step_s:
            await asyncio.sleep(step_s)
        writer.write(b"%x\r\n%b\r\n" % (len(_CHUNK), _CHUNK))
    writer.write(b"0\r\n\r\n")


async def _run(port: int, step_s: float) -> None:
    server = await asyncio.start_server(partial(_serve, step_s), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.router.upstream", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of an event; default: 10")
    options = parser.parse_args()
    asyncio.run(_run(options.port, options.step_ms / 1e3))


if __name__ == "__main__":
    main()
