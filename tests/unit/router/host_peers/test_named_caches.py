"""Named caches of router processes on one host: created in one; found, extended and deleted in any."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from router.api.request.named_caches import NamedCache, NamedCaches
from router.api.request.shared_named_caches import NamedCacheUpdate, SharedNamedCaches
from router.host_peers.named_caches import NamedCacheExchange, _decoded, _encoded
from router.text.conversation import Message
from router.text.tools import AssistantToolCall
from router.types.worker_view import WorkerKey
from router.workers.prefix_pins import PinRecord, PinRegistry, PinSite
from tandem.errors import CacheNotFound
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult

WORKER = WorkerKey(WorkerId("p0"), Incarnation(7))
WAIT_S = 20.0


class Process:
    """One router process; its worker records the orders of each router."""

    def __init__(self, clock: list[float]) -> None:
        self.orders: list[PinOrder] = []
        self.ended: list[PinKey] = []
        self.pins = PinRegistry(find=lambda _: self._site(), clock=lambda: clock[0])
        self.caches = NamedCaches(clock=lambda: 1e9 + clock[0], most=99, max_ttl_s=7200.0)
        self.names = SharedNamedCaches(self.caches, self.pins, clock=lambda: clock[0])

    def _site(self) -> PinSite:
        return PinSite(port=self, block_size=16, is_leaving=False)  # type: ignore[arg-type]

    def pin(self, order: PinOrder) -> None:
        self.orders.append(order)

    def unpin(self, key: PinKey) -> None:
        self.ended.append(key)

    def make(self, name: str, tenant: str = "t", ttl_s: float = 100.0) -> NamedCache:
        now_s = self.caches.clock()
        call = AssistantToolCall(id="c", name="f", arguments="{}")
        cache = NamedCache(
            name=name,
            messages=(
                Message(role="user", content="föx 😀"),
                Message(role="assistant", content="", tool_calls=(call,)),
            ),
            token_ids=tuple(range(33)),
            created_s=now_s,
            updated_s=now_s,
            expires_s=now_s + ttl_s,
        )
        self.caches.add(tenant, cache)
        return cache


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def processes(clock: list[float]) -> list[Process]:
    return [Process(clock) for _ in range(3)]


def apply_to(update: NamedCacheUpdate, *receivers: Process) -> None:
    for receiver in receivers:
        receiver.names.apply(_decoded(_encoded(update)))


def test_named_cache_update_carries_pin_location(processes: list[Process], clock: list[float]) -> None:
    one, other, _ = processes
    cache = one.make("a")
    adopted = one.pins.adopt(PinKey("t", "a"), _record(ends_s=100.0))
    assert adopted
    apply_to(one.names.update_for("t", "a"), other)
    assert other.caches.get("t", "a") == cache
    record = other.pins.find("t", "a")
    assert record is not None
    assert (record.worker, record.num_tokens, record.outcome, record.ends_s) == (WORKER, 32, PinOutcome.HELD, 100.0)
    assert not other.orders, "the worker has heard of it from the first"
    other.pins.on_outcome(WORKER, PinResult(key=PinKey("t", "a"), outcome=PinOutcome.GAVE_WAY))
    assert other.pins.find("t", "a").outcome is PinOutcome.GAVE_WAY  # type: ignore[union-attr]

    clock[0] = 50.0
    other.caches.prolong("t", "a", 1e9 + 200.0)
    apply_to(other.names.update_for("t", "a"), one)
    assert one.caches.get("t", "a").expires_s == 1e9 + 200.0
    assert one.pins.find("t", "a").ends_s == 200.0  # type: ignore[union-attr]
    other.caches.remove("t", "a")
    apply_to(other.names.update_for("t", "a"), one)
    assert one.ended == [PinKey("t", "a")]
    with pytest.raises(CacheNotFound):
        one.caches.get("t", "a")


def _record(ends_s: float) -> PinRecord:
    return PinRecord(worker=WORKER, ends_s=ends_s, num_tokens=32, last_block=BlockHash(b"x" * 16))


def test_named_cache_updates_in_any_order_agree(clock: list[float]) -> None:
    for seed in range(200):
        rng, processes = Random(seed), [Process(clock) for _ in range(3)]
        update: list[NamedCacheUpdate] = []
        for name in "abc":
            processes[0].make(name)
            update.append(processes[0].names.update_for("t", name))
            apply_to(update[-1], *processes[1:])
            for _ in range(rng.randrange(4)):
                writer = rng.choice(processes)
                if writer.caches.find("t", name) is not None:
                    writer.caches.prolong("t", name, 1e9 + rng.randrange(1, 99))
                    update.append(writer.names.update_for("t", name))
            if rng.random() < 0.4:
                writer = rng.choice(processes)
                writer.caches.remove("t", name)
                update.append(writer.names.update_for("t", name))
        for receiver in processes:
            for one in rng.sample(update, len(update)) + rng.choices(update, k=3):
                apply_to(one, receiver)
        shown = [{cache.name: cache.expires_s for cache in one.caches.all("t")} for one in processes]
        assert shown[0] == shown[1] == shown[2]
        assert set(shown[0]) == set("abc") - {one.name for one in update if one.cache is None}


def test_named_cache_removal_is_eventually_forgotten(processes: list[Process], clock: list[float]) -> None:
    one = processes[0]
    one.make("a")
    one.caches.remove("t", "a")
    assert one.caches.all_entries() == [("t", "a", None)]
    clock[0] = 61.0
    one.make("b")
    one.caches.remove("t", "b")
    assert one.caches.all_entries() == [("t", "b", None)]


async def test_named_cache_change_reaches_all_before_answer(processes: list[Process], tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        async def begin(index: int) -> NamedCacheExchange:
            return await stack.enter_async_context(
                NamedCacheExchange(tmp_path, index=index, names=processes[index].names)
            )

        first, _ = await begin(0), await begin(1)
        processes[0].make("a")
        processes[0].make("gone")
        processes[0].caches.remove("t", "gone")
        await first.publish("t", "a")
        assert processes[1].caches.find("t", "a") is not None
        # A process that starts later gets what was sent before, and receives what is sent from then on.
        third = await begin(2)
        assert processes[2].caches.all_entries() == [("t", "a", processes[0].caches.get("t", "a")), ("t", "gone", None)]
        processes[2].caches.remove("t", "a")
        await third.publish("t", "a")
        assert not any(process.caches.all("t") for process in processes)
        # A late word of what was removed brings nothing back.
        processes[1].names.apply(NamedCacheUpdate(tenant="t", name="a", cache=Process([0.0]).make("a")))
        assert processes[1].caches.find("t", "a") is None


async def test_named_cache_update_to_hanging_process_is_resent(
    processes: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.host_peers.named_caches.ANSWER_S", 0.05)
    monkeypatch.setattr("router.host_peers.named_caches._AGAIN_S", 0.01)
    goes_on, hanging = asyncio.Event(), NamedCacheExchange(tmp_path, index=1, names=processes[1].names)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await goes_on.wait()
        await hanging._answer(reader, writer)

    async with NamedCacheExchange(tmp_path, index=0, names=processes[0].names) as first:
        server = await asyncio.start_unix_server(answer, tmp_path / "named-1.sock")
        processes[0].make("a")
        await first.publish("t", "a")
        assert first._unsent
        processes[0].caches.remove("t", "a")
        processes[0].make("b")
        await first.publish("t", "b")
        goes_on.set()
        async with asyncio.timeout(WAIT_S):
            while first._unsent:  # noqa: ASYNC110 - no event says when it is taken
                await asyncio.sleep(0.01)
        assert [cache.name for cache in processes[1].caches.all("t")] == ["b"]
        assert ("t", "a", None) in processes[1].caches.all_entries()
        server.close()
        (tmp_path / "named-1.sock").unlink()
        await first.publish("t", "b")
        assert not first._unsent, "nobody is there any more"


async def test_named_cache_malformed_update_changes_nothing(processes: list[Process], tmp_path: Path) -> None:
    async with NamedCacheExchange(tmp_path, index=0, names=processes[0].names):
        for frame in (b"{}", b"[", b'{"tenant": "t", "name": "a", "cache": {}, "pin": null}'):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "named-0.sock")
            writer.write(len(frame).to_bytes(4, "little") + frame + bytes(4))
            assert await reader.read() == b""
            writer.close()
    assert not processes[0].caches.all_entries()
