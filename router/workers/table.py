"""Keeps the columns of both pools: rows when workers join or leave, a view for whoever places. Pure."""

from collections.abc import Iterable

from router.workers.columns import ClusterView, PoolColumns, PoolMembers, partners_of, split_by_role, view_of
from router.workers.record import WorkerRecord
from tandem.values.roles import WorkerRole


class WorkerTable:
    """The columns of all live workers. Rows are made anew, lazily, when who is there has changed."""

    def __init__(self) -> None:
        self._columns: dict[WorkerRole, PoolColumns] = {}
        self._view: ClusterView | None = None

    def changed(self) -> None:
        """Somebody joined or left."""
        self._columns.clear()
        self._view = None

    def view(self, records: Iterable[WorkerRecord]) -> ClusterView:
        """Both pools as they are now; `records` are all live workers. Holds until a record is next told something."""
        view = self._view
        if view is None:
            view = self._view = self._seat(list(records))
        elif any(columns.stale for columns in self._columns.values()):
            decode, prefill = self._columns[WorkerRole.DECODE], self._columns[WorkerRole.PREFILL]
            view = self._view = ClusterView(
                decode=view_of(view.decode.roster, decode),
                prefill=view_of(view.prefill.roster, prefill),
                partners=view.partners,
                num_slots=view.num_slots,
            )
        return view

    def _seat(self, records: list[WorkerRecord]) -> ClusterView:
        rosters: dict[WorkerRole, PoolMembers] = {}
        for role, positions in split_by_role(record.info for record in records).items():
            members = [records[position] for position in positions]
            rosters[role] = PoolMembers([m.info for m in members], [m.slot for m in members])
            columns = self._columns[role] = PoolColumns(len(members))
            for row, member in enumerate(members):
                member.seat(columns, row)
        decode, prefill = rosters[WorkerRole.DECODE], rosters[WorkerRole.PREFILL]
        return ClusterView(
            decode=view_of(decode, self._columns[WorkerRole.DECODE]),
            prefill=view_of(prefill, self._columns[WorkerRole.PREFILL]),
            partners=partners_of(decode, prefill),
            num_slots=max((record.slot for record in records), default=-1) + 1,
        )
