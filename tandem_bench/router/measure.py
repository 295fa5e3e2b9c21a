"""All of `python -m tandem_bench router`: part by part, rows as they come."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from tandem_bench.report import Row, figure
from tandem_bench.report import print_table as show_rows
from tandem_bench.router import agentic, budget, first_token, options, overload, placement, prefix_map, proxies, redis
from tandem_bench.router import costs as router_costs

MAX_REQUEST_MS = 0.6
MAX_TOKENIZE_RATIO = 1.2
MIN_STREAM_TOKENS_PER_CPU_S = 40_000.0
_AT_CAPACITY = f"the same from {router_costs.NUM_CLIENTS_AT_CAPACITY} clients at a time"


def server_rows(num_rounds: int, peers: Sequence[str], *, tls: bool = False) -> list[Row]:
    """Run rounds of Tandem and its peers in alternation; the best of each figure counts. Raises CannotMeasure."""
    ours: list[router_costs.ServerCosts] = []
    in_tls: list[router_costs.ServerCosts] = []
    theirs: dict[str, list[proxies.PeerCosts]] = {peer: [] for peer in peers}
    for _ in range(num_rounds):
        ours.append(router_costs.measure())
        if tls:
            in_tls.append(router_costs.measure(tls=True))
        for peer, costs in theirs.items():
            costs.append(proxies.measure(peer))
    found = our_rows(ours)
    if in_tls:
        found += [
            figure(
                "with cluster.tls: the request without tokenizing",
                min(one.request_ms for one in in_tls),
                "ms",
            ),
            figure(
                "with cluster.tls: streamed tokens per CPU-second",
                max(one.stream_tokens_per_cpu_s for one in in_tls),
                "1/s",
            ),
        ]
    for peer, costs in theirs.items():
        found += [
            figure(f"{peer}: processor time per request", min(one.request_ms for one in costs), "ms"),
            figure(f"{peer}: {_AT_CAPACITY}", min(one.request_at_capacity_ms for one in costs), "ms"),
            figure(f"{peer}: streamed events per CPU-second", max(c.stream_events_per_cpu_s for c in costs), "1/s"),
        ]
    return found


def our_rows(rounds: Sequence[router_costs.ServerCosts]) -> list[Row]:
    """Return the best of each figure; which may be of different rounds."""
    tokenize_ms = min(one.tokenize_ms for one in rounds)
    ratio = tokenize_ms / min(one.bare_tokenize_ms for one in rounds)
    whole_ms, next_turn_ms = (min(one.next_turn_ms[i] for one in rounds) for i in (0, 1))
    streamed = max(one.stream_tokens_per_cpu_s for one in rounds)
    return [
        figure(
            "processor time per chat request of 2 KB, without tokenizing",
            min(one.request_ms for one in rounds),
            "ms",
            at_most=MAX_REQUEST_MS,
        ),
        figure(_AT_CAPACITY, min(one.request_at_capacity_ms for one in rounds), "ms", at_most=MAX_REQUEST_MS),
        figure("with its tokenizing", min(one.whole_request_ms for one in rounds), "ms"),
        figure("template and tokenizing alone, in a loop", tokenize_ms, "ms"),
        figure("tokenizing against a bare call", ratio, "", at_most=MAX_TOKENIZE_RATIO),
        figure(f"tokenizing a conversation of {router_costs.NUM_TURNS} turns", whole_ms, "ms"),
        figure("tokenizing its last turn, with its history known", next_turn_ms, "ms"),
        figure("requests per second, with tokenizing", max(one.requests_per_s for one in rounds), "1/s"),
        figure("streamed tokens per CPU-second", streamed, "1/s", at_least=MIN_STREAM_TOKENS_PER_CPU_S),
        figure("streamed tokens per second, 64 clients", max(one.stream_tokens_per_s for one in rounds), "1/s"),
    ]


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console) -> None:
    """Measure and print the requested parts, adding to `rows` part by part, so that a later failure loses nothing."""
    parts = options.parts(given)
    # First, so that a wrong `--trace` is refused before anything is measured.
    agents = agentic.spec_of(given.requests, given.trace) if "agentic" in parts else None
    for part in parts:
        if part == "doors":
            found = server_rows(given.rounds, given.peer, tls=given.tls)
        elif part == "first_token":
            found = first_token.rows(given.peer)
        elif part == "budget":
            found = budget.rows(given.flames)
        elif part == "agentic" and agents is not None:
            out.print(agentic.describe(agents, given.trace), markup=False, soft_wrap=True)
            found = agentic.rows(agents)
        else:
            found = await overload.rows() if part == "overload" else _PARTS[part](given.repeats)
        show_rows(out, found)
        rows += found


_PARTS: Mapping[str, Callable[[int], list[Row]]] = {
    "placement": placement.rows,
    "prefix_map": prefix_map.rows,
    "redis": redis.rows,
}
