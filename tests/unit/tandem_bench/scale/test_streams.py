"""What the client of `tandem bench scale` says of an answer."""

import asyncio
import json
from typing import Any

import pytest

from tandem_bench.scale.streams import Stream

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Connection(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True


def chunk(event: object) -> bytes:
    data = event.encode() if isinstance(event, str) else json.dumps(event).encode()
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(line), line)


def text(value: str) -> bytes:
    return chunk({"choices": [{"index": 0, "text": value}]})


ONCE_UPON = text("Once") + text(" upon")
CASES = {
    "whole": HEAD + ONCE_UPON + chunk("[DONE]"),
    "wrong text": HEAD + text("Once") + chunk("[DONE]"),
    "told: worker_lost": HEAD + ONCE_UPON + chunk({"error": {"code": "worker_lost"}}),
    "broken off without a reason": HEAD + ONCE_UPON,
    "refused: 503": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("how", CASES)
def test_stream_says_how_it_ended(how: str, size: int) -> None:
    ends: list[str] = []
    stream, connection = Stream(b"POST", "Once upon", lambda _, told: ends.append(told)), Connection()
    stream.connection_made(connection)
    assert connection.written == b"POST"
    received = CASES[how]
    for at in range(0, len(received), size):
        stream.data_received(received[at : at + size])
    stream.connection_lost(None)
    assert ends == [how]
    assert connection.is_aborted


def test_stream_measures_its_longest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("tandem_bench.scale.streams.time.monotonic", lambda: clock[0])
    stream = Stream(b"", "", lambda *_: None)
    stream.connection_made(Connection())
    stream.data_received(HEAD)
    # Before the first token nothing counts as a pause.
    for clock[0] in (9.0, 10.0, 13.5, 14.0):
        stream.data_received(text("a"))
    assert (stream.num_tokens, stream.longest_pause_s) == (4, 3.5)
