"""Streams that native code writes: to clients the same as those of Python, whatever happens between two tokens."""

import asyncio
import json
import os
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx
import pytest

from router.fleet.native_streams import MOST_TOKENS, NativeStreams, StreamRoom, native_streams
from router.types.requests import PlainEvents, PlainStream
from router.types.session_events import StreamOffer
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import FinishReason
from tests.support.fake_worker import FakeWorker, Script, Submission
from tests.support.router.native_world import CountedStreams, make_native_streams, text_of, world
from tests.support.router.servers import fakes

TEXT = 'the "quick" brown fox,\n\tnaïve café 漢字 😀 jumps\\over <b>the</b> lazy dog \u2028 ' * 8
STOP = fakes.make_tokenizer().encode(TEXT)[-3]
"""A token that comes again and again in the text."""
ENOUGH_TOKENS = 20_000
"""They fill the sockets of a client that does not read."""
BODY = {"prompt": "hello", "max_tokens": 500, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def new_streams() -> Callable[[], NativeStreams]:
    return make_native_streams(1000)


@pytest.fixture
def counted(new_streams: Any) -> Callable[[], NativeStreams]:
    CountedStreams.num_written = CountedStreams.num_rests = 0
    return lambda: CountedStreams(*new_streams.args)


def says(ids: Sequence[int], rng: Random) -> Script:
    """Give these tokens, mostly one a message, sometimes with others, or several at once with facts beside them."""

    async def script(submission: Submission) -> None:
        submission.give(ids[:1], cached=3)
        submission.give(ids[1:2], first_index=1)
        index = 2
        while index < len(ids):
            await asyncio.sleep(0)
            count = min(rng.choice([1, 1, 1, 2, 5]), len(ids) - index)
            if rng.random() < 0.1:
                submission.give(ids[index : index + count], first_index=index, prediction=(index, 1))
            else:
                rows = [index + i for i in range(count)]
                handles = [submission.submit.handle] * count
                step = pb.StepTokens(
                    handles=[999, *handles], indexes=[0, *rows], token_ids=[7, *(ids[i] for i in rows)]
                )
                submission._send(pb.WorkerMessage(tokens=step))
            index += count
        submission.give([], first_index=len(ids), finish=FinishReason.STOP)

    return script


@pytest.mark.in_turns(always=2)
@pytest.mark.parametrize(
    ("more", "is_native"),
    [
        ({"stop_token_ids": [STOP], "min_tokens": 70}, True),
        ({"n": 2}, False),
        ({}, True),
        ({"stream_options": {"include_usage": False}}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"stop": ["never there"]}, False),
        ({"stream_options": {"continuous_usage_stats": True, "include_usage": True}}, False),
        ({"logprobs": 1}, False),
    ],
)
async def test_streams_are_those_that_python_writes(
    counted: Callable[[], NativeStreams], more: dict[str, Any], is_native: bool
) -> None:
    ids = fakes.make_tokenizer().encode(TEXT)
    ids[40:40] = [fakes.END, fakes.USER, *ids[3:9]]
    for seed in range(3):
        seen = []
        for new in (None, counted):
            async with world(FakeWorker("d0", script=says(ids, Random(seed))), new=new) as made:
                events = await made.answer(BODY | more)
                metrics = made.parts.metrics
                counts = (metrics.generation_tokens.value, sum(metrics.itl.counts), metrics.answer_size.counts)
                seen.append((text_of(events), [one for one in events if not text_of([one])], counts))
                made.core.assert_idle()
        assert seen[0] == seen[1]
        if "n" not in more and "prompt" not in more:
            assert seen[0][0].startswith(TEXT[:20])
    assert (CountedStreams.num_written > len(ids)) == is_native


async def test_clients_that_do_not_read_get_everything_in_order(counted: Callable[[], NativeStreams]) -> None:
    """Their sockets take a part of an event only, which Python finishes when there is room.

    Now and then a token is Python's own. Where that is the one that finds the socket full, native code has nothing
    left to do, until the router ends the stream: with other tokens before, it falls elsewhere.
    """
    for num_before in range(1, 6 * MOST_TOKENS, MOST_TOKENS // 3):
        gave, received = await _read_late(counted, num_before)
        if CountedStreams.num_rests:
            break
    assert CountedStreams.num_rests
    events = [json.loads(line[6:]) for line in _unchunked(received).split(b"\n\n") if line.startswith(b"data: {")]
    assert text_of(events) == fakes.make_tokenizer().decode(gave)


async def _read_late(counted: Callable[[], NativeStreams], num_before: int) -> tuple[list[int], bytes]:
    """Tokens that a worker gave, and what a client received who read once its socket was full."""
    words = fakes.make_tokenizer().encode("the quick brown fox jumps over the lazy dog ")
    gave: list[int] = []
    is_full = asyncio.Event()
    num_written = CountedStreams.num_written

    def give(submission: Submission, count: int) -> None:
        first = len(gave)
        gave.extend(words[i % len(words)] for i in range(first, first + count))
        rows, handles = range(first, len(gave)), [submission.submit.handle] * count
        step = pb.StepTokens(handles=handles, indexes=rows, token_ids=gave[first:])
        submission._send(pb.WorkerMessage(tokens=step))

    async def script(submission: Submission) -> None:
        gave.append(words[0])
        submission.give(gave, cached=3)
        # On a slow machine Python could fill the socket before native code has written any, and would go on alone.
        while CountedStreams.num_written == num_written and len(gave) < ENOUGH_TOKENS:
            give(submission, 1)
            await asyncio.sleep(0.0005)
        give(submission, num_before)
        while not CountedStreams.num_rests and len(gave) < ENOUGH_TOKENS:
            give(submission, 16)
            await asyncio.sleep(0.0005)
        for number in range(500):
            give(submission, 1)
            await asyncio.sleep(0.0005)
            if number == 50:
                is_full.set()
        submission.give([], first_index=len(gave), finish=FinishReason.STOP)

    async with world(FakeWorker("d0", script=script), new=counted) as made:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, made.address)
        reader, writer = await asyncio.open_connection(sock=client, limit=2048)
        body = json.dumps({"prompt": "hello", "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await is_full.wait()
        received = await reader.read(-1)
        writer.close()
        made.core.assert_idle()
    return gave, received


def _unchunked(received: bytes) -> bytes:
    """Return the body of an answer, of which every byte of framing must be right."""
    _, rest = received.split(b"\r\n\r\n", 1)
    parts: list[bytes] = []
    while True:
        size, rest = rest.split(b"\r\n", 1)
        if not int(size, 16):
            assert rest == b"\r\n"
            return b"".join(parts)
        part, rest = rest[: int(size, 16)], rest[int(size, 16) :]
        assert rest[:2] == b"\r\n"
        parts.append(part)
        rest = rest[2:]


async def test_clients_that_leave_end_their_streams(counted: Callable[[], NativeStreams]) -> None:
    """The worker hears of it, all tokens so far are counted, and no descriptor is left."""
    ids = fakes.make_tokenizer().encode(TEXT)
    gave = 0
    ended = asyncio.Event()

    async def script(submission: Submission) -> None:
        nonlocal gave
        submission.give(ids[:1], cached=3)
        gave = 1
        while not submission.cancelled.is_set():
            submission.give([ids[gave % 20]], first_index=gave)
            gave += 1
            await asyncio.sleep(0.001)
        ended.set()

    async with world(FakeWorker("d0", script=script), new=counted) as made:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            ended.clear()
            url = f"http://127.0.0.1:{made.http.port}/v1/completions"
            async with (
                httpx.AsyncClient(timeout=120.0, trust_env=False) as client,
                client.stream("POST", url, json=BODY | {"ignore_eos": True}) as response,
            ):
                lines = response.aiter_lines()
                for _ in range(120):
                    await anext(lines)
            await ended.wait()
        assert 3 * 58 < made.parts.metrics.generation_tokens.value <= 3 * gave + 500
        made.core.assert_idle()
        assert len(os.listdir("/proc/self/fd")) <= before
    assert CountedStreams.num_written > 0


class Written:
    """One stream over a socket pair, with what was reported of it."""

    def __init__(self, streams: NativeStreams, handle: int, texts: Sequence[bytes], **changes: Any) -> None:
        self.here, self.there = socket.socketpair()
        self.there.setblocking(False)
        self.token_ids: list[int] = []
        self.rests: list[bytes] = []
        offsets = array("q", [0])
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        table = type("Table", (), {"text": b"".join(texts), "offsets": offsets})()
        events = PlainEvents(self.here.fileno(), lambda rest: False, b"<", b">")
        stream = PlainStream(events, table, frozenset(changes.get("stop_ids", ())), time.monotonic())
        streams.open(
            handle,
            StreamOffer(
                stream=stream,
                next_index=changes.get("next_index", 0),
                on_written=lambda token_ids, gaps_s: self.token_ids.extend(token_ids),
                write_rest=self.rests.append,
            ),
        )

    def read(self) -> bytes:
        try:
            return self.there.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def streams(new_streams: Callable[[], NativeStreams]) -> Any:
    made = new_streams()
    yield made
    made.close_all()


TEXTS = [b"", b"one", b"two", b"three"]


def test_only_next_tokens_with_texts_of_open_streams_are_written(streams: NativeStreams) -> None:
    a, b = Written(streams, 1, TEXTS), Written(streams, 7, TEXTS, next_index=5, stop_ids=[3])
    try:
        rows = [(1, 0, 1), (7, 4, 1), (7, 5, 2), (8, 0, 1), (1, 2, 1), (1, 1, 0), (7, 6, 3), (1, 1, 9), (1, 1, -1)]
        assert streams.write(*map(list, zip(*rows, strict=True))) == [1, 3, 4, 5, 6, 7, 8]
        assert (a.read(), b.read()) == (b"5\r\n<one>\r\n", b"5\r\n<two>\r\n")
        # Several of one stream go together.
        assert streams.write([1, 1, 7], [1, 2, 6], [2, 3, 2]) == []
        assert (a.read(), b.read()) == (b"c\r\n<two><three>\r\n", b"5\r\n<two>\r\n")
        streams.close(1)
        assert a.token_ids == [1, 2, 3]
        assert streams.write([1, 7], [3, 7], [1, 1]) == [0]
        assert (a.read(), b.read()) == (b"", b"5\r\n<one>\r\n")
        streams.close(7)
        assert b.token_ids == [2, 2, 1]
        assert not streams
    finally:
        a.close()
        b.close()


def test_stream_pauses_after_its_bound_and_when_its_socket_is_full(streams: NativeStreams) -> None:
    one = Written(streams, 1, [b"", b"x" * 4096])
    try:
        for index in range(MOST_TOKENS):
            assert streams.write([1], [index], [1]) == []
            assert len(one.read()) == 4098 + len("1002\r\n\r\n")
        assert streams.write([1], [MOST_TOKENS], [1]) == [0]
        streams.close(1)
        assert len(one.token_ids) == MOST_TOKENS
    finally:
        one.close()
    full = Written(streams, 2, [b"", b"y" * 65536])
    try:
        index = 0
        while not full.rests:
            # What comes behind the token that did not fit is Python's, also in the same message.
            left = streams.write([2, 9] * 8, [index // 2 for index in range(2 * index, 2 * index + 16)], [1] * 16)
            index += 8
        num_written = len(full.token_ids)
        assert full.token_ids == [1] * num_written
        assert left == sorted({*range(1, 16, 2), *range(16 - 2 * (index - num_written), 16, 2)})
        chunk = b"10002\r\n<" + b"y" * 65536 + b">\r\n"
        received = b""
        while data := full.read():
            received += data
        assert received + full.rests[0] == chunk * num_written
        assert streams.write([2], [num_written], [1]) == [0]
    finally:
        full.close()


def test_closed_sockets_and_their_numbers_get_nothing(streams: NativeStreams) -> None:
    """Another connection may have the closed one's number at once."""
    one = Written(streams, 1, TEXTS)
    number = one.here.fileno()
    one.close()
    other, far = socket.socketpair()
    try:
        assert number in (other.fileno(), far.fileno())
        assert streams.write([1], [0], [1]) == []
        assert one.rests == [b"5\r\n<one>\r\n"]
        for end in (other, far):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)
    finally:
        other.close()
        far.close()


def test_more_columns_than_ever_before(streams: NativeStreams) -> None:
    made = [Written(streams, handle, TEXTS) for handle in range(400)]
    try:
        handles = list(range(1000))
        assert streams.write(handles, [0] * 1000, [1] * 1000) == list(range(400, 1000))
        assert all(one.read() == b"5\r\n<one>\r\n" for one in made)
    finally:
        streams.close_all()
        for one in made:
            one.close()


def test_room_warns_once_a_minute_for_each_thing_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    room = StreamRoom(2)
    for now_s in (0.0, 1.0, 59.0, 60.0):
        room.num_open = 0
        room.on_opened(now_s)
        assert len(caplog.records) == (2 if now_s > 0.0 else 0)
        room.on_opened(now_s)
        room.on_no_descriptor(now_s)
        assert room.again_s == now_s + 1.0
    assert [one.levelname for one in caplog.records] == ["WARNING"] * 4


def test_no_streams_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    caplog.set_level("INFO")
    room = StreamRoom(1000)
    assert native_streams(room) is None
    assert room.most == 0
    (record,) = caplog.records
    assert (record.levelname, "no C++ compiler found" in record.message) == ("WARNING", True)
