"""Merges the parts of all router processes that share ports into one status. Pure.

Each process's own counts are added up. Workers' reports are received by every process, at slightly different times: the
latest one wins. All processes run on one host, and so share its clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import floor
from typing import Any

from router.metrics.quantiles import quantile
from router.status.snapshot.history import NUM_STEPS, HistoryStep, step_from_json

FORMAT = 1
"""Version of the format; processes with another one are left out: one of them is about to be replaced."""
MOST_HANDOFFS = 32
MOST_PREFIXES = 8
MOST_DECISIONS = 12
"""Decisions shown of one tenant."""
TENANT = "tenant"
_OF_WORKERS = frozenset({"moved_bytes", "moves"})
"""Counted by workers, which report to every process."""
_RECENT_STEPS = 2
_MINUTE_STEPS = 12
_LATENCIES = ("ttft", "itl")
_QUANTILES = (("p50", 0.5), ("p95", 0.95))
_ROLES = ("prefill", "decode")


def merged(parts: Sequence[Mapping[str, Any]], bounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Merge the parts. The first one is this process's own; those of other formats are left out.

    `bounds`: of the histograms, by name. Raises LookupError, TypeError or ValueError for an invalid part.
    """
    own, parts = parts[0], [part for part in parts if part.get("format") == FORMAT]
    now_s, step_s = own["now_s"], own["step_s"]
    steps = _added_steps(step for part in parts for step in map(step_from_json, part["steps"]))
    return {
        "model": own["model"],
        "processes": len(parts),
        "not_ready": own["not_ready"],
        "requests": _sums(part["requests"] for part in parts),
        "queue": {
            **_sums({name: part["queue"][name] for name in ("requests", "tokens")} for part in parts),
            "oldest_s": max(part["queue"]["oldest_s"] for part in parts),
        },
        "pools": _pools(_latest(part["workers"] for part in parts)),
        "handoffs": {
            "in_flight": sum(part["handoffs"]["in_flight"] for part in parts),
            "shown": _oldest(handoff for part in parts for handoff in part["handoffs"]["shown"]),
        },
        "prefixes": _prefixes(prefix for part in parts for prefix in part["prefixes"]),
        "recent": _recent(steps, now_s, step_s, bounds),
        "curves": _curves(steps, now_s, step_s, bounds),
        "decisions": sorted((d for part in parts for d in part["decisions"]), key=lambda each: each["age_s"]),
    }


def for_tenant(status: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return the status with only the decisions about one tenant's requests, without the tenant's name."""
    own = [decision for decision in status["decisions"] if decision[TENANT] == tenant][:MOST_DECISIONS]
    return {**status, "decisions": [{k: v for k, v in decision.items() if k != TENANT} for decision in own]}


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


def _latest(reports: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for workers in reports:
        for worker in workers:
            known = found.get(worker["id"])
            if known is None or known["report"] < worker["report"]:
                found[worker["id"]] = worker
    return sorted(found.values(), key=lambda each: natural(each["id"]))


def natural(worker_id: str) -> tuple[str, int, str]:
    """Return a sort key by which `decode-10` comes after `decode-9`."""
    stem, _, number = worker_id.rpartition("-")
    short = number.isascii() and number.isdigit() and len(number) < 10
    return (stem, int(number), "") if short else (worker_id, 0, "")


def _pools(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "blocks": sum(worker["blocks"] for worker in of_role),
            "used_blocks": sum(worker["used_blocks"] for worker in of_role),
            "running": sum(worker["running"] for worker in of_role),
            "waiting": sum(worker["waiting"] for worker in of_role),
            "workers": of_role,
        }
        for role in _ROLES
        for of_role in [[worker for worker in workers if worker["role"] == role]]
    ]


def _oldest(handoffs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(handoffs, key=lambda each: -float(each["age_s"]))[:MOST_HANDOFFS]


def _prefixes(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for prefix in parts:
        known = found.get(prefix["name"])
        if known is None:
            found[prefix["name"]] = dict(prefix)
            continue
        known["asked"] += prefix["asked"]
        known["busy_share"] = round(known["busy_share"] + prefix["busy_share"], 4)
        known["copies_wanted"] = max(known["copies_wanted"], prefix["copies_wanted"])
        known["holders"] = sorted({*known["holders"], *prefix["holders"]})
    return sorted(found.values(), key=lambda each: -float(each["busy_share"]))[:MOST_PREFIXES]


def _added_steps(steps: Iterable[HistoryStep]) -> dict[int, HistoryStep]:
    found: dict[int, HistoryStep] = {}
    for step in steps:
        into = found.setdefault(step.number, HistoryStep(step.number))
        for name, value in step.numbers.items():
            before = into.numbers.get(name, 0.0)
            into.numbers[name] = max(before, value) if name in _OF_WORKERS else before + value
        for name, counts in step.spreads.items():
            _add_counts(into.spreads.setdefault(name, {}), counts)
    return found


def _add_counts(into: dict[int, int], counts: Mapping[int, int]) -> None:
    for index, count in counts.items():
        into[index] = into.get(index, 0) + count


def _recent(
    steps: Mapping[int, HistoryStep], now_s: float, step_s: float, bounds: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return rates of the last ten seconds or so, including the current step; latencies and shares of the last
    minute."""
    current = floor(now_s / step_s)
    seconds = _RECENT_STEPS * step_s + (now_s - current * step_s)
    last = [step for number in range(current - _RECENT_STEPS, current + 1) if (step := steps.get(number))]
    minute = [step for number in range(current - _MINUTE_STEPS, current + 1) if (step := steps.get(number))]

    def rate(name: str) -> float:
        return round(sum(step.numbers.get(name, 0.0) for step in last) / seconds, 2)

    queried = sum(step.numbers.get("queried_tokens", 0.0) for step in minute)
    cached = sum(step.numbers.get("cached_tokens", 0.0) for step in minute)
    return {
        "prompt_tokens_per_s": rate("prompt_tokens"),
        "generation_tokens_per_s": rate("generation_tokens"),
        "requests_per_s": rate("finished"),
        "failed_per_s": rate("failed"),
        "refused_per_s": rate("refused"),
        "handoffs_per_s": rate("moves"),
        "moved_bytes_per_s": rate("moved_bytes"),
        "cached_share": round(cached / queried, 4) if queried else None,
        **{f"{name}_{label}_ms": value for name, label, value in _latencies(minute, bounds)},
    }


def _latencies(
    steps: Sequence[HistoryStep], bounds: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, str, float | None]]:
    for name in _LATENCIES:
        counts: dict[int, int] = {}
        for step in steps:
            _add_counts(counts, step.spreads.get(name, {}))
        for label, share in _QUANTILES:
            value = quantile(counts, bounds[name], share)
            yield name, label, None if value is None else round(value * 1e3, 3)


def _curves(
    steps: Mapping[int, HistoryStep], now_s: float, step_s: float, bounds: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the complete steps, oldest first; the last one ended `end_age_s` ago. A latency is null where none was
    measured."""
    current = floor(now_s / step_s)
    nothing = HistoryStep(0)
    whole = [steps.get(number, nothing) for number in range(current - NUM_STEPS, current)]
    curves: dict[str, Any] = {"step_s": step_s, "end_age_s": round(now_s - current * step_s, 3)}
    for name in ("prompt_tokens", "generation_tokens"):
        curves[f"{name}_per_s"] = [round(step.numbers.get(name, 0.0) / step_s, 2) for step in whole]
    for step in whole:
        for name, label, value in _latencies([step], bounds):
            curves.setdefault(f"{name}_{label}_ms", []).append(value)
    return curves
