"""Answers whose router is gone: they go on for a while, for another router to take over.

A client whose router died asks another one, with what it has of its answer. Until then the tokens are generated and
kept; nobody's are for longer than the bound, because a client that does not come back must not cost anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.task import DecodeTask
from tandem.values.ids import Incarnation, RequestId


@dataclass(slots=True, kw_only=True, eq=False)
class _Orphan:
    task: DecodeTask
    router: Incarnation
    lapses_s: float


class Orphanage:
    """Tasks without a router, by the name of their choice. Without I/O; `now_s` is the worker's monotonic clock.

    A choice may have several: the router that began it anew after the first one has gone, too.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self._orphans: dict[RequestId, list[_Orphan]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._orphans.values()))

    def take_in(self, task: DecodeTask, *, now_s: float) -> None:
        """Its router has gone."""
        orphan = _Orphan(task=task, router=task.port.router, lapses_s=now_s + self.keep_s)
        self._orphans.setdefault(task.request_id, []).append(orphan)

    def give_away(self, request_id: RequestId) -> tuple[DecodeTask | None, list[DecodeTask]]:
        """The latest to a router that asks for it, and others of its choice, which nobody needs any more.

        None: it is not here, or came to no good end.
        """
        tasks = [orphan.task for orphan in self._orphans.pop(request_id, [])]
        given = next((task for task in reversed(tasks) if not task.is_over or task.finish is not None), None)
        return given, [task for task in tasks if task is not given]

    def lapsed(self, now_s: float) -> list[DecodeTask]:
        """Those that nobody has asked for in time; they are not here any more."""
        return self._let_go(lambda orphan: orphan.lapses_s <= now_s)

    def of_router(self, router: Incarnation) -> list[DecodeTask]:
        """Those that a router which is back has long continued elsewhere; they are not here any more."""
        return self._let_go(lambda orphan: orphan.router == router)

    def _let_go(self, wanted: Callable[[_Orphan], bool]) -> list[DecodeTask]:
        gone = [orphan for orphans in self._orphans.values() for orphan in orphans if wanted(orphan)]
        for orphan in gone:
            left = self._orphans[orphan.task.request_id]
            left.remove(orphan)
            if not left:
                del self._orphans[orphan.task.request_id]
        return [orphan.task for orphan in gone]
