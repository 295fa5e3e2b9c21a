"""What ends a stream that native code writes, or keeps one from it: deaths, errors, deadlines, TLS, other kinds of
answers. On the event loops that routers and tests have."""

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router.access.access_files import AccessControl
from router.api.request_meter import RequestMeter
from router.dispatch import request_run
from router.fleet.native_streams import NativeStreams
from tandem.config.access import RouterTls
from tandem.config.cluster import RouterConfig
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import FinishReason
from tests.support.certificates import Authority
from tests.support.fake_worker import FakeWorker, Submission
from tests.support.router.native_world import CountedStreams, World, events_of, make_native_streams, text_of, world
from tests.support.router.servers import fakes

TOKENIZER = fakes.make_tokenizer()
WORDS = TOKENIZER.encode("the quick brown fox jumps over the lazy dog ")
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one of the event loops."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_it(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test)

    return run_it


@pytest.fixture
def counted() -> Callable[[], NativeStreams]:
    found = make_native_streams(1000)
    CountedStreams.num_written = CountedStreams.num_rests = 0
    args = found.args  # type: ignore[attr-defined]  # a partial
    return lambda: CountedStreams(*args)


def text_at(count: int) -> str:
    return TOKENIZER.decode([token_at(i) for i in range(count)])


def token_at(index: int) -> int:
    return WORDS[index % len(WORDS)]


def give_columns(submission: Submission, indexes: Sequence[int], handle: int | None = None) -> None:
    handles = [submission.submit.handle if handle is None else handle] * len(indexes)
    step = pb.StepTokens(handles=handles, indexes=indexes, token_ids=[token_at(i) for i in indexes])
    submission._send(pb.WorkerMessage(tokens=step))


def gives(count: int, end: Callable[[Submission], Any]) -> Callable[[Submission], Awaitable[None]]:
    """A script that gives so many tokens, each by itself, and then ends the attempt."""

    async def script(submission: Submission) -> None:
        submission.give([token_at(0)], cached=1)
        for index in range(1, count):
            if submission.cancelled.is_set():
                return
            give_columns(submission, [index])
            await asyncio.sleep(0)
        end(submission)

    return script


def stops_at(count: int) -> Callable[[Submission], None]:
    return lambda submission: submission.give([], first_index=count, finish=FinishReason.STOP)


def request_of(*headers: str, **more: Any) -> bytes:
    body = json.dumps({"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True} | more).encode()
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def read_stream(reader: asyncio.StreamReader) -> list[Any]:
    """Read one answer of a connection that stays open; every byte of framing must be right."""
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        part = await reader.readexactly(size + 2)
        assert part.endswith(b"\r\n")
        parts.append(part[:-2])
    assert await reader.readexactly(2) == b"\r\n"
    return events_of(b"".join(parts).decode())


def test_death_of_the_worker_loses_and_repeats_no_token(run: Run, counted: Callable[[], NativeStreams]) -> None:
    given: list[list[int]] = []

    async def test() -> None:
        async def script(submission: Submission) -> None:
            before = list(submission.submit.generated_token_ids)
            given.append(before)
            submission.give([token_at(len(before))], cached=1)
            for index in range(len(before) + 1, 300):
                give_columns(submission, [index])
                await asyncio.sleep(0)
                if not before and index == 119:
                    await asyncio.sleep(0.05)
                    for worker in workers:
                        if not worker.submissions.empty():
                            await worker.crash()
                            return
            submission.give([], first_index=300, finish=FinishReason.STOP)

        workers = [FakeWorker(name, script=script) for name in ("d0", "d1")]
        async with world(*workers, new=counted) as made:
            events = await made.answer({"prompt": "hello", "max_tokens": 400, "stream": True})
            assert text_of(events) == text_at(300)
            assert given == [[], [token_at(i) for i in range(120)]]
            assert made.parts.metrics.generation_tokens.value == 300
            made.core.assert_idle()

    run(test())
    assert CountedStreams.num_written > 200


def test_connection_goes_on_after_an_error_amid_a_stream(run: Run, counted: Callable[[], NativeStreams]) -> None:
    async def test() -> None:
        worker = FakeWorker("d0", script=gives(100, lambda submission: submission.refuse("InvalidRequest")))
        async with world(worker, new=counted) as made:
            reader, writer = await asyncio.open_connection(*made.address)
            for _ in range(2):
                writer.write(request_of())
                events = await read_stream(reader)
                assert text_of(events) == text_at(100)
                assert "error" in events[-1]
            writer.close()
            await writer.wait_closed()
            made.core.assert_idle()

    run(test())
    assert CountedStreams.num_written > 100


def test_pipelined_requests_are_answered_one_behind_the_other(run: Run, counted: Callable[[], NativeStreams]) -> None:
    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=counted) as made:
            reader, writer = await asyncio.open_connection(*made.address)
            writer.write(request_of() * 3)
            for _ in range(3):
                assert text_of(await read_stream(reader)) == text_at(200)
            writer.close()
            await writer.wait_closed()

    run(test())
    assert CountedStreams.num_written > 400


def test_deadline_ends_a_stream_with_an_error_event(run: Run, counted: Callable[[], NativeStreams]) -> None:
    async def script(submission: Submission) -> None:
        submission.give([token_at(0)], cached=1)
        index = 0
        while not submission.cancelled.is_set():
            index += 1
            give_columns(submission, [index])
            await asyncio.sleep(0.002)

    async def test() -> None:
        async with world(FakeWorker("d0", script=script), new=counted) as made:
            reader, writer = await asyncio.open_connection(*made.address)
            writer.write(request_of("X-Tandem-Timeout: 0.5"))
            *events, last = await read_stream(reader)
            assert last["error"]["code"] == "deadline_exceeded"
            assert text_of(events) == text_at(int(made.parts.metrics.generation_tokens.value))
            writer.close()
            await writer.wait_closed()

    run(test())
    assert CountedStreams.num_written > 0


def test_other_events_and_unknown_handles_change_nothing(run: Run, counted: Callable[[], NativeStreams]) -> None:
    async def script(submission: Submission) -> None:
        submission.give([token_at(0)], cached=1)
        for index in range(1, 120):
            give_columns(submission, [index])
            if index % 10 == 5:
                submission.fail_transfer("another")
            if index % 10 == 7:
                give_columns(submission, [index], handle=2**64 - 1)
            await asyncio.sleep(0)
        stops_at(120)(submission)

    async def test() -> None:
        async with world(FakeWorker("d0", script=script), new=counted) as made:
            assert text_of(await made.answer({"prompt": "a", "stream": True, "max_tokens": 400})) == text_at(120)

    run(test())
    assert CountedStreams.num_written > 50


def test_bug_in_what_counts_tokens_ends_one_request_alone(
    run: Run, counted: Callable[[], NativeStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(100, stops_at(100))), new=counted) as made:
            body = {"prompt": "hello", "max_tokens": 400, "stream": True}
            with monkeypatch.context() as broken:
                broken.delattr(RequestMeter, "written")
                assert (await made.answer(body))[-1]["error"]["code"] == "internal_error"
            assert text_of(await made.answer(body)) == text_at(100)
            assert made.core.registry.num_left == 0
            made.core.assert_idle()

    run(test())


@pytest.mark.parametrize(
    ("headers", "more"),
    [
        (["X-Tandem-Stream-Ids: 1"], {}),
        ([], {"stop": ["never"]}),
        ([], {"n": 2}),
    ],
)
def test_streams_of_other_kinds_are_written_by_python(
    run: Run, counted: Callable[[], NativeStreams], headers: list[str], more: dict[str, Any]
) -> None:
    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(100, stops_at(100))), new=counted) as made:
            reader, writer = await asyncio.open_connection(*made.address)
            writer.write(request_of(*headers, **more))
            events = await read_stream(reader)
            first = [[one for one in event["choices"] if one["index"] == 0] for event in events]
            assert "".join(one["text"] for choices in first for one in choices) == text_at(100)
            writer.close()
            await writer.wait_closed()

    run(test())
    assert CountedStreams.num_written == 0


def test_tls_is_written_by_python(run: Run, counted: Callable[[], NativeStreams], tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, name="127.0.0.1")
    config = RouterConfig(tls=RouterTls(cert=str(files.cert), key=str(files.key)))

    async def test() -> None:
        trusting = ssl.create_default_context(cafile=str(files.ca))
        async with (
            AccessControl(config) as keeper,
            world(FakeWorker("d0", script=gives(100, stops_at(100))), new=counted, tls=keeper.tls) as made,
        ):
            reader, writer = await asyncio.open_connection(*made.address, ssl=trusting)
            writer.write(request_of())
            assert text_of(await read_stream(reader)) == text_at(100)
            writer.close()

    run(test())
    assert CountedStreams.num_written == 0


def test_native_tokens_are_charged_like_others(
    run: Run, counted: Callable[[], NativeStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    account = request_run._UNCOUNTED
    monkeypatch.setattr(type(account), "on_token", lambda self, count=1: charged.append(count))
    monkeypatch.setattr(type(account), "on_delta", lambda self, delta: charged.append(len(delta.tokens)))

    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=counted) as made:
            await _whole(made)

    run(test())
    assert sum(charged) == 200
    assert max(charged) > 1


async def _whole(made: World) -> None:
    assert text_of(await made.answer({"prompt": "hello", "max_tokens": 400, "stream": True})) == text_at(200)


def test_metrics_tell_natively_written_tokens_from_others(run: Run, counted: Callable[[], NativeStreams]) -> None:
    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=counted) as made:
            await _whole(made)
            assert (await made.answer({"prompt": "hello", "stop": ["x"], "stream": True, "max_tokens": 400}))[0]
            lines = made.parts.metrics.render().decode().splitlines()
            native = float(CountedStreams.num_written)
            assert f'tandem_written_tokens_total{{writer="native"}} {native}' in lines
            assert f'tandem_written_tokens_total{{writer="python"}} {_sent(made) - native}' in lines
            assert _sent(made) > 200

    run(test())
    assert 150 < CountedStreams.num_written < 200


def _sent(made: World) -> float:
    return made.parts.metrics.generation_tokens.value


def test_streams_beyond_the_bound_are_written_by_python(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """One at a time: descriptors are a connection's first."""
    found = make_native_streams(1)
    most = 0

    class Watched(CountedStreams):
        def write(self, *columns: Sequence[int]) -> Sequence[int]:
            nonlocal most
            most = max(most, self._room.num_open)
            return super().write(*columns)

    CountedStreams.num_written = 0
    args = found.args  # type: ignore[attr-defined]  # a partial

    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=lambda: Watched(*args)) as made:
            await asyncio.gather(*(_whole(made) for _ in range(4)))

    run(test())
    assert most == 1
    assert 0 < CountedStreams.num_written < 800
    room = args[1]
    assert room.num_open == 0
    assert 0 < room.num_full <= 800 - CountedStreams.num_written
    assert room.num_without_descriptor == 0
    assert _warnings(caplog) == [room.most]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[object]:
    """What the warnings about native streams name: there is at most one a minute."""
    return [one.args[0] for one in caplog.records if one.name == "router.fleet.native_streams" and one.args]


def test_no_stream_is_further_behind_than_a_moment(
    run: Run, counted: Callable[[], NativeStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.native_streams.MOST_S", 0.0)

    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=counted) as made:
            await _whole(made)

    run(test())
    assert CountedStreams.num_written == 0


def test_without_descriptors_tokens_are_written_by_python_and_tried_again_later(
    run: Run, counted: Callable[[], NativeStreams], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.http.server.connection._DirectLink.descriptor", lambda self: 1 << 20)

    async def test() -> None:
        async with world(FakeWorker("d0", script=gives(200, stops_at(200))), new=counted) as made:
            await _whole(made)

    began_s = time.monotonic()
    run(test())
    assert CountedStreams.num_written == 0
    room = counted()._room
    assert room.num_open == 0
    assert began_s < room.again_s
    assert room.num_without_descriptor > 0
    assert room.num_full == 0
    assert _warnings(caplog) == [0]
