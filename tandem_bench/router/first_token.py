"""What a router adds to the time to first token, at half of what it can take.

Requests come as a Poisson process, and none waits for another's answer. The workers answer at once; what client and an
HTTP server that answers at once take by themselves, at the same rate, is subtracted, quantile from quantile.

"What it can take" is what client, server and workers can together, on one machine. For peers that are faster than
Python, that is the client's and the upstream's limit, which are Python.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil

from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure
from tandem_bench.router import costs as router_costs
from tandem_bench.router import proxies

MAX_P50_MS = 2.0
MAX_P99_MS = 10.0
_CAPACITY_REQUESTS = 4000
_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """One server at half of its capacity."""

    capacity: float
    """Requests per second from many clients, each of whom waits for its answer."""
    whole_p50_ms: float
    """From when a request was due."""
    p50_ms: float
    """What the server added, as for the next."""
    p99_ms: float


def measure(serving: Callable[[], AbstractContextManager[tuple[str, psutil.Process]]]) -> FirstToken:
    """Run one server, and then at the same rate what is measured without one. Raises CannotMeasure."""
    body = router_costs.chat_body(max_tokens=router_costs.ANSWER_TOKENS, stream=True)
    with serving() as (url, _):
        many, requests = router_costs.NUM_CLIENTS_AT_CAPACITY, _CAPACITY_REQUESTS
        router_costs.run_client(url, body, connections=many, requests=requests // 4)
        busy = router_costs.run_client(url, body, connections=many, requests=requests)
        capacity = busy["requests"] / busy["seconds"]
        with_it = _times_ms(url, capacity / 2)
    with proxies.upstream(step_ms=0.0) as url:
        without_it = _times_ms(url, capacity / 2)
    if busy["bad"]:
        raise CannotMeasure("the server did not answer everything")
    p50_ms, p99_ms = (_quantile(with_it, share) - _quantile(without_it, share) for share in (0.5, 0.99))
    return FirstToken(capacity=capacity, whole_p50_ms=_quantile(with_it, 0.5), p50_ms=p50_ms, p99_ms=p99_ms)


def _times_ms(url: str, rate: float) -> list[float]:
    """Return the times to first token at this rate, in order. Raises CannotMeasure."""
    body = router_costs.chat_body(max_tokens=router_costs.ANSWER_TOKENS, stream=True)
    found = router_costs.run_client(url, body, rate=rate, requests=int(_SECONDS * rate))
    if found["bad"] or len(found["first_s"]) < found["requests"]:
        raise CannotMeasure("the server did not answer everything")
    return sorted(1e3 * first_s for first_s in found["first_s"])


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * len(ordered))]


def rows(peers: Sequence[str]) -> list[Row]:
    """Measure Tandem's router and each peer, one after the other. Raises CannotMeasure."""
    ours = measure(lambda: router_costs.cluster(num_workers=2, step_ms=0.0))
    found = [
        figure("streams of chat requests per second, workers that answer at once", ours.capacity, "1/s"),
        figure("time to first token at half of that, p50", ours.whole_p50_ms, "ms"),
        figure("of it added by the router, p50", ours.p50_ms, "ms", at_most=MAX_P50_MS),
        figure("of it added by the router, p99", ours.p99_ms, "ms", at_most=MAX_P99_MS),
    ]
    for peer in peers:
        theirs = measure(lambda name=peer: proxies.serving(name, step_ms=0.0))  # type: ignore[misc]
        found += [
            figure(f"{peer}: streams per second", theirs.capacity, "1/s"),
            figure(f"{peer}: time to first token at half of that, p50", theirs.whole_p50_ms, "ms"),
            figure(f"{peer}: of it added, p50", theirs.p50_ms, "ms"),
            figure(f"{peer}: of it added, p99", theirs.p99_ms, "ms"),
        ]
    return found
