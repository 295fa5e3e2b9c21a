"""The rates as one picture. Needs matplotlib (the extra `bench`), imported only here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem_bench.errors import require_extra
from tandem_bench.transfer.contestants import COPY, COPY_RANGES, PLAIN, SHM, SHM_BARE, TCP, TCP_BARE
from tandem_bench.transfer.figures import medians
from tandem_bench.transfer.rounds import Turn

_COLORS: Mapping[str, str] = {
    COPY: "#c1121f",
    COPY_RANGES: "#e5989b",
    PLAIN: "#6d6875",
    SHM: "#0b6e4f",
    SHM_BARE: "#7bc8a4",
    TCP: "#274690",
    TCP_BARE: "#8fa8d6",
}
_OTHER = ("#e08e45", "#9b5de5", "#b7b7b7")
_GROUP_WIDTH = 0.85


def draw(path: Path, done: Sequence[Turn]) -> None:
    """Write a PNG (or what the file's ending says): one group of bars per case. Raises ExtraMissing."""
    require_extra("matplotlib", "--plot")
    from matplotlib.figure import Figure

    rates = medians(done, lambda turn: turn.bytes_per_s / 1e9)
    names = list(dict.fromkeys(turn.contestant for turn in done))
    cases = list(dict.fromkeys(turn.case for turn in done))
    others = [name for name in names if name not in _COLORS]
    colors = {**_COLORS, **{name: _OTHER[i % len(_OTHER)] for i, name in enumerate(others)}}
    drawing = Figure(figsize=(11, 4.5), layout="constrained")
    axes = drawing.subplots()
    width = _GROUP_WIDTH / len(names)
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * width for place in range(len(cases))]
        heights = [rates.get((name, case), 0.0) for case in cases]
        bars = axes.bar(places, heights, width * 0.92, color=colors[name], label=name, zorder=2)
        axes.bar_label(bars, [f"{height:.1f}" for height in heights], padding=2, fontsize=7)
    axes.set_xticks(range(len(cases)), ["\n".join(case.rsplit(".", 1)) for case in cases])
    axes.set_ylabel("GB/s, median over rounds")
    axes.grid(axis="y", color="#e5e5e5", zorder=0)
    drawing.legend(loc="outside lower center", ncols=-(-len(names) // 2), frameon=False, fontsize=9)
    drawing.savefig(path, dpi=140)
