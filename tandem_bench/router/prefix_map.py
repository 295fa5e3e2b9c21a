"""Cost of the prefix map: looking up a prompt, dropping a worker, memory per entry.

The prompt has 1,024 blocks. It is looked up among workers that all hold it, that hold random lengths of it, and of
which one holds it and the others its first tenth. A dropped worker holds 10,000 blocks, in a map with as many for each
other worker: the time must not depend on their number.
"""

import gc
import tracemalloc
from collections.abc import Sequence
from random import Random

from router.workers.prefix_map import PrefixMap
from tandem.values.ids import BlockHash, WorkerId
from tandem_bench.report import Row, figure
from tandem_bench.router import workers
from tandem_bench.router.timing import least_us

NUM_BLOCKS = 1024
NUM_WORKERS = (8, 64, 1000)
GOAL_US = 150.0
"""Goal of a lookup over 64 workers."""
_HELD = 10_000
_COUNTED = 50_000


def rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    for num_workers in NUM_WORKERS:
        goal = GOAL_US if num_workers == 64 else None
        for name, depths in _holdings(num_workers).items():
            microseconds = _lookup_us(depths, repeats)
            found.append(figure(f"prefix_map.lookup.{num_workers}.{name}", microseconds, "us", at_most=goal))
    for others in (1, 15):
        found.append(figure(f"prefix_map.drop.beside_{others}", _drop_us(others) / 1e3, f"ms for {_HELD:,} blocks"))
    for holders in (1, 2, 8):
        found.append(figure(f"prefix_map.memory.{holders}_holders", _entry_bytes(holders), "bytes per name"))
    return found


def _holdings(num_workers: int) -> dict[str, list[int]]:
    rng = Random(6)
    return {
        "all": [NUM_BLOCKS] * num_workers,
        "chance": [rng.randrange(NUM_BLOCKS + 1) for _ in range(num_workers)],
        "one": [NUM_BLOCKS] + [NUM_BLOCKS // 10] * (num_workers - 1),
    }


def _lookup_us(depths: Sequence[int], repeats: int) -> float:
    blocks, prefix_map = workers.names(Random(7), NUM_BLOCKS), PrefixMap()
    for number, depth in enumerate(depths):
        _add(prefix_map, number, blocks[:depth])
    return least_us(lambda: prefix_map.match(blocks), repeats=repeats)


def _drop_us(num_others: int) -> float:
    rng, prefix_map = Random(8), PrefixMap()
    for number in range(num_others):
        _add(prefix_map, number, workers.names(rng, _HELD))
    best = float("inf")
    for _ in range(5):
        leaving = _add(prefix_map, num_others, workers.names(rng, _HELD))
        best = min(best, least_us(lambda worker=leaving: prefix_map.drop_worker(worker), repeats=1))  # type: ignore[misc]
    return best


def _entry_bytes(num_holders: int) -> float:
    """Return the bytes kept for one block name: the name itself, the index, and an entry for each holder.

    Every holder brings its own copy of the name, as messages do.
    """
    gc.collect()
    tracemalloc.start()
    try:
        prefix_map = PrefixMap()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(num_holders):
            _add(prefix_map, number, workers.names(Random(9), _COUNTED))
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / _COUNTED
    finally:
        tracemalloc.stop()


def _add(prefix_map: PrefixMap, number: int, blocks: list[BlockHash]) -> WorkerId:
    worker = WorkerId(f"w{number}")
    prefix_map.add_worker(worker, capacity=max(1, len(blocks)))
    prefix_map.apply(worker, workers.stored(blocks))
    return worker
