"""A simulation's figures as pictures. matplotlib is only needed here."""

from collections.abc import Sequence
from pathlib import Path

from cluster.simulator.model.report import Report
from cluster.simulator.model.simulation import Simulation
from tandem.errors import ConfigError


def draw(folder: Path, runs: Sequence[tuple[Simulation, Report]]) -> list[Path]:
    """Distributions of the time to the first token and of queueing; hit rate and goodput by policy.

    ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plots needs matplotlib, of the extra `bench`: pip install '.[bench]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    times = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(times.subplots(1, 2), ("time to first token", "queueing"), strict=True):
        for simulation, report in runs:
            ordered = sorted(
                (r.first_token_s or 0.0) - r.arrived_s if name != "queueing" else (r.queued_s or 0.0)
                for r in simulation.router.outcomes.finished
            )
            shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axes.plot(ordered, shares, label=report.policy)
        axes.set(xlabel=f"{name} (s)", ylabel="share of requests", xscale="symlog", ylim=(0, 1))
        axes.legend()
    bars = Figure(figsize=(10, 4), layout="constrained")
    names = [report.policy for _, report in runs]
    left, right = bars.subplots(1, 2)
    left.bar(names, [report.hit_rate for _, report in runs])
    left.set(ylabel="token hit rate")
    right.bar(names, [report.goodput_per_s for _, report in runs])
    right.set(ylabel="goodput at SLO (req/s)")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=30)
    paths = [folder / "times.png", folder / "policies.png"]
    for figure, path in zip((times, bars), paths, strict=True):
        figure.savefig(path)
    return paths
