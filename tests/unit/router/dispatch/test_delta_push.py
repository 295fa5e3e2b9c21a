"""Dispatch pushes tokens to readers: slow readers, failing readers, all failures of workers."""

import asyncio
import json
import time

import httpx
import pytest

from router.dispatch.choices.context import DispatchSettings
from router.http.app import create_app
from router.http.server.http_server import HttpServer
from tandem.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, PROMPT, Cluster, cluster, routed
from tests.support.router.delta_readers import QuickReader, SlowReader, pushed
from tests.support.router.servers import fakes
from tests.unit.router.dispatch.test_resumed_streams import *  # noqa: F403

# The whole ladder again, by this way.
from tests.unit.router.dispatch.test_worker_failures import *  # noqa: F403

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "generate", lambda self, request: pushed(self.dispatcher, request))


async def test_fast_sink_gets_each_token_once_in_order() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        reader = QuickReader()
        await router.dispatcher.run(routed(n=3), reader)
        for choice in range(3):
            assert reader.token_ids(choice) == expected_tokens(PROMPT, count=8, seed=3, choice=choice)
        assert sum(delta.finish is not None for delta in reader.taken) == 3
        router.assert_idle()


async def test_tokens_alone_are_progress_after_a_failed_transfer() -> None:
    """The prefill worker whose hand-off failed behind the first token may be tried again once more tokens have come."""

    async def transfer_fails(submission: Submission) -> None:
        submission.give(submission.tokens[:1], cached=0)
        submission.fail_transfer()
        await submission.reroutes.get()
        for index in (1, 2, 3):
            submission.give(submission.tokens[index : index + 1], first_index=index)

    decode = FakeWorker("d0", script=transfer_fails)
    async with cluster(decode, FakeWorker("p0", role=WorkerRole.PREFILL)) as router, asyncio.timeout(WAIT_S):
        reader = QuickReader()
        running = asyncio.create_task(router.dispatcher.run(routed(LONG_PROMPT), reader))
        for _ in range(4):
            await reader.arrived.get()
        (run,) = router.dispatcher._runs.values()
        (choice,) = run._choices
        assert choice._progress.excluded == {}
        assert reader.token_ids() == expected_tokens(LONG_PROMPT, count=8, seed=3)[:4]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_slow_sink_gets_everything_once_ready() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        reader = SlowReader()
        running = asyncio.create_task(router.dispatcher.run(routed(), reader))
        await reader.waiting.wait()
        await asyncio.sleep(0.05)
        assert len(reader.taken) == 1
        reader.room.set()
        await running
        taken = [token.token_id for delta in reader.taken for token in delta.tokens]
        assert taken == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_stuck_sink_overflows_alone() -> None:
    async def flood(submission: Submission) -> None:
        for start in range(0, 64, 8):
            submission.give(submission.tokens[start : start + 8], first_index=start)

    worker = FakeWorker("d0", script=flood)
    settings = DispatchSettings(stream_buffer_tokens=24)
    async with cluster(worker, settings=settings) as router, asyncio.timeout(WAIT_S):
        slow = SlowReader()
        running = asyncio.create_task(router.dispatcher.run(routed(max_tokens=64), slow))
        await (await worker.submissions.get()).cancelled.wait()
        worker.script = answer
        other = QuickReader()
        await router.dispatcher.run(routed(request_id="r2"), other)
        assert other.token_ids() == expected_tokens(PROMPT, count=8, seed=3)
        slow.room.set()
        with pytest.raises(Overloaded):
            await running
        router.assert_idle()


@pytest.mark.parametrize("fails_at", [1, 3])
async def test_sink_error_ends_only_its_request(fails_at: int) -> None:
    class Failing(QuickReader):
        def on_delta(self, delta: object) -> bool:
            super().on_delta(delta)
            if len(self.taken) == fails_at:
                raise InternalError("cannot show this")
            return False

    async def endless(submission: Submission) -> None:
        for index in range(6):
            submission.give(submission.tokens[index : index + 1], first_index=index)
            await asyncio.sleep(0)

    worker = FakeWorker("d0", script=endless)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        with pytest.raises(InternalError, match="cannot show this"):
            await router.dispatcher.run(routed(), Failing())
        await (await worker.submissions.get()).cancelled.wait()
        worker.script = answer
        other = QuickReader()
        await router.dispatcher.run(routed(request_id="r2"), other)
        assert other.token_ids() == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_cancelling_cancels_on_the_worker() -> None:
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(router.dispatcher.run(routed(), QuickReader()))
        submission = await worker.submissions.get()
        running.cancel()
        await submission.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await running
        router.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_reach_socket_from_worker(stream: bool) -> None:
    """Real sockets on both sides: whole and streamed answers have equal text; ids come with each event on request."""
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.frontend.clock = asyncio.get_running_loop().time
    worker = FakeWorker("d0")
    async with cluster(worker) as core, httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:
        app = create_app(parts.frontend, core.dispatcher, parts.ready, parts.config, parts.metrics)
        async with HttpServer(app, host="127.0.0.1", port=0, grace_s=5.0) as listener:
            body = {"prompt": [5, 6, 7], "n": 2, "seed": 3, "max_tokens": 8, "stream": stream, "ignore_eos": True}
            url = f"http://127.0.0.1:{listener.port}/v1/completions"
            got = await client.post(url, json=body, headers={"X-Tandem-Stream-Ids": "1"})
        core.assert_idle()
    sampled = [expected_tokens((5, 6, 7), count=8, seed=3, choice=choice) for choice in range(2)]
    expected = [parts.tokenizer.decode([i for i in ids if i < parts.tokenizer.size]) for ids in sampled]
    texts = ["", ""]
    if stream:
        *events, done = [event for event in got.text.split("\n\n") if event]
        assert done == "data: [DONE]"
        for event in events:
            id_line, data = event.split("\n")
            assert id_line.startswith("id: ")
            for choice in json.loads(data.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in got.json()["choices"]]
    assert texts == expected


async def test_client_leaving_stream_cancels_on_worker() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.frontend.clock = asyncio.get_running_loop().time

    async def some(submission: Submission) -> None:
        submission.give(submission.tokens[:2])

    worker = FakeWorker("d0", script=some)
    async with cluster(worker) as core, asyncio.timeout(WAIT_S):
        app = create_app(parts.frontend, core.dispatcher, parts.ready, parts.config, parts.metrics)
        async with HttpServer(app, host="127.0.0.1", port=0, grace_s=5.0) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            body = b'{"prompt": [5, 6], "stream": true, "return_token_ids": true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            await reader.readuntil(b"data: ")
            writer.close()
            await (await worker.submissions.get()).cancelled.wait()
            await core.dispatcher.drain(most_s=WAIT_S)
        core.assert_idle()
    assert parts.metrics.registry.get_sample_value("tandem_request_failures_total", {"code": Cancelled.code.value}) == 1


async def test_stuck_sink_ends_at_deadline() -> None:
    async def begin(submission: Submission) -> None:
        for index in range(3):
            submission.give(submission.tokens[index : index + 1], first_index=index)

    worker = FakeWorker("d0", script=begin)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        reader = SlowReader()
        with pytest.raises(DeadlineExceeded):
            await router.dispatcher.run(routed(deadline_s=time.monotonic() + 0.2), reader)
        assert len(reader.taken) == 1, "nothing was pushed on it"
        await worker.submissions.get_nowait().cancelled.wait()
        router.assert_idle()


async def test_sink_failing_in_ready_ends_the_request() -> None:
    class Broken(SlowReader):
        async def ready(self) -> None:
            await asyncio.sleep(0)
            raise OSError("gone")

    worker = FakeWorker("d0", script=answer)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        with pytest.raises(OSError, match="gone"):
            await router.dispatcher.run(routed(), Broken())
        router.assert_idle()
