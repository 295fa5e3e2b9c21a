"""The engine benchmark as one picture. Needs matplotlib (the extra `bench`), which only this module imports."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem_bench.engine.figures import Summary
from tandem_bench.engine.tables import in_order, job_name
from tandem_bench.errors import require_extra

_COLORS: Mapping[str, str] = {
    "tandem": "#0b6e4f",
    "tandem worker": "#7bc8a4",
    "vllm": "#e08e45",
    "openvino": "#5b7db1",
    "transformers": "#b7b7b7",
}
_OTHER = "#9b5de5"
_LIMIT = "#c1121f"
_GROUP_WIDTH = 0.8
_LEAST_GROUPS = 3
"""Minimum groups that a panel is drawn for: a single one would not fill it."""
_CROWD = 20
"""Number of bars from which on each panel gets the full width, so that their figures do not overlap."""


def draw(path: Path, summaries: Sequence[Summary], *, title: str) -> None:
    """Write a PNG (or another format by the suffix): speeds as bars, the machine's limits as lines.

    Raises ExtraMissing when matplotlib is missing, ValueError when there is nothing to draw.
    """
    require_extra("matplotlib", "--plot")
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patheffects import withStroke

    if not summaries:
        raise ValueError("nothing was measured")
    speeds = [seen for seen in summaries if not seen.cell.with_newcomers]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        is_crowded = len(summaries) > _CROWD
        size, panels = ((14, 15), (4, 1)) if is_crowded else ((13, 8.5), (2, 2))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
        figure.suptitle(title, fontsize=11, fontweight="bold")
        decode, prefill, gaps, share = figure.subplots(*panels).flat
        _bars(decode, speeds, lambda seen: seen.decode_tokens_per_s)
        _limits(decode, speeds, lambda seen: seen.decode_tokens_per_s / seen.limit_share)
        decode.set(title="Decoding", ylabel="tokens/s")
        _bars(prefill, speeds, lambda seen: seen.prefill_tokens_per_s)
        prefill.set(title="Reading prompts", ylabel="tokens/s")
        _bars(gaps, summaries, lambda seen: 1000 * seen.gap_p99_s)
        gaps.set(title="Wait between two tokens, 99th percentile (lower is better)", ylabel="ms")
        _bars(share, speeds, lambda seen: 100 * seen.limit_share)
        share.axhline(100, color=_LIMIT, linewidth=1)
        share.set_ylim(top=max(110, share.get_ylim()[1]))
        share.set(title="Decoding, share of what the memory's bandwidth allows", ylabel="%")
        for axes in figure.axes:
            for text in axes.texts:  # legible where a limit crosses them
                text.set(path_effects=[withStroke(linewidth=2, foreground="white")], zorder=20)
        handles, labels = decode.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=140)


def _bars(axes: Any, summaries: Sequence[Summary], value: Callable[[Summary], float]) -> None:
    """Draw one group per kind of job, one bar per engine; engines that did not run a job take no room in its group."""
    jobs = _unique(job_name(seen) for seen in in_order(summaries))
    labelled: set[str] = set()
    for place, job in enumerate(jobs):
        group = [seen for seen in summaries if job_name(seen) == job]
        for i, (seen, x, width) in enumerate(zip(group, *_places(place, len(group)), strict=True)):
            label = seen.contestant if seen.contestant not in labelled else None
            labelled.add(seen.contestant)
            height = value(seen)
            bar = axes.bar(
                x, height, width * 0.92, color=_COLORS.get(seen.contestant, _OTHER), label=label, zorder=2 + i
            )
            axes.bar_label(bar, [_shown(height)], padding=2, fontsize=7)
    axes.set_xticks(range(len(jobs)), [job.replace(" x ", " × ").replace(" + ", "\n+ ") for job in jobs])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("requests × prompt + answer tokens", fontsize=8, color="#666666")
    axes.set_xlim(-0.6, max(len(jobs), _LEAST_GROUPS) - 0.4)
    axes.grid(axis="y", color="#e5e5e5", zorder=0)
    axes.margins(y=0.15)


def _limits(axes: Any, summaries: Sequence[Summary], value: Callable[[Summary], float]) -> None:
    """Draw a line over each group, at the highest rate that its engines' bandwidth would have allowed."""
    jobs = _unique(job_name(seen) for seen in in_order(summaries))
    for place, job in enumerate(jobs):
        top = max(value(seen) for seen in summaries if job_name(seen) == job)
        half = _GROUP_WIDTH / 2 + 0.05
        label = "limit of the memory" if place == 0 else None
        axes.plot([place - half, place + half], [top, top], color=_LIMIT, linewidth=1.2, label=label)


def _places(place: int, count: int) -> tuple[list[float], list[float]]:
    """Return centres and widths of a group's bars; a single bar does not fill its group."""
    width = min(_GROUP_WIDTH / count, 0.3)
    return [place + (i - (count - 1) / 2) * width for i in range(count)], [width] * count


def _shown(value: float) -> str:
    """Render three digits, or all of a whole number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
