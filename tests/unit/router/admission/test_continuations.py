"""Continued streams: the first at a router is always admitted, later ones within limits, all counted."""

import asyncio

import pytest
from msgspec.structs import replace

from router.admission import continuations
from router.admission.continuations import Continuations
from router.dispatch.dispatcher import Dispatcher
from router.types.requests import ResumePoint, RoutedRequest
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import Overloaded, StreamTaken
from tandem.values.ids import Incarnation, RequestId
from tests.support.fake_worker import FakeWorker, Submission, expected_tokens, hold
from tests.support.router.admission_queues import gated, of
from tests.support.router.cluster import PROMPT, collect, routed

LENGTH, SHOWN = 8, 3
WHOLE = expected_tokens(PROMPT, count=LENGTH, seed=3)
MANY = LimitsConfig(default=TenantLimits(requests_per_minute=100, tokens_per_minute=100_000))


def again(stream: str, *, worker: int = 1, n: int = 1) -> RoutedRequest:
    point = ResumePoint(worker=Incarnation(worker), num_tokens=SHOWN)
    request = replace(routed(request_id=stream, n=n), tenant="a")
    return replace(request, resume=(point,) * n, resumptions=1)


def used(gate: Dispatcher) -> tuple[int, float, int, int]:
    account = gate.queue.admission._limiter._account("a")
    return account.requests_taken, account.tokens_taken, account.usage.num_inflight, account.num_promised


async def outcome(gate: Dispatcher, request: RoutedRequest) -> str | None:
    """The limit that it was refused for, if it was."""
    try:
        assert await collect(gate.generate(request)) == {0: WHOLE}
    except Overloaded as refusal:
        return refusal.param
    return None


async def answer(submission: Submission) -> None:
    submission.give_all()


class Streams:
    """`Continuations` with a clock of its own."""

    def __init__(self, **bounds: float) -> None:
        self.now_s = 0.0
        most, remembered_s = int(bounds.get("most", 2)), bounds.get("remembered_s", 600.0)
        self.book = Continuations(most=most, remembered_s=remembered_s, clock=lambda: self.now_s)

    def begin(self, stream: str) -> bool:
        promised = self.book.is_promised(RequestId(stream))
        if promised:
            self.book.on_begin(RequestId(stream))
        return promised


def test_continuations_stream_is_promised_once() -> None:
    streams = Streams()
    assert streams.begin("one")
    assert not streams.begin("one")
    streams.book.ended()
    assert not streams.begin("one")
    assert streams.begin("two")


def test_continuations_promise_at_most_the_running_bound() -> None:
    streams = Streams(most=2)
    assert [streams.begin(name) for name in ("one", "two", "three")] == [True, True, False]
    streams.book.ended()
    assert streams.begin("three")


def test_continuations_expired_id_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(most=1000, remembered_s=600.0)
    for number in range(20):
        streams.now_s = 100.0 * number
        assert streams.begin(str(number))
    assert len(streams.book._begun_s) == 7
    monkeypatch.setattr(continuations, "_MOST_REMEMBERED", 3)
    assert streams.begin("last")
    assert list(streams.book._begun_s) == ["18", "19", "last"]


@pytest.mark.parametrize(
    "limits",
    [
        TenantLimits(concurrent_requests=1),
        TenantLimits(requests_per_minute=1),
        TenantLimits(tokens_per_minute=len(PROMPT) + 1),
    ],
)
async def test_continued_stream_bypasses_full_router_and_limits(limits: TenantLimits) -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, limits=LimitsConfig(default=limits)) as (gate, core):
        running = asyncio.create_task(collect(gate.generate(of("a", 0))))
        held = await worker.submissions.get()
        with pytest.raises(Overloaded):
            await collect(gate.generate(of("a", 1)))
        worker.script = answer
        assert await collect(gate.generate(again("broken"))) == {0: WHOLE}
        held.give_all()
        await running
        core.assert_idle()


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (TenantLimits(requests_per_minute=1), "requests_per_minute"),
        (TenantLimits(tokens_per_minute=100), "tokens_per_minute"),
    ],
)
async def test_continuations_repeated_id_gets_no_more_than_key_limits(limits: TenantLimits, name: str) -> None:
    worker = FakeWorker("d0")
    async with gated(worker, limits=LimitsConfig(default=limits)) as (gate, core):
        results = [await outcome(gate, again("kept")) for _ in range(30)]
        served = results.count(None)
        assert 1 <= served < len(results)
        assert served * (len(PROMPT) + LENGTH) <= 100 + 2 * (len(PROMPT) + LENGTH)
        assert set(results[served:]) == {name}
        # What it had counts for what is new as well.
        with pytest.raises(Overloaded):
            await collect(gate.generate(of("a", 0)))
        core.assert_idle()


async def test_continuations_respect_concurrent_request_limit() -> None:
    worker = FakeWorker("d0", script=hold)
    limits = LimitsConfig(default=TenantLimits(concurrent_requests=1))
    async with gated(worker, limits=limits) as (gate, _):
        first = asyncio.create_task(collect(gate.generate(again("s0"))))
        held = await worker.submissions.get()
        for number in range(1, 6):
            with pytest.raises(Overloaded, match="concurrent_requests"):
                await collect(gate.generate(again(f"s{number}")))
        held.give_all()
        assert await first == {0: WHOLE}
        worker.script = answer
        # Nothing of the promise is lost by a refusal.
        assert await collect(gate.generate(again("s1"))) == {0: WHOLE}


async def test_continuations_beyond_bound_wait_their_turn() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, running=1, passing=2) as (gate, core):
        requests = [asyncio.create_task(collect(gate.generate(again(f"s{number}")))) for number in range(4)]
        held = [await worker.submissions.get() for _ in range(2)]
        assert gate.queue.admission.num_waiting == 2
        worker.script = answer
        for submission in held:
            submission.give_all()
        assert await asyncio.gather(*requests) == [{0: WHOLE}] * 4
        core.assert_idle()


async def test_continuation_inherits_slot_of_former_reader() -> None:
    """Repeated reconnects with half-open connections never count as more than one request."""
    worker = FakeWorker("d0", script=hold)
    limits = LimitsConfig(default=TenantLimits(concurrent_requests=1))
    async with gated(worker, running=9, limits=limits) as (gate, core):
        readers = []
        for _ in range(4):
            readers.append(asyncio.create_task(collect(gate.generate(again("s")))))
            held = await worker.submissions.get()
            # The former reader is notified by its own task.
            await asyncio.gather(*readers[:-1], return_exceptions=True)
        held.give_all()
        assert await readers[-1] == {0: WHOLE}
        for former in readers[:-1]:
            assert isinstance(former.exception(), StreamTaken)
        assert used(gate)[2:] == (0, 0)
        core.assert_idle()


@pytest.mark.parametrize(
    ("kept", "tokens", "counted"),
    [
        # Neither the prompt nor what the client had is computed again.
        (("s-0", "s-1"), 2 * (LENGTH - SHOWN), 2 * (LENGTH - SHOWN)),
        # One choice is, and the prompt for it.
        (("s-1",), len(PROMPT) + LENGTH + LENGTH - SHOWN, LENGTH + LENGTH - SHOWN),
        ((), len(PROMPT) + 2 * LENGTH, 2 * LENGTH),
    ],
)
async def test_continued_stream_recomputed_tokens_are_charged_again(
    kept: tuple[str, ...], tokens: int, counted: int
) -> None:
    worker = FakeWorker("d0")
    answers = {f"s-{choice}": expected_tokens(PROMPT, count=LENGTH, seed=3, choice=choice) for choice in range(2)}
    worker.keeps = {name: answers[name] for name in kept}
    async with gated(worker, limits=MANY) as (gate, core):
        assert await collect(gate.generate(again("s", n=2))) == {0: answers["s-0"], 1: answers["s-1"]}
        assert used(gate) == (1, tokens, 0, 0)
        assert gate.queue.admission.counts.tenants["a"].output_tokens == counted
        core.assert_idle()
