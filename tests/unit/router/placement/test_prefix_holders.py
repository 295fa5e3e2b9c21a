"""Which worker is named as holder of a prompt's prefix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.placement.prefix_holders import MIN_GAIN_TOKENS, best_holder
from router.types.worker_view import PrefixChange, WorkerSnapshot
from router.workers.prefix_map import PrefixMap
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, WorkerId
from tests.support.router.worker_views import LAYOUT, demand, view_of, worker


def lending(name: str, **more: Any) -> WorkerSnapshot:
    one = worker(name, **more)
    return replace(one, info=replace(one.info, handoff_address=f"{name}:1"))


def named(*workers: WorkerSnapshot, confirmed: dict[str, int] | None = None, **matched: int) -> tuple[str, int] | None:
    def known(worker_id: WorkerId, num_tokens: int) -> int:
        return min(num_tokens, (confirmed or {}).get(worker_id, num_tokens))

    view = view_of(workers)
    holder = best_holder(demand(500, **matched)(view), workers[0].info, view, known)
    return None if holder is None else (holder.worker_id, holder.num_tokens)


def test_prefix_holder_is_longest_worthwhile_prefix() -> None:
    workers = [lending("p0"), lending("d0"), lending("d1", active=1)]
    assert named(*workers, d0=128, d1=256) == ("d1", 256)
    assert named(*workers, d0=256, d1=256) == ("d0", 256)
    assert named(*workers, p0=256 - MIN_GAIN_TOKENS, d0=256) == ("d0", 256)
    assert named(*workers, p0=256 - MIN_GAIN_TOKENS + 1, d0=256) is None


def test_prefix_holder_ignores_expected_blocks() -> None:
    workers = [lending("p0"), lending("d0"), lending("d1")]
    assert named(*workers, d0=256, d1=128, confirmed={"d0": 0}) == ("d1", 128)
    assert named(*workers, d0=256, d1=128, confirmed={"d0": 64, "d1": 0}) == ("d0", 64)
    assert named(*workers, d0=256, confirmed={"d0": MIN_GAIN_TOKENS - 1}) is None


def test_prefix_holder_checks_few_workers() -> None:
    checked: list[str] = []

    def known(worker_id: WorkerId, num_tokens: int) -> int:
        checked.append(worker_id)
        return num_tokens - 64 if worker_id == "d2" else num_tokens

    workers = [lending("p0"), *(lending(f"d{i}") for i in range(8))]
    matched = {"d0": 128, "d1": 256, "d2": 320, "d3": 256, **{f"d{i}": 192 for i in range(4, 8)}}
    view = view_of(workers)
    holder = best_holder(demand(500, **matched)(view), workers[0].info, view, known)
    assert holder is not None
    assert (holder.worker_id, holder.num_tokens) == ("d1", 256)
    assert checked == ["d2", "d1"]


def test_prefix_holder_draining_worker_is_last_choice() -> None:
    leaving, staying = replace(lending("d0"), draining=True), lending("d1", active=5)
    assert named(lending("p0"), leaving, staying, d0=256, d1=256) == ("d1", 256)
    assert named(lending("p0"), leaving, staying, d0=256, d1=128) == ("d0", 256)


def test_prefix_holder_with_windowed_layers_apart_is_none() -> None:
    apart = dataclasses.replace(LAYOUT, windowed_layers=(1,), window=32)
    workers = [lending("p0", layout=apart), lending("d0", layout=apart)]
    assert named(*workers, d0=256) is None


def test_prefix_map_counts_confirmed_blocks() -> None:
    names = [BlockHash(i.to_bytes(16, "big")) for i in range(8)]
    prefix_map, one, two = PrefixMap(), WorkerId("d0"), WorkerId("d1")
    prefix_map.add_worker(one, capacity=100)
    prefix_map.add_worker(two, capacity=100, names_per_block=2)
    for worker_id, step in ((one, 1), (two, 2)):
        stored = tuple((name, True) for name in names[step - 1 : 4 : step])
        prefix_map.apply(worker_id, PrefixChange(first_sequence=0, snapshot=True, changes=stored))
        assert prefix_map.num_confirmed(worker_id, names[:4]) == 4
        prefix_map.expect(worker_id, names, now_s=0.0)
        assert prefix_map.longest_prefix(names)[worker_id] == 8
        assert prefix_map.num_confirmed(worker_id, names) == 4
    prefix_map.expire(1e9)
    assert prefix_map.num_confirmed(one, names[:4]) * HASH_BLOCK_TOKENS == 64


class Counted(Sequence[BlockHash]):
    """Names, with a count of those looked at."""

    def __init__(self, names: list[BlockHash]) -> None:
        self.names = names
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        found = self.names[index]
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("per_block", [1, 4])
def test_prefix_map_confirmed_count_is_fast_for_long_prompts(per_block: int) -> None:
    names = [BlockHash(i.to_bytes(16, "big")) for i in range(8000)]
    prefix_map, worker_id = PrefixMap(), WorkerId("d0")
    prefix_map.add_worker(worker_id, capacity=10_000, names_per_block=per_block)
    stored = tuple((name, True) for name in names[per_block - 1 : 7960 : per_block])
    prefix_map.apply(worker_id, PrefixChange(first_sequence=0, snapshot=True, changes=stored))
    prefix_map.expect(worker_id, names, now_s=0.0)
    for length, confirmed in ((8000, 7960), (7980, 7960), (7960, 7960), (4000, 4000)):
        counted = Counted(names[:length])
        assert prefix_map.num_confirmed(worker_id, counted) == confirmed
        assert counted.num_read <= 40


@given(st.data())
def test_prefix_map_confirmed_count_ends_at_first_expected(data: st.DataObject) -> None:
    """Whatever was evicted in between, and whatever is expected for other prompts."""
    per_block = data.draw(st.sampled_from([1, 2]))
    names = [BlockHash(i.to_bytes(16, "big")) for i in range(16)]
    others = [*names[:4], *(BlockHash(i.to_bytes(16, "little")) for i in range(1, 30))]
    prefix_map, worker_id = PrefixMap(), WorkerId("d0")
    prefix_map.add_worker(worker_id, capacity=100, names_per_block=per_block)
    blocks = names[per_block - 1 :: per_block]
    known = [name for name in blocks if data.draw(st.booleans())]
    stored = tuple((name, True) for name in known)
    prefix_map.apply(worker_id, PrefixChange(first_sequence=0, snapshot=True, changes=stored))
    prefix_map.expect(worker_id, others[: data.draw(st.integers(0, len(others)))], now_s=0.0)
    prefix_map.expect(worker_id, names[: data.draw(st.integers(0, 16))], now_s=0.0)
    held = prefix_map.longest_prefix(names).get(worker_id, 0)
    first = next((i for i, name in enumerate(blocks[: held // per_block]) if name not in known), held // per_block)
    assert prefix_map.num_confirmed(worker_id, names[:held]) == first * per_block
