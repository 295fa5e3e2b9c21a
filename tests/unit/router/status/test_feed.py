"""A whole router's status: its content, access and transport."""

import asyncio
from contextlib import ExitStack
from random import Random

import orjson
import pytest

from router.status import feed as feed_module
from router.status.feed import StatusFeed
from router.types.worker_view import TransferEnds, TransferReport, TransferSide, WorkerLoad
from tandem.errors import Overloaded, Unavailable
from tests.support.router.whole_router import NUM_BLOCKS, TENANTS, Fate, Listener, WholeRouter
from tests.support.router.whole_status import answer, feed_of, sources_of, status_of


def moved(num_bytes: int) -> TransferReport:
    ends = TransferEnds(
        kind="handoff",
        transport="shm",
        outcome="completed",
        count=3,
        num_bytes=num_bytes,
        seconds=1.0,
        chunks=4,
        damaged_chunks=0,
    )
    side = TransferSide(direction="received", started=5, ended=(ends,), bad_messages=0, live=2, bytes_per_s=9.0)
    counts = dict.fromkeys(
        ("fetches_started", "fetches_completed", "fetches_failed", "fetches_declined", "fetched_tokens"), 0
    )
    held = dict.fromkeys(("lent_tokens", "pinned_blocks", "leased_blocks", "quarantined_blocks", "loans"), 0)
    return TransferReport(sides=(side,), **counts, **held)


async def test_status_shows_reported_pools_and_workers() -> None:
    whole = WholeRouter(1, num_decode=11)
    feed = feed_of(whole)
    worker = whole.workers[0]
    load = WorkerLoad(
        num_running=3, num_waiting=2, num_free_blocks=NUM_BLOCKS - 24, decode_step_s=0.02, transfers=moved(10)
    )
    whole.registry.load_changed(worker.info.key, load)
    whole.registry.load_changed(whole.workers[1].info.key, WorkerLoad(step_age_s=3.0))
    whole.registry.draining(whole.workers[2].info.key, "told to")
    status = await status_of(feed)
    assert status["at_ms"] == 1_000_500
    assert status["model"] == {"name": "toy", "max_model_len": 512, "has_chat_template": True}
    assert (status["processes"], status["not_ready"]) == (1, None)
    prefill, decode = status["pools"]
    assert [one["id"] for one in prefill["workers"]] == ["p0", "p1"]
    assert len(decode["workers"]) == 11
    first = next(one for one in decode["workers"] if one["id"] == "d0")
    assert (first["running"], first["waiting"], first["used_blocks"], first["blocks"]) == (3, 2, 24, NUM_BLOCKS)
    assert (first["receiving"], first["sending"], first["decode_step_s"]) == (2, 0, 0.02)
    states = {one["id"]: one["state"] for one in decode["workers"]}
    assert {states["d0"], states["d1"], states["d2"]} == {"live", "stuck", "draining"}
    assert (decode["running"], decode["waiting"], decode["used_blocks"]) == (3, 2, 24 + NUM_BLOCKS)


async def test_status_handoff_is_in_flight_until_first_token() -> None:
    whole = WholeRouter(2)
    whole.draw = lambda: Fate.HANG
    feed, prompt = feed_of(whole), range(300)
    request = asyncio.ensure_future(whole.dispatcher.run(whole.request(prompt), Listener()))
    while not len(whole.dispatcher.placer.handoffs):  # noqa: ASYNC110 - dispatch has no event for it
        await asyncio.sleep(0)
    whole.now_s += 2.0
    status = await status_of(feed)
    assert status["handoffs"]["in_flight"] == len(status["handoffs"]["shown"]) >= 1
    shown = status["handoffs"]["shown"][0]
    assert (shown["source"][0], shown["target"][0], shown["tokens"]) == ("p", "d", 300)
    assert shown["age_s"] == 2.0
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    whole.now_s += 1.0
    assert (await status_of(feed))["handoffs"] == {"in_flight": 0, "shown": []}


async def test_status_handoffs_end_with_their_requests() -> None:
    whole = WholeRouter(3)
    rng = Random(3)
    whole.draw = lambda: rng.choice(list(Fate))
    assert await whole.crowd(200, lambda: rng.randrange(1, 60)) >= 0
    assert len(whole.dispatcher.placer.handoffs) == 0


async def test_status_recent_latencies_and_rates_cover_last_minutes() -> None:
    whole = WholeRouter(4)
    feed = feed_of(whole)
    for _ in range(4):
        answer(whole, ttft_s=0.2, itl_s=0.01, tokens=51)
    recent = (await status_of(feed))["recent"]
    assert recent["ttft_p50_ms"] == pytest.approx(200.0, rel=0.1)
    assert recent["itl_p95_ms"] == pytest.approx(10.0, rel=0.1)
    assert recent["cached_share"] == 0.75
    assert 204 / 15 <= recent["generation_tokens_per_s"] <= 204 / 10
    whole.now_s += 10.0
    curves = (await status_of(feed))["curves"]
    assert len(curves["ttft_p50_ms"]) == len(curves["generation_tokens_per_s"]) == 60
    assert sum(curves["generation_tokens_per_s"]) * curves["step_s"] == pytest.approx(204)
    assert [value for value in curves["itl_p50_ms"] if value] == pytest.approx([10.0], rel=0.1)
    whole.now_s += 300.0
    assert not any((await status_of(feed))["curves"]["generation_tokens_per_s"])


async def test_status_transfer_rate_is_counted_once_over_routers() -> None:
    whole = WholeRouter(5)
    other = StatusFeed(sources_of(whole))

    async def others() -> list[bytes]:
        return [other.part()]

    feed, key = feed_of(whole, others=others), whole.workers[0].info.key
    whole.registry.load_changed(key, WorkerLoad(transfers=moved(1500)))
    status = await status_of(feed)
    assert 1500 / 15 <= status["recent"]["moved_bytes_per_s"] <= 1500 / 10
    assert status["processes"] == 2
    assert sum(len(pool["workers"]) for pool in status["pools"]) == 5


async def test_status_hot_prefixes_show_names_and_counts() -> None:
    whole = WholeRouter(6)
    feed, prompt = feed_of(whole), range(300)
    for _ in range(3):
        await whole.dispatcher.run(whole.request(prompt), Listener())
    (prefix,) = (await status_of(feed))["prefixes"]
    assert (prefix["tokens"], prefix["asked"]) == (256, 3) or prefix["asked"] > 3
    assert len(prefix["name"]) == 16
    assert prefix["holders"]


async def test_status_shows_own_tenants_decisions_only() -> None:
    whole = WholeRouter(7)
    feed = feed_of(whole)
    await whole.crowd(30, lambda: 10_000)
    seen = {tenant: (await status_of(feed, tenant))["decisions"] for tenant in TENANTS}
    everybodys = {decision["request_id"] for decisions in seen.values() for decision in decisions}
    assert len(everybodys) == sum(map(len, seen.values())) == len(list(whole.decisions.newest(99)))
    for tenant, decisions in seen.items():
        own = {one.request_id for one in whole.decisions.latest(tenant, limit=99)}
        assert {decision["request_id"] for decision in decisions} <= own
        assert [one["age_s"] for one in decisions] == sorted(one["age_s"] for one in decisions)
        assert not any("tenant" in decision for decision in decisions)
    assert (await status_of(feed, "nobody"))["decisions"] == []


async def test_status_is_built_once_for_all_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.status.feed.TURN_S", 0.001)
    whole, made = WholeRouter(8), 0

    async def others() -> list[bytes]:
        nonlocal made
        made += 1
        return []

    async with feed_of(whole, others=others) as feed:
        with feed.listening("a") as first, feed.listening("a") as second, feed.listening("b") as third:
            one, two, _ = await asyncio.gather(first.next(), second.next(), third.next())
            assert one is two
            await asyncio.gather(*(feed.snapshot("a") for _ in range(20)))
            assert made == 1
            whole.now_s += 1.0
            await asyncio.gather(*(feed.snapshot("a") for _ in range(20)))
            assert made == 2


@pytest.mark.parametrize("broken", ["totals", "part_of"])
async def test_status_failing_once_keeps_feed_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setattr(feed_module, "TURN_S", 0.01)
    working, num_calls = getattr(feed_module, broken), 0
    async with StatusFeed(sources_of(WholeRouter(9))) as feed:

        def breaks(*args: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls <= 3:
                raise ValueError
            return working(*args)

        monkeypatch.setattr(feed_module, broken, breaks)
        with feed.listening("") as listener:
            async with asyncio.timeout(30.0):
                assert await listener.next()
    assert len([record for record in caplog.records if "cannot build the status" in record.message]) == 1


async def test_status_slow_listener_gets_newest() -> None:
    whole = WholeRouter(9)
    feed = feed_of(whole)
    with feed.listening("a") as listener:
        for text in (b"1", b"2", b"3"):
            listener.publish(text)
        assert await listener.next() == b"3"


async def test_status_listeners_are_bounded_and_closed_at_end() -> None:
    whole = WholeRouter(10)
    feed = StatusFeed(sources_of(whole), most_listeners=2)
    with feed.listening("a") as first, feed.listening("b"):
        with pytest.raises(Overloaded, match="at most 2"), feed.listening("a"):
            raise AssertionError("a third one")
        waiting = asyncio.ensure_future(first.next())
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None
    assert feed.num_listeners == 0
    with pytest.raises(Unavailable):
        await feed.snapshot("a")
    with pytest.raises(Unavailable), feed.listening("a"):
        raise AssertionError("one more")


async def test_status_listeners_of_one_tenant_make_way() -> None:
    feed = StatusFeed(sources_of(WholeRouter(8)), most_listeners=3)
    with ExitStack() as stack:
        greedy = [stack.enter_context(feed.listening(TENANTS[0])) for _ in range(3)]
        with pytest.raises(Overloaded):
            stack.enter_context(feed.listening(TENANTS[0]))
        other = stack.enter_context(feed.listening(TENANTS[1]))
        assert await greedy[-1].next() is None
        assert feed.num_listeners == 3
        # Two and one: nobody is displaced for a second place, or the two would take it from each other for ever.
        with pytest.raises(Overloaded):
            stack.enter_context(feed.listening(TENANTS[1]))
        for listener in (*greedy[:2], other):
            listener.publish(b"status")
            assert await listener.next() == b"status"
    assert feed.num_listeners == 0


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b'{"format": 99}', b'{"format": 1}', b"not json", b'{"format": 1, "a":']
)
async def test_status_malformed_part_is_left_out(content: bytes) -> None:
    async def others() -> list[bytes]:
        return [content]

    status = await status_of(feed_of(WholeRouter(11), others=others))
    assert status["processes"] == 1
    assert len(status["pools"][1]["workers"]) == 3


async def test_status_contains_no_prompts_or_tokens() -> None:
    whole = WholeRouter(12)
    feed = feed_of(whole)
    marks = [770_001 + i for i in range(300)]
    for _ in range(2):
        await whole.dispatcher.run(whole.request(marks), Listener())
    text = feed.part() + await feed.snapshot("a")
    assert b"d0" in text
    assert not any(str(mark).encode() in text for mark in marks)
    assert len(text) < 64_000
    assert orjson.loads(feed.part())["format"] == 1
