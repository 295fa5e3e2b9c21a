"""Rendering of `tandem top` with rich. Names of workers are shown as plain text, whatever they contain."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cluster.terminal_text import without_controls
from cluster.top.status import ClusterStatus, SortOrder, Worker, in_order

KEYS_HINT = "q quits · s changes the sort key · r reverses the order"
_BAR_WIDTH = 8
_STATES = {"live": "green", "draining": "yellow", "probing": "yellow", "stuck": "red", "avoided": "red"}
_HEAD_LINES = 14
"""Number of lines above and below the workers and the hand-offs."""
_MOST_HANDOFFS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that the display shows."""

    status: ClusterStatus | None
    """Latest status; None: no router has answered yet."""
    errors: Sequence[str] = ()
    """Errors of routers that did not answer the last time."""
    age_s: float = 0.0
    """Age of the status in seconds."""
    num_routers: int = 1
    order: SortOrder = SortOrder.NAME
    reverse: bool = False
    interactive: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many lines as fit, in the live view."""
        yield Group(*self._parts(options.max_height if self.interactive else None))

    def _parts(self, height: int | None) -> list[RenderableType]:
        parts: list[RenderableType] = [Text(without_controls(error), style="bold red") for error in self.errors]
        if self.status is None:
            parts.append(Text("no status yet; retrying", style="dim"))
        else:
            is_old = bool(self.errors) and self.age_s > 0
            if is_old:
                parts.append(Text(f"the figures are {duration(self.age_s)} old; retrying", style="yellow"))
            if self.status.not_ready:
                parts.append(Text(f"not ready: {without_controls(self.status.not_ready)}", style="yellow"))
            room = None if height is None else max(4, height - _HEAD_LINES - len(parts))
            parts += [_head(self.status, self.num_routers), Text(""), _figures(self.status)]
            parts += [Text(""), _workers(self, self.status, room), Text(""), *_handoffs(self.status)]
        if self.interactive:
            parts.append(Text(KEYS_HINT, style="dim"))
        return parts


def _head(status: ClusterStatus, num_routers: int) -> Text:
    parts = [without_controls(status.model)]
    if num_routers > 1:
        parts.append(f"{num_routers} routers")
    if status.processes > num_routers:
        parts.append(f"{status.processes} router processes")
    for role in ("prefill", "decode"):
        count = sum(worker.role == role for worker in status.workers)
        parts.append(f"{count} {role} worker{'' if count == 1 else 's'}")
    return Text.assemble(("Tandem", "bold"), " · ", " · ".join(parts))


def _figures(status: ClusterStatus) -> Table:
    r = status.rates
    table = Table.grid(padding=(0, 3))
    cached = "–" if r.cached_share is None else f"{r.cached_share:.0%}"
    turned = f", {r.refused_per_s:.1f}/s refused, {r.failed_per_s:.1f}/s failed"
    rows = (
        ("throughput", f"{r.generation_tokens_per_s:,.0f} tokens/s out, {r.prompt_tokens_per_s:,.0f} in"),
        ("cached", f"{cached} of prompts"),
        ("requests", f"{status.running} running, {status.waiting} waiting, {r.requests_per_s:.1f}/s"),
        (
            "queue",
            f"{status.queued} ({status.queued_tokens:,} tokens){turned if r.refused_per_s + r.failed_per_s else ''}",
        ),
        ("first token", f"p50 {milliseconds(r.ttft_p50_ms)}, p95 {milliseconds(r.ttft_p95_ms)}"),
        ("between", f"p50 {milliseconds(r.itl_p50_ms)}, p95 {milliseconds(r.itl_p95_ms)}"),
    )
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(Text(left[0], style="dim"), Text(left[1]), Text(right[0], style="dim"), Text(right[1]))
    return table


def _workers(view: View, status: ClusterStatus, room: int | None) -> Table:
    # Fits a terminal of 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    direction = " ↑" if view.reverse else " ↓"
    titles = {
        SortOrder.NAME: "worker",
        SortOrder.KV: "KV",
        SortOrder.RUNNING: "run",
        SortOrder.WAITING: "wait",
        SortOrder.BACKLOG: "backlog",
    }
    for order, title in titles.items():
        shown = title + (direction if order is view.order else "")
        table.add_column(shown, justify="left" if order in (SortOrder.NAME, SortOrder.KV) else "right", no_wrap=True)
    # Prefill workers show tokens read per second, decode workers milliseconds per step.
    for title in ("speed", "moves"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    workers = in_order(status.workers, view.order, reverse=view.reverse)
    most = len(workers) if room is None or len(workers) <= room else room - 1
    for worker in workers[:most]:
        table.add_row(*_worker(worker))
    if len(workers) > most:
        table.add_row(Text(f"and {len(workers) - most} more", style="dim"))
    if not workers:
        table.add_row(Text("no worker is connected", style="yellow"))
    return table


def _worker(worker: Worker) -> list[Text]:
    full = round(worker.used_share * _BAR_WIDTH)
    style = "red" if worker.used_share > 0.9 else "yellow" if worker.used_share > 0.7 else "green"
    bar = Text.assemble(("█" * full, style), ("░" * (_BAR_WIDTH - full), "dim"), f" {worker.used_share:.0%}".rjust(5))
    speed = ""
    if worker.role == "prefill" and worker.prefill_tokens_per_s:
        speed = f"{worker.prefill_tokens_per_s:,.0f}/s"
    elif worker.decode_step_s:
        speed = f"{worker.decode_step_s * 1e3:.1f} ms"
    moves = " ".join(f"{arrow}{count}" for arrow, count in (("↑", worker.sending), ("↓", worker.receiving)) if count)
    return [
        Text(without_controls(worker.id)),
        bar,
        Text(str(worker.running)),
        Text(str(worker.waiting)),
        Text(f"{worker.backlog_tokens:,}"),
        Text(speed),
        Text(moves or "–"),
        Text(without_controls(worker.state), style=_STATES.get(worker.state, "")),
    ]


def _handoffs(status: ClusterStatus) -> list[RenderableType]:
    rates = status.rates
    head = Text.assemble(
        ("hand-offs", "bold"),
        f"  {status.num_handoffs} in flight · {rates.handoffs_per_s:.1f}/s · {size(rates.moved_bytes_per_s)}/s of KV",
    )
    lines: list[RenderableType] = [head]
    for one in status.handoffs[:_MOST_HANDOFFS]:
        way = f"  {without_controls(one.source)} → {without_controls(one.target)}"
        lines.append(Text(f"{way}  {one.tokens:,} tokens, {duration(one.age_s)}"))
    return lines


def milliseconds(value: float | None) -> str:
    """Render milliseconds as `123 ms`, or a dash for None."""
    if value is None:
        return "–"
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"


def duration(seconds: float) -> str:
    """Render a duration, as `1.2 s` or `3 min`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def size(num_bytes: float) -> str:
    """Render a size in powers of ten, as for link rates: `1.2 MB`."""
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
