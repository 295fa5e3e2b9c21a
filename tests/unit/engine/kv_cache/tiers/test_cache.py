"""Cached blocks move to lower tiers and back in a real engine, with unchanged output, also over a restart."""

import asyncio
import logging
import queue
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.assembly import EngineParts, assemble
from engine.engine import Engine
from engine.kv_cache.tiers.costs import MAX_WAIT_S, MIN_WAIT_S, MeasuredRates, TierCosts
from engine.kv_storage.block_file import SUFFIX
from engine.spec import EngineSpec
from engine.tier_assembly import keep_cached
from engine.types.request import Request
from engine.types.step_output import StepOutput
from engine.types.tier_counts import TierCounts
from tandem.errors import ConfigError
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.unit.engine.test_assembly import SPEC
from worker.engine_host import EngineHost

WAIT_S = 60.0
BLOCK = 16
ROOT = root_hash(secret=SPEC.secret, model_fingerprint="tiers")
CHEAP_COPY = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e12, load_bytes_per_s=1e12)
DEAR_COPY = MeasuredRates(prefill_tokens_per_s=1e12, offload_bytes_per_s=1.0, load_bytes_per_s=1.0)


def test_tier_costs_choose_store_load_and_fetch():
    costs = TierCosts(block_bytes=100, block_tokens=16)
    assert not costs.prefers_load()  # what copying takes is not known
    costs.set_copy_rates(MeasuredRates(offload_bytes_per_s=1000.0, load_bytes_per_s=500.0))
    assert costs.prefers_store()
    assert costs.prefers_load()
    assert costs.patience_s(1) == MAX_WAIT_S
    costs.set_prefill_rate(60.0)  # a block in 0.267 s
    assert not costs.prefers_store()  # 0.3 s
    assert costs.prefers_load()  # 0.2 s
    assert costs.prefers_fetch()  # nobody has read yet
    assert costs.patience_s(2) == pytest.approx(32 / 60)
    costs.record_read(100, 0.05)
    assert costs.read_bytes_per_s == pytest.approx(2000.0)
    assert costs.prefers_fetch()
    for _ in range(50):
        costs.record_read(100, 1.0)
    tries = [costs.prefers_fetch() for _ in range(200)]
    assert 0 < sum(tries) < 5  # now and then, to see whether it is still so slow
    costs.set_prefill_rate(1e9)
    assert costs.patience_s(2) == MIN_WAIT_S


class Given(TierCosts):
    """Rates that no step corrects."""

    def set_prefill_rate(self, prefill_tokens_per_s: float) -> None:
        pass


class Serving:
    """An engine on its thread, a request at a time."""

    def __init__(self, spec: EngineSpec, *, pipelined: bool = False) -> None:
        self.parts: EngineParts = assemble(spec)
        if self.parts.scheduler.tiers is not None:
            self.parts.scheduler.tiers.costs = Given(block_bytes=1, block_tokens=BLOCK)
            self.parts.scheduler.tiers.costs.rates = CHEAP_COPY
        self._ended: queue.Queue[str] = queue.Queue()
        self.engine = Engine(
            scheduler=self.parts.scheduler,
            runner=self.parts.runner,
            on_step=self._on_step,
            on_fatal=lambda error: self._ended.put(repr(error)),
            pipelined=pipelined,
        )
        if self.parts.disk is not None:
            self.parts.disk.listen(self.engine.wake)
        self.engine.start()
        self._serial = 0

    def _on_step(self, output: StepOutput) -> None:
        for event in output.events:
            if event.finish_reason is not None:
                self._ended.put(event.request_id)

    def request(self, prompt: list[int], num_tokens: int = 6) -> Request:
        self._serial += 1
        return Request(
            request_id=RequestId(f"{self._serial}"),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            hash_root=ROOT,
        )

    def run(self, request: Request) -> list[int]:
        """The whole answer."""
        self.engine.call(lambda scheduler: scheduler.add(request)).result(WAIT_S)
        assert self._ended.get(timeout=WAIT_S) == request.request_id
        return list(request.token_ids[request.num_prompt_tokens :])

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The answer and the cached tokens."""
        request = self.request(prompt)
        return self.run(request), request.num_cached_tokens

    def counts(self) -> dict[str, TierCounts]:
        load = self.engine.call(lambda scheduler: (scheduler.check_invariants(), scheduler.load())[1]).result(WAIT_S)
        return {counts.tier: counts for counts in load.tiers}

    def settle(self) -> None:
        """Wait until the disk is idle."""
        if self.parts.disk is not None:
            self.engine.call(lambda scheduler: scheduler.tiers.collect()).result(WAIT_S)
            self.parts.disk._writer.submit(bool).result(WAIT_S)
            self.engine.call(lambda scheduler: scheduler.tiers.collect()).result(WAIT_S)

    def close(self) -> None:
        assert self.engine.stop(WAIT_S)
        if self.parts.disk is not None:
            keep_cached(self.parts.scheduler.tiers, self.parts.disk, timeout_s=WAIT_S)
            self.parts.disk.close()


@contextmanager
def serving(spec: EngineSpec, *, pipelined: bool = False) -> Iterator[Serving]:
    made = Serving(spec, pipelined=pipelined)
    try:
        yield made
    finally:
        made.close()


def prompt(k: int, length: int = 100) -> list[int]:
    return [(31 * k + 7 * i + k * k * i) % 500 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def sizes() -> tuple[int, int]:
    """Bytes of a block, and of one on disk."""
    block_bytes = assemble(SPEC).layout.block_bytes
    return block_bytes, -(-(block_bytes + 64) // 4096) * 4096


def tiny(
    sizes: tuple[int, int], *, host: int, disk: int = 0, path: Path | None = None, num_blocks: int = 9
) -> EngineSpec:
    """Tier sizes: blocks in the pool, in host memory, on disk."""
    return replace(
        SPEC,
        num_blocks=num_blocks,
        max_model_len=128,
        host_cache_bytes=host * sizes[0],
        disk_cache_bytes=disk * sizes[1],
        disk_cache_path=path,
    )


def answers(served: Serving, rounds: int = 3) -> list[list[int]]:
    """Some prompts are repeated soon, others late."""
    collected = []
    for k in rounds * [0, 1, 0, 2, 1, 3, 2, 4, 3, 5, 4]:
        collected.append(served.ask(prompt(k, 70 + 7 * k))[0])
        served.settle()
    return collected


@pytest.mark.parametrize("pipelined", [False, True])
def test_tier_cache_outputs_are_unchanged_by_tiers(sizes, tmp_path, pipelined):
    with serving(replace(SPEC, num_blocks=9, max_model_len=128)) as bare:
        expected = answers(bare)
        assert bare.counts() == {}
    with serving(tiny(sizes, host=12, disk=40, path=tmp_path), pipelined=pipelined) as served:
        assert answers(served) == expected
        counts = served.counts()
        assert counts["host"].hits > 0
        assert counts["host"].evictions > 0
        assert counts["disk"].hits > 0
        assert counts["disk"].stores == len(list(tmp_path.rglob(f"*{SUFFIX}"))) <= 40
        assert counts["disk"].damaged == 0
        assert counts["host"].loaded_bytes >= counts["disk"].loaded_bytes == sizes[0] * counts["disk"].hits > 0
        assert min(counts["host"].store_s, counts["host"].load_s, counts["disk"].store_s, counts["disk"].load_s) > 0.0
        assert counts["host"].capacity_blocks == 12


def test_tier_cache_loaded_blocks_count_as_cached(sizes):
    with serving(tiny(sizes, host=12)) as served:
        first, cached = served.ask(prompt(1))
        assert cached == 0
        served.ask(prompt(2))
        again, cached = served.ask(prompt(1))
        assert (again, cached) == (first, 96)
        counts = served.counts()["host"]
        assert 0 < counts.hits <= 6
        assert counts.misses == 12, "two prompts of six blocks, found nowhere"


def test_tier_cache_cheaper_to_compute_keeps_and_loads_nothing(sizes):
    with serving(tiny(sizes, host=12)) as served:
        served.parts.scheduler.tiers.costs.rates = DEAR_COPY
        answers(served, rounds=1)
        counts = served.counts()["host"]
        assert counts.stores == counts.hits == counts.num_blocks == 0


def test_tier_cache_disk_blocks_survive_restart(sizes, tmp_path):
    spec = tiny(sizes, host=12, disk=40, path=tmp_path)
    with serving(spec) as served:
        expected = answers(served, rounds=1)
        here = len(served.parts.scheduler.blocks.snapshot()[1])
    kept = len(list(tmp_path.rglob(f"*{SUFFIX}")))
    assert kept == here, "what was in the pool or in host memory alone is kept at the end"
    with serving(spec) as again:
        found = again.counts()["disk"]
        assert (found.num_blocks, found.damaged) == (kept, 0)
        names = {event.name for event in again.parts.scheduler.blocks.snapshot()[1]}
        assert len(names) == kept, "the cluster hears of them"
        assert again.ask(prompt(4, 98)) == (expected[-1], 96)
        assert again.counts()["disk"].hits == 6
        assert answers(again, rounds=1) == expected
    with serving(replace(spec, secret=b"another secret")) as other:
        assert other.counts()["disk"].num_blocks == 0
        assert other.counts()["disk"].damaged >= kept, "files of another secret are removed"
        assert not list(tmp_path.rglob(f"*{SUFFIX}"))


def test_tier_cache_damaged_files_are_counted_and_recomputed(sizes, tmp_path, caplog):
    spec = tiny(sizes, host=12, disk=40, path=tmp_path)
    with serving(spec) as served:
        expected = answers(served, rounds=1)
        for path in tmp_path.rglob(f"*{SUFFIX}"):
            data = bytearray(path.read_bytes())
            data[-5] ^= 4
            path.write_bytes(data)
        with caplog.at_level(logging.ERROR):
            assert answers(served) == expected * 3
        assert served.counts()["disk"].damaged > 0


def test_tier_cache_unresponsive_disk_delays_only_for_patience(sizes, tmp_path):
    spec = tiny(sizes, host=12, disk=40, path=tmp_path)
    with serving(spec) as served:
        expected = answers(served, rounds=1)
    with serving(spec) as again:
        free = threading.Event()
        for _ in range(2):
            again.parts.disk._readers.submit(free.wait, WAIT_S)
        try:
            waiting = again.request(prompt(0, 70))
            again.engine.call(lambda scheduler: scheduler.add(waiting)).result(WAIT_S)
            assert again.ask([5, 6, 7])[1] == 0, "others go first meanwhile"
            assert again._ended.get(timeout=WAIT_S) == waiting.request_id
        finally:
            free.set()
            again.parts.disk.listen(bool)
        assert list(waiting.token_ids[70:]) == expected[0]
        assert waiting.num_cached_tokens == 0
        assert again.counts()["disk"].late == 1


def test_tier_cache_reservation_holds_blocks_in_host_memory(sizes):
    with serving(tiny(sizes, host=12, num_blocks=16)) as served:
        expected = served.ask(prompt(1))[0]
        for k in range(2, 5):
            served.ask(prompt(k))
        request, transfer = served.request(prompt(1)), TransferId("t")

        def reserve(scheduler):
            before = scheduler.match_prefix(request)
            return before, scheduler.reservations.reserve(transfer, request)

        before, grant = served.engine.call(reserve).result(WAIT_S)
        assert before == 0
        assert grant.num_held_tokens == request.num_cached_tokens == 96
        assert served.counts()["host"].hits == 6
        served.engine.call(
            lambda s: s.reservations.commit_partial(transfer, 96, first_token=None, writer_is_quiet=True)
        ).result(WAIT_S)
        assert served._ended.get(timeout=WAIT_S) == request.request_id
        assert list(request.token_ids[100:]) == expected


def test_tier_cache_saves_blocks_before_handoff_overwrites_them(sizes):
    with serving(tiny(sizes, host=12)) as served:
        expected = served.ask(prompt(1))[0]
        stranger = served.request(prompt(9, 120))
        transfer = TransferId("t")

        def take(scheduler):
            scheduler.reservations.reserve(transfer, stranger)
            blocks = scheduler.reservations.bind(transfer)
            served.parts.runner.kv_cache.blocks[:, list(blocks)] = 77  # what a transport may do from now on
            scheduler.reservations.cancel(transfer)

        served.engine.call(take).result(WAIT_S)
        assert served.counts()["host"].stores > 0
        assert served.ask(prompt(1)) == (expected, 96)
        assert served.counts()["host"].hits > 0


def test_tier_cache_impossible_sizes_are_refused(sizes, tmp_path):
    spec = tiny(sizes, host=4, disk=4, path=tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.host_cache_bytes is 5; one KV block takes"):
        assemble(replace(spec, host_cache_bytes=5))
    with pytest.raises(ConfigError, match=r"engine\.disk_cache_bytes is 5; one KV block takes"):
        assemble(replace(spec, disk_cache_bytes=5))
    with pytest.raises(ConfigError, match="set together"):
        assemble(replace(spec, disk_cache_path=None))
    with pytest.raises(ConfigError, match=r"needs engine\.host_cache_bytes"):
        assemble(replace(spec, host_cache_bytes=0))


async def test_tier_cache_stopped_worker_leaves_cache_to_next(sizes, tmp_path):
    spec = tiny(sizes, host=12, disk=40, path=tmp_path)
    cached_counts: list[int] = []
    for expected_hits in (0, 6):
        parts = assemble(spec)
        failed: list[BaseException] = []
        host = EngineHost(parts, on_fatal=failed.append)
        over = asyncio.Event()

        def on_output(output: StepOutput, over: asyncio.Event = over) -> None:
            cached_counts.extend(event.num_cached_tokens for event in output.events if event.finish_reason is not None)
            if any(event.finish_reason is not None for event in output.events):
                over.set()

        host.start(on_output=on_output, ports=tuple)
        request = Request(
            request_id=RequestId("r"),
            token_ids=array("i", prompt(1)),
            num_prompt_tokens=100,
            params=SamplingParams(max_tokens=2, ignore_eos=True),
            hash_root=ROOT,
        )
        await host.call(lambda scheduler, request=request: scheduler.add(request))
        async with asyncio.timeout(WAIT_S):
            await over.wait()
        await host.stop()
        assert not failed
        assert parts.scheduler.load().tiers[1].hits == expected_hits
    assert cached_counts == [0, 96]


def test_tier_cache_blocks_beyond_time_limit_are_not_written(sizes, tmp_path):
    with serving(tiny(sizes, host=12, disk=40, path=tmp_path)) as served:
        served.ask(prompt(1))
        served.engine.stop(WAIT_S)
        keep_cached(served.parts.scheduler.tiers, served.parts.disk, timeout_s=0.0)
        served.parts.disk._writer.submit(bool).result(WAIT_S)
        assert 0 < len(list(tmp_path.rglob(f"*{SUFFIX}"))) <= 3, "a quarter of the places"
