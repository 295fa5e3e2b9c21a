"""Figures from turns: medians over rounds of rates, and of ratios within each round; the goals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from tandem_bench.report import Row, figure
from tandem_bench.transfer.contestants import COPY, COPY_RANGES, PLAIN, SHM, SHM_BARE, TCP, TCP_BARE, TLS
from tandem_bench.transfer.rounds import Absence, Turn

SHM_GOAL = 0.9
"""Goal relative to one memory copy of the same bytes, without checksums."""
TCP_GOAL = 0.95
"""Goal relative to a plain blocking pair, without checksums."""
PEER_GOAL = 1.3
"""Goal relative to each peer over tcp, without checksums, which the peers do not compute."""
SHM_CHECKSUM_GOAL_PERCENT = 35.0
TCP_CHECKSUM_GOAL_PERCENT = 10.0
"""Maximum additional time with checksums."""
PYTHON_GOAL_US = 1.0
"""Maximum time per block."""


def rate_rows(done: Sequence[Turn]) -> list[Row]:
    """Return every contestant's rate in every case."""
    groups: dict[tuple[str, str], list[float]] = {}
    for turn in done:
        groups.setdefault((turn.case, turn.contestant), []).append(turn.bytes_per_s / 1e9)
    return [
        figure(f"rate.{case}.{_slug(name)}", median(rates), f"GB/s, {min(rates):.2f} to {max(rates):.2f}")
        for (case, name), rates in groups.items()
    ]


def cpu_rows(done: Sequence[Turn]) -> list[Row]:
    """Return the CPU time of every contestant's processes: the busier one bounds the rate of an idle machine."""
    sender = medians(done, lambda turn: turn.sender_cpu_s / turn.num_bytes * 1e9)
    receiver = medians(done, lambda turn: turn.receiver_cpu_s / turn.num_bytes * 1e9)
    return [
        figure(f"cpu.{case}.{_slug(name)}.{side}", spent[name, case], "CPU s per GB")
        for name, case in sender
        for side, spent in (("sender", sender), ("receiver", receiver))
    ]


def ratio_rows(done: Sequence[Turn], peers: Iterable[str]) -> list[Row]:
    """Compare Tandem with the machine's limits and the peers, by case; pairs are skipped if one did not run."""
    rows: list[Row] = []
    peers = tuple(peers)
    for case in dict.fromkeys(turn.case for turn in done):
        judged = [
            (SHM_BARE, COPY, SHM_GOAL),
            (TCP_BARE, PLAIN, TCP_GOAL),
            *((TCP_BARE, name, PEER_GOAL) for name in peers),
        ]
        reported = [
            (SHM_BARE, COPY_RANGES, None),
            (SHM, COPY, None),
            (TCP, PLAIN, None),
            (TLS, TCP, None),
            *((TCP, name, None) for name in peers),
        ]
        for mine, other, goal in (*judged, *reported):
            if ratios := round_ratios(done, case, mine, other):
                rows.append(
                    figure(
                        f"ratio.{case}.{_slug(mine)}.{_slug(other)}",
                        median(ratios),
                        f"x {other}{', with checksums' if mine in (SHM, TCP, TLS) else ''}; {_rounds(ratios)}",
                        at_least=goal,
                    )
                )
    return rows


def checksum_rows(done: Sequence[Turn]) -> list[Row]:
    """Return the cost of checksums for each transport, by case."""
    rows: list[Row] = []
    for case in dict.fromkeys(turn.case for turn in done):
        for whole, bare, goal in (
            (SHM, SHM_BARE, SHM_CHECKSUM_GOAL_PERCENT),
            (TCP, TCP_BARE, TCP_CHECKSUM_GOAL_PERCENT),
        ):
            if ratios := round_ratios(done, case, bare, whole):
                unit = f"% more time; times without: {_rounds(ratios)}"
                rows.append(
                    figure(f"checksum_cost.{case}.{_slug(whole)}", 100 * (median(ratios) - 1), unit, at_most=goal)
                )
    return rows


def absence_rows(absent: Iterable[Absence]) -> list[Row]:
    """Return the peers that are missing from the ratios, and why."""
    return [figure(f"absent.{_slug(peer.name)}", 1, f"peer not measured: {peer.reason}") for peer in absent]


def python_rows(seconds_per_block: Mapping[tuple[str, str], float]) -> list[Row]:
    """Return the cost of describing a hand-off, by case and transport."""
    return [
        figure(
            f"python.{case}.{transport}",
            1e6 * seconds,
            "us per block to plan and describe, both sides",
            at_most=PYTHON_GOAL_US,
        )
        for (case, transport), seconds in seconds_per_block.items()
    ]


def round_ratios(done: Sequence[Turn], case: str, mine: str, other: str) -> list[float]:
    """Return the rate of one over the rate of the other in each round in which both ran."""
    rounds: dict[int, dict[str, float]] = {}
    for turn in done:
        if turn.case == case:
            rounds.setdefault(turn.round_index, {})[turn.contestant] = turn.bytes_per_s
    return [rates[mine] / rates[other] for rates in rounds.values() if mine in rates and other in rates]


def medians(done: Sequence[Turn], value: Callable[[Turn], float]) -> Mapping[tuple[str, str], float]:
    """Return medians by contestant and case."""
    groups: dict[tuple[str, str], list[float]] = {}
    for turn in done:
        groups.setdefault((turn.contestant, turn.case), []).append(value(turn))
    return {key: median(values) for key, values in groups.items()}


def _rounds(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} round{'s' * (len(ratios) > 1)}"


def _slug(name: str) -> str:
    return name.replace(" ", "_")
