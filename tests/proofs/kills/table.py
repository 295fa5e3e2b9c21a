"""A campaign's report as people read it."""

from collections.abc import Iterator, Sequence

from tests.proofs.kills.campaign import WITHIN, Kill, Report


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted_values[max(0, -int(-share * len(sorted_values) // 1) - 1)]


def lines(report: Report) -> Iterator[str]:
    """Kills by the victim's role and what they hit, then the requests, then what was wrong."""
    ranks = f", {report.num_ranks_killed} of them of a rank alone" if report.num_ranks_killed else ""
    yield f"{len(report.kills)} kills within a transfer and {report.num_missed} outside{ranks}, {report.seconds:.0f} s"
    hit = f"transfers hit: {', '.join(WITHIN)}"
    yield f"{'victim':9}{'kills':>6}  {hit:42}{'blocks':>7}  free after, ms: median p99 max"
    for role in ("prefill", "decode"):
        kills = [kill for kill in report.kills if kill.role == role]
        if kills:
            yield _row(role, kills)
    for outcome, count in report.outcomes.most_common():
        yield f"{count:6} requests: {outcome}"
    yield f"the slowest took {report.slowest_s:.1f} s"
    yield from (f"WRONG: {problem}" for problem in report.problems)


def _row(role: str, kills: Sequence[Kill]) -> str:
    states = [hit["state"] for kill in kills for hit in kill.hits]
    hit = f"{len(states)}: " + ", ".join(str(states.count(state)) for state in WITHIN)
    took_ms = sorted(1e3 * kill.free_s for kill in kills)
    figures = " ".join(f"{quantile(took_ms, share):.0f}" for share in (0.5, 0.99, 1.0))
    return f"{role:9}{len(kills):6}  {hit:42}{sum(kill.num_blocks for kill in kills):7}  {figures}"
