"""Prompts ordered by routers for scoring, at both kinds of workers over a real engine thread and scheduler."""

import asyncio
import dataclasses
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import worker.prompt_logprobs as read_orders
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.roles import WorkerRole
from tests.support.engine import ledger
from tests.support.engine.ledger_host import settled, started_worker
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

WAIT_S = 20.0
PROMPT = [(7 * i) % 90 for i in range(60)]


class Bench:
    """One worker and one router's port."""

    def __init__(self, host: EngineHost, worker: PrefillWorker | DecodeWorker) -> None:
        self.host = host
        self.worker = worker
        self.port = SessionPort(Incarnation(2))

    def score(self, name: str = "r", *, attempt: int = 1, port: SessionPort | None = None, **fields: Any) -> None:
        order = {"prompt_token_ids": PROMPT, "hash_root": ledger.ROOT, **fields}
        order_pb = pb.ScorePrompt(request_id=name, attempt=attempt, **order)
        self.worker.order(port or self.port, pb.RouterMessage(score_prompt=order_pb))

    async def message(self) -> pb.WorkerMessage:
        async with asyncio.timeout(WAIT_S):
            message = await self.port.next()
        assert message is not None
        return message

    async def parts(self) -> list[pb.PromptScores]:
        """All parts of one scoring."""
        found = [(await self.message()).prompt_scores]
        while not found[-1].HasField("times"):
            found.append((await self.message()).prompt_scores)
        return found

    async def assert_empty(self) -> None:
        ledger.assert_empty(await settled(self.host))


@pytest.fixture(params=["prefill", "decode"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with started_worker(WorkerRole(request.param)) as (host, worker):
        yield Bench(host, worker)


async def test_prompt_scoring_scores_are_sent_in_ordered_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_orders, "_VALUES_PER_MESSAGE", 80)
    bench.score(num_top=2)
    scores = await bench.parts()
    assert len(scores) == 5, "13 tokens in each part"
    assert {(part.request_id, part.attempt) for part in scores} == {("r", 1)}
    assert [value for part in scores for value in part.logprobs] == [-float(token) for token in PROMPT[1:]]
    assert [rank for part in scores for rank in part.ranks] == list(range(1, 60))
    assert [top for part in scores for top in part.top_ids] == [0, 1] * 59
    assert [value for part in scores for value in part.top_logprobs] == [0.0, -1.0] * 59
    await bench.assert_empty()


async def test_prompt_scoring_mean_covers_all_rows(bench: Bench) -> None:
    bench.score("mean")
    (part,) = await bench.parts()
    assert list(part.mean) == pytest.approx([sum(PROMPT) / 60, 59 / 2], rel=1e-6)
    bench.score("short", prompt_token_ids=[5], num_top=3)
    (part,) = await bench.parts()
    assert (len(part.logprobs), len(part.mean)) == (0, 0)
    await bench.assert_empty()


async def test_prompt_scoring_continuations_may_use_cache(bench: Bench) -> None:
    for cached in (0, 48):
        bench.score("next", num_next=30)
        (part,) = await bench.parts()
        assert list(part.top_ids) == list(range(30))
        assert list(part.top_logprobs) == [-float(i) for i in range(30)]
        pool = bench.worker.identity.role.value
        assert (getattr(part.times.cached, f"{pool}_pool"), len(part.logprobs), len(part.mean)) == (cached, 0, 0)
    await bench.assert_empty()


async def test_prompt_scoring_labels_and_last_tokens_may_use_cache(bench: Bench) -> None:
    pool = bench.worker.identity.role.value
    for cached in (0, 48):
        bench.score("last", pooling=[pb.POOLING_MODE_LAST])
        (part,) = await bench.parts()
        assert list(part.mean) == [float(PROMPT[-1]), 59.0]
        assert getattr(part.times.cached, f"{pool}_pool") == cached
    bench.score("label", num_top=0, label_token_ids=[7, 3])
    (part,) = await bench.parts()
    assert (list(part.logprobs), list(part.top_ids), list(part.mean)) == ([-7.0, -3.0], [], [])
    assert getattr(part.times.cached, f"{pool}_pool") == 48
    await bench.assert_empty()


async def test_prompt_scoring_pooled_states_pass_through_the_head(bench: Bench) -> None:
    head: Any = lambda vectors: [array("f", [sum(vector)]) for vector in vectors]  # noqa: E731
    bench.host.parts = dataclasses.replace(bench.host.parts, pooling_head=head)
    bench.score(pooling=[pb.POOLING_MODE_LAST, pb.POOLING_MODE_CLS], through_head=True)
    (part,) = await bench.parts()
    assert list(part.mean) == [PROMPT[-1] + 59.0 + PROMPT[0]]
    bench.score("plain", pooling=[pb.POOLING_MODE_MAX], num_skipped=50)
    (part,) = await bench.parts()
    assert list(part.mean) == [float(max(PROMPT[50:])), 59.0]
    await bench.assert_empty()


class Head:
    """Layers that sum a vector; they begin when told to."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.error: Exception | None = None

    def __call__(self, vectors: Sequence[Sequence[float]]) -> "list[array[float]]":
        self.sizes.append(len(vectors))
        self.threads.add(threading.current_thread())
        self.entered.set()
        assert self.release.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return [array("f", [sum(vector)]) for vector in vectors]

    async def scores(self, bench: Bench, *names: str) -> None:
        """Have these prompts computed in one step, and wait until the layers have begun."""
        made: Any = self
        bench.host.parts = dataclasses.replace(bench.host.parts, pooling_head=made)
        gate = threading.Event()
        bench.host.post(lambda _: gate.wait(WAIT_S))
        for index, name in enumerate(names):
            prompt = [index, *PROMPT[:2]]
            bench.score(name, prompt_token_ids=prompt, pooling=[pb.POOLING_MODE_LAST], through_head=True)
        gate.set()
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)


async def test_prompt_scoring_head_takes_a_steps_vectors_together_off_the_loop(bench: Bench) -> None:
    head = Head()
    await head.scores(bench, "first", "cancelled", "last")
    bench.score("beside", num_top=0)
    assert [part.request_id for part in await bench.parts()] == ["beside"], "others are answered meanwhile"
    bench.worker.order(bench.port, pb.RouterMessage(cancel=pb.Cancel(request_id="cancelled", attempt=1)))
    ending = asyncio.create_task(bench.worker.finish())
    await asyncio.sleep(0.05)
    assert not ending.done(), "a drain waits for the answers"
    head.release.set()
    for name in ("first", "last"):
        (part,) = await bench.parts()
        assert (part.request_id, list(part.mean)) == (name, [PROMPT[1] + 2.0])
    async with asyncio.timeout(WAIT_S):
        await ending
    assert head.sizes == [3]
    assert threading.main_thread() not in head.threads
    await bench.assert_empty()


async def test_prompt_scoring_failed_head_refuses_its_step_alone(bench: Bench) -> None:
    head = Head()
    head.error = RuntimeError("out of memory")
    head.release.set()
    await head.scores(bench, "first", "last")
    for name in ("first", "last"):
        refused = (await bench.message()).refused
        assert (refused.request_id, refused.failure.code) == (name, "InternalError")
    head.error = None
    await head.scores(bench, "again")
    assert [part.request_id for part in await bench.parts()] == ["again"]
    await bench.assert_empty()


async def test_prompt_scoring_router_that_left_gets_nothing_from_the_head(bench: Bench) -> None:
    head = Head()
    await head.scores(bench, "left")
    bench.worker.closed(bench.port)
    head.release.set()
    async with asyncio.timeout(WAIT_S):
        await bench.worker.finish()
    bench.port.finish()
    assert await bench.port.next() is None
    await bench.assert_empty()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"pooling": [99]}, "InvalidRequest"),
        ({"pooling": [pb.POOLING_MODE_CLS] * 2}, "InvalidRequest"),
        ({"num_skipped": 60}, "InvalidRequest"),
        ({"through_head": True}, "InvalidRequest"),
        ({"num_top": 0, "label_token_ids": [ledger.VOCAB]}, "InvalidRequest"),
        ({"num_top": 0, "label_token_ids": [1] * 65}, "InvalidRequest"),
        ({"prompt_token_ids": [ledger.VOCAB]}, "InvalidRequest"),
        ({"prompt_token_ids": []}, "InvalidRequest"),
        ({"hash_root": b"short"}, "InvalidRequest"),
        ({"num_top": 21}, "InvalidRequest"),
        ({"num_next": 0}, "InvalidRequest"),
        ({"num_next": ledger.VOCAB + 1}, "InvalidRequest"),
        ({"num_next": 2, "prompt_token_ids": [1] * 200}, "ContextLengthExceeded"),
        ({"prompt_token_ids": [1] * 201}, "ContextLengthExceeded"),
        ({"timeout_s": 0.0}, "DeadlineExceeded"),
    ],
)
async def test_prompt_scoring_invalid_order_is_refused(bench: Bench, fields: dict[str, Any], code: str) -> None:
    bench.score(**fields)
    refused = (await bench.message()).refused
    assert (refused.request_id, refused.attempt, refused.failure.code) == ("r", 1, code)
    await bench.assert_empty()


async def test_prompt_scoring_cancelled_order_gets_no_answer(bench: Bench) -> None:
    other = SessionPort(Incarnation(3))
    bench.score("cancelled", num_top=0)
    bench.score("left", port=other)
    bench.worker.order(bench.port, pb.RouterMessage(cancel=pb.Cancel(request_id="cancelled", attempt=1)))
    bench.worker.closed(other)
    bench.score("cancelled", attempt=2, num_top=0)
    assert {part.attempt for part in await bench.parts()} == {2}
    await bench.assert_empty()
    other.finish()
    assert await other.next() is None


async def test_prompt_scoring_drain_finishes_running_and_refuses_new(bench: Bench) -> None:
    bench.score("before", num_top=0)
    ending = asyncio.create_task(bench.worker.finish())
    await asyncio.sleep(0)
    bench.score("after", num_top=0)
    refused = (await bench.message()).refused
    assert (refused.request_id, refused.failure.code) == ("after", "Unavailable")
    assert [part.request_id for part in await bench.parts()] == ["before"]
    async with asyncio.timeout(WAIT_S):
        await ending


async def test_prompt_scoring_repeated_attempt_is_refused(bench: Bench) -> None:
    bench.score(num_top=0)
    bench.score(num_top=0)
    assert (await bench.message()).refused.failure.code == "InvalidRequest"
    assert [part.request_id for part in await bench.parts()] == ["r"]
