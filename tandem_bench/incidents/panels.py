"""`python -m tandem_bench.incidents.panels --prometheus URL --out FOLDER`: draws our Grafana dashboards without
Grafana.

A real Prometheus evaluates every panel's expressions over the last minutes; matplotlib draws the panels at their places
in the dashboard: enough to see whether a panel shows what it should.
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARDS = Path(__file__).parents[2] / "helm/tandem/dashboards"
_STEPS = 120
_ALL = ".*"
_CELL = (0.62, 0.34)
"""Size of a grid cell in inches."""
_LEGEND_ROOM = 0.3
"""Share of a graph's height above its lines, for the legend."""
_SUFFIX = "suffix: "
_BYTES = {"bytes": "B", "Bps": "B/s", "flops": "FLOP/s"}


class Series(NamedTuple):
    """One line of a panel."""

    name: str
    times_s: list[float]
    values: list[float]


class Prometheus:
    def __init__(self, url: str, *, start_s: float, end_s: float, namespace: str = _ALL, release: str = _ALL) -> None:
        """`start_s` to `end_s`: time range in seconds since 1970; the rest as chosen on a dashboard."""
        self._url, self._namespace, self._release = url, namespace, release
        self.start_s, self.end_s = start_s, end_s
        self._interval = f"{max(10, int((end_s - start_s) / 10))}s"

    def series(self, target: dict[str, Any]) -> list[Series]:
        """Return the series of one target of a panel."""
        expr = target["expr"].replace("$__rate_interval", self._interval)
        expr = expr.replace("$__range", f"{int(self.end_s - self.start_s)}s")
        expr = expr.replace("$namespace", self._namespace).replace("$release", self._release)
        params = {
            "query": expr,
            "start": self.start_s,
            "end": self.end_s,
            "step": max(1.0, (self.end_s - self.start_s) / _STEPS),
        }
        query = urllib.parse.urlencode(params)
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{query}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return [_series(target["legendFormat"], one) for one in result]


def _series(legend: str, result: dict[str, Any]) -> Series:
    labels = result["metric"]
    name = re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match.group(1), ""), legend).strip()
    points = [(at, float(value)) for at, value in result["values"] if value != "NaN"]
    return Series(name, [at for at, _ in points], [value for _, value in points])


def draw(dashboard: dict[str, Any], prometheus: Prometheus, path: Path) -> list[str]:
    """Draw one dashboard; return the titles of panels without data."""
    from matplotlib.figure import Figure

    shown = dashboard["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = Figure(figsize=(24 * _CELL[0], (height + 1) * _CELL[1]), layout=None)
    figure.suptitle(dashboard["title"], fontsize=13, y=1 - 0.4 / (height + 1))
    empty: list[str] = []
    for panel in shown:
        at = panel["gridPos"]
        top = 1 - (at["y"] + 1) / (height + 1)
        if panel["type"] == "row":
            figure.text(0.01, top - 0.8 / (height + 1), panel["title"], fontsize=11, weight="bold")
            continue
        lines = [one for target in panel["targets"] for one in prometheus.series(target) if one.values]
        if not lines:
            empty.append(panel["title"])
        left, bottom = (at["x"] + 1.1) / 24, top - (at["h"] - 0.9) / (height + 1)
        axes = figure.add_axes((left, bottom, (at["w"] - 1.5) / 24, (at["h"] - 2.1) / (height + 1)))
        (_stat if panel["type"] == "stat" else _graph)(axes, panel, lines, prometheus)
        axes.set_title(panel["title"], fontsize=8, loc="left")
    figure.savefig(path, dpi=80)
    return empty


def draw_panels(panels: Sequence[dict[str, Any]], columns: Mapping[str, Prometheus], path: Path) -> None:
    """Draw several panels, a row each, as seen by each column's Prometheus; a row has one scale."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(4.6 * len(columns), 2.3 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(columns), squeeze=False)
    for row, panel in zip(grid, panels, strict=True):
        for axes, (name, prometheus) in zip(row, columns.items(), strict=True):
            lines = [one for target in panel["targets"] for one in prometheus.series(target) if one.values]
            _graph(axes, panel, lines, prometheus)
            axes.set_title(f"{panel['title']}: {name}", fontsize=8, loc="left")
        top = max(axes.get_ylim()[1] for axes in row)
        for axes in row:
            axes.set_ylim(top=top)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=80)
    # Lines need few colours: a third of the bytes in the repository.
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def _stat(axes: Any, panel: dict[str, Any], lines: list[Series], _: Prometheus) -> None:
    axes.axis("off")
    if not lines:
        axes.text(0.5, 0.4, "no data", ha="center", va="center", fontsize=17)
    for number, line in enumerate(lines):
        value, colour = line.values[-1], "black"
        for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ()):
            if step["value"] is None or value >= step["value"]:
                colour = step["color"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        text = f"{100 * value:.2f} %" if unit == "percentunit" else f"{value:g}"
        at = (number + 0.5) / len(lines)
        axes.text(at, 0.4, text, ha="center", va="center", fontsize=17 / len(lines) ** 0.5, color=colour)
        # As in Grafana: a single value shows its own label.
        axes.text(at, 0.05, line.name if len(lines) > 1 else "", ha="center", fontsize=6)


def _graph(axes: Any, panel: dict[str, Any], lines: list[Series], prometheus: Prometheus) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults.get("custom", {}), defaults["unit"]
    if "stacking" in custom and lines:
        times_s = sorted({at for line in lines for at in line.times_s})
        rows = [dict(zip(line.times_s, line.values, strict=True)) for line in lines]
        stacked = [[row.get(at, 0.0) for at in times_s] for row in rows]
        axes.stackplot([at - prometheus.end_s for at in times_s], stacked, labels=[line.name for line in lines])
    else:
        for line in lines:
            axes.plot([at - prometheus.end_s for at in line.times_s], line.values, label=line.name, linewidth=1)
    if "thresholdsStyle" in custom:
        axes.axhline(defaults["thresholds"]["steps"][-1]["value"], color="red", linewidth=0.7, linestyle="--")
    axes.set_xlim(prometheus.start_s - prometheus.end_s, 0)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(0.0, bottom), top + _LEGEND_ROOM * (top - bottom))
    formatter = PercentFormatter(1.0) if unit == "percentunit" else EngFormatter(_unit(unit))
    axes.yaxis.set_major_formatter(formatter)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=5, loc="upper left", ncols=2, framealpha=0.4)
    else:
        axes.text(0.5, 0.5, defaults.get("noValue", "no data"), ha="center", transform=axes.transAxes, color="grey")


def _unit(unit: str) -> str:
    if unit.startswith(_SUFFIX):
        return unit.removeprefix(_SUFFIX)
    return _BYTES.get(unit, {"s": "s", "reqps": "/s", "ops": "/s"}.get(unit, ""))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.incidents.panels", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of Prometheus; default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("panels"), help="folder for the pictures; default: %(default)s"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="length of the time range; default: %(default)g")
    parser.add_argument("--namespace", default=_ALL, help="namespaces to show, as a regular expression")
    parser.add_argument("--release", default=_ALL, help="releases to show, as a regular expression")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end_s = time.time()
    shown = {"namespace": given.namespace, "release": given.release}
    prometheus = Prometheus(given.prometheus, start_s=end_s - 60 * given.minutes, end_s=end_s, **shown)
    for path in sorted(DASHBOARDS.glob("*.json")):
        picture = given.out / f"{path.stem}.png"
        empty = draw(json.loads(path.read_text()), prometheus, picture)
        print(f"{picture}" + (f"; no data: {', '.join(empty)}" if empty else ""))


if __name__ == "__main__":
    main()
