"""What a hand-off costs in Python per block: planned, described and framed on both sides, with not one byte moved."""

import time
from collections.abc import Callable, Mapping, Sequence

from bench.transfer_bench.cases import Case
from bench.transfer_bench.our_ends import describing
from bench.transfer_bench.pools import Pools

TRANSPORTS = ("shm", "tcp")
_REPEATS = 7


def seconds_per_block(cases: Sequence[Case], pools: Pools) -> Mapping[tuple[str, str], float]:
    """By case and transport; the least of some repeats, since whatever else runs only adds."""
    source, target = pools.source.data, pools.target.data
    found: dict[tuple[str, str], float] = {}
    for case in cases:
        message = case.message()
        for transport in TRANSPORTS:
            describe = describing(message, transport, source, target)
            found[case.name, transport] = min(_timed(describe) for _ in range(_REPEATS)) / len(case.sources)
    return found


def _timed(call: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
