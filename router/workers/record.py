"""One live worker's load accounting, and its cells of the columns that placement reads. Pure.

A worker's own load report is always a little old, so this router also counts what it has sent. Every change here is
written at once to the worker's own row, and to no other.
"""

from collections.abc import Collection, Iterable

from router.types.session_events import WorkerPort
from router.types.worker_view import WorkerInfo, WorkerLoad, WorkerSnapshot
from router.workers.columns import ClusterView, PoolColumns, PoolMembers, partners_of, view_of
from router.workers.pair_links import PairLinks, PairTable
from router.workers.peer_load import NO_PEERS, PeerShare
from tandem.cluster_state.entries import Process, Share
from tandem.values.roles import WorkerRole


class WorkerRecord:
    """The registry's record of one worker."""

    __slots__ = (
        "_columns",
        "_kv_token_bytes",
        "_row",
        "answered_s",
        "backlog_beside",
        "backlog_now",
        "backlog_since_load",
        "backlog_tokens",
        "draining",
        "info",
        "load",
        "num_active",
        "num_active_now",
        "num_assigned",
        "num_beside",
        "num_since_load",
        "own_backlog",
        "peers",
        "penalised_until_s",
        "port",
        "slot",
    )

    def __init__(self, info: WorkerInfo, port: WorkerPort, *, slot: int, now_s: float) -> None:
        self.info = info
        self._kv_token_bytes = info.kv_bytes_per_token
        self.slot = slot
        self.answered_s = now_s
        self.port = port
        self.load = WorkerLoad(num_free_blocks=info.num_blocks)
        self.draining = False
        self.penalised_until_s = 0.0
        # This router's load on the worker, and the part that the last load report cannot include.
        self.own_backlog = 0
        self.num_assigned = 0
        self.backlog_since_load = 0
        self.num_since_load = 0
        # Other routers' load when the worker last reported.
        self.backlog_beside = 0
        self.num_beside = 0
        # Other routers' load as they publish it.
        self.peers = NO_PEERS
        self._columns: PoolColumns | None = None
        self._row = 0
        self._recount()

    def snapshot(self, now_s: float) -> WorkerSnapshot:
        """Return the worker as an immutable value."""
        return WorkerSnapshot(
            info=self.info,
            load=self.load,
            backlog_tokens=self.backlog_tokens,
            num_active=self.num_active,
            backlog_now=self.backlog_now,
            num_active_now=self.num_active_now,
            draining=self.draining,
            penalty_ms=max(0.0, self.penalised_until_s - now_s) * 1e3,
            answered_s=self.answered_s,
        )

    def assign_row(self, columns: PoolColumns, row: int) -> None:
        """Write to this row of the columns from now on."""
        self._columns, self._row = columns, row
        columns.penalised_until_s[row] = self.penalised_until_s
        columns.open[row] = not self.draining
        self._show_load()
        self._recount()

    def move_row(self, columns: PoolColumns, row: int) -> int | None:
        """Write to this row from now on; return the one until now, whose contents still have to be copied there.

        None: it had none.
        """
        before = None if self._columns is None else self._row
        self._columns, self._row = columns, row
        return before

    def assigned(self, tokens_to_compute: int) -> None:
        """Record a request sent to the worker."""
        self.own_backlog += tokens_to_compute
        self.backlog_since_load += tokens_to_compute
        self.num_assigned += 1
        self.num_since_load += 1
        self._count_requests()
        if tokens_to_compute:
            self._count_tokens()

    def add_tokens(self, tokens: int) -> None:
        """Add tokens of an assigned request to the backlog."""
        self.own_backlog += tokens
        self.backlog_since_load += tokens
        self._count_tokens()

    def computed(self, tokens: int) -> None:
        """Take assigned tokens off the backlog: they have been computed, or never will be."""
        self.own_backlog -= tokens
        self._count_tokens()

    def released(self) -> None:
        """Record the end of an assigned request."""
        self.num_assigned -= 1
        self._count_requests()

    def reported(self, load: WorkerLoad, peers: PeerShare) -> None:
        """Apply the worker's load report, and other routers' whole load on it as far as that report shows it."""
        self.load, self.peers = load, peers
        self.backlog_since_load = self.num_since_load = 0
        self.backlog_beside = max(0, load.backlog_tokens - self.own_backlog)
        self.num_beside = max(0, load.num_running + load.num_waiting - self.num_assigned)
        self._show_load()
        self._recount()

    def loaded_elsewhere(self, share: PeerShare) -> None:
        """Set other routers' whole load on the worker."""
        self.peers = share
        self._recount()

    def share(self) -> Share:
        """This router's load on the worker, for other routers."""
        return Share(
            process=Process(*self.info.key),
            report_number=self.load.report_number,
            backlog_tokens=self.own_backlog,
            num_requests=self.num_assigned,
            backlog_since=self.backlog_since_load,
            num_since=self.num_since_load,
        )

    def penalised(self, until_s: float) -> None:
        """Make placement add the time left until `until_s` to the worker's cost."""
        self.penalised_until_s = max(self.penalised_until_s, until_s)
        if (columns := self._columns) is not None:
            columns.penalised_until_s[self._row] = self.penalised_until_s
            columns.stale = True

    def drains(self) -> None:
        """Mark the worker as draining: it accepts no more requests."""
        self.draining = True
        if (columns := self._columns) is not None:
            columns.open[self._row] = False
            columns.stale = True

    def _recount(self) -> None:
        """Add up the load, all of which may have changed, and show it."""
        self._count_tokens()
        self._count_requests()

    def _count_tokens(self) -> None:
        """Add up the backlog and show it. `WorkerSnapshot` says what the sums count."""
        load, peers = self.load, self.peers
        # Either count alone can be too low: the report is old, and includes requests that no router counts any more.
        self.backlog_tokens = max(
            self.own_backlog + peers.backlog_tokens,
            load.backlog_tokens + self.backlog_since_load + peers.backlog_since,
        )
        self.backlog_now = self.own_backlog + max(self.backlog_beside, peers.backlog_tokens)
        if (columns := self._columns) is not None:
            columns.backlog[self._row] = self.backlog_tokens
            columns.backlog_now[self._row] = self.backlog_now

    def _count_requests(self) -> None:
        """Add up the requests and show them, likewise."""
        load, peers = self.load, self.peers
        self.num_active = max(
            self.num_assigned + peers.num_requests,
            load.num_running + load.num_waiting + self.num_since_load + peers.num_since,
        )
        self.num_active_now = self.num_assigned + max(self.num_beside, peers.num_requests)
        if (columns := self._columns) is not None:
            columns.active[self._row] = self.num_active
            columns.active_now[self._row] = self.num_active_now

    def _show_load(self) -> None:
        if (columns := self._columns) is None:
            return
        row, load, info = self._row, self.load, self.info
        columns.loads[row] = load
        columns.free_tokens[row] = info.tokens_in(load.num_free_blocks)
        columns.relief[row] = 1.0 / max(1, load.num_running)
        rate, link = load.prefill_tokens_per_s, load.kv_bytes_per_s
        columns.tokens_per_s[row] = rate
        self._show_rate(columns, "prefill_ms", 1e3 / rate if rate > 0.0 else 0.0)
        self._show_rate(columns, "step_ms", 1e3 * load.decode_step_s)
        self._show_rate(columns, "link_ms", 1e3 * self._kv_token_bytes / link if link > 0.0 else 0.0)
        self._show_growth(columns, 0.5 / load.context_tokens if load.context_tokens > 0 else 0.0)

    def _show_rate(self, columns: PoolColumns, name: str, value: float) -> None:
        column = getattr(columns, name)
        if (column[self._row] == 0.0) != (value == 0.0):
            columns.num_unmeasured[name] += 1 if value == 0.0 else -1
            columns.stale = True
        column[self._row] = value

    def _show_growth(self, columns: PoolColumns, value: float) -> None:
        if (columns.attention[self._row] == 0.0) != (value == 0.0):
            columns.num_grown += -1 if value == 0.0 else 1
            columns.stale = True
        columns.attention[self._row] = value


class WorkerTable:
    """The columns of all live workers; rebuilt lazily after workers join or leave."""

    def __init__(self, records: Collection[WorkerRecord]) -> None:
        """`records`: of all live workers, as they are at any time; `changed` must be called after one was added or
        removed."""
        self.pairs = PairTable()
        """Measurements of the links between the workers."""
        self._records = records
        self._decode = PoolColumns(0)
        self._prefill = PoolColumns(0)
        self._view: ClusterView | None = None
        self._links: PairLinks | None = None

    def changed(self) -> None:
        """Rebuild the columns at the next view: a worker joined or left."""
        self._view = self._links = None

    def links(self, view: ClusterView, now_s: float) -> PairLinks | None:
        """Return the links between the workers of the view just taken; None: they make no difference to placement."""
        if self._links is None:
            self._links = PairLinks(self.pairs, view.decode.members, view.prefill.members)
        return self._links if self._links.refreshed(now_s) else None

    def view(self) -> ClusterView:
        """Return all live workers as placement sees them; valid until one of them next changes."""
        view = self._view
        if view is None:
            view = self._view = self._seat()
        elif self._decode.stale or self._prefill.stale:
            view = self._view = ClusterView(
                decode=view_of(view.decode.members, self._decode),
                prefill=view_of(view.prefill.members, self._prefill),
                partners=view.partners,
                num_slots=view.num_slots,
            )
        return view

    def _seat(self) -> ClusterView:
        records = list(self._records)
        decode, self._decode = _seated(records, WorkerRole.DECODE, self._decode)
        prefill, self._prefill = _seated(records, WorkerRole.PREFILL, self._prefill)
        return ClusterView(
            decode=view_of(decode, self._decode),
            prefill=view_of(prefill, self._prefill),
            partners=partners_of(decode, prefill),
            num_slots=max((record.slot for record in records), default=-1) + 1,
        )


def _seated(records: Iterable[WorkerRecord], role: WorkerRole, before: PoolColumns) -> tuple[PoolMembers, PoolColumns]:
    """Give each worker of a pool its row; `before`: their columns until now, of which most cells are copied."""
    members = [record for record in records if record.info.role is role]
    # First: if this fails, nothing has changed.
    properties = PoolMembers([member.info for member in members], [member.slot for member in members])
    columns = PoolColumns(len(members))
    former = [member.move_row(columns, row) for row, member in enumerate(members)]
    moved = [(row, from_row) for row, from_row in enumerate(former) if from_row is not None]
    columns.copy_rows([row for row, _ in moved], before, [from_row for _, from_row in moved])
    for row, member in enumerate(members):
        if former[row] is None:
            member.assign_row(columns, row)
    return properties, columns
