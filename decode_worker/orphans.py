"""Answers whose router is gone: they go on for a while, for another router to take over.

A client whose router died asks another one, with what it has of its answer. Until then the tokens are generated and
kept; nobody's are for longer than the bound, because a client that does not come back must not cost anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.task import DecodeTask
from tandem.ids import Incarnation, RequestId


@dataclass(slots=True, kw_only=True)
class _Orphan:
    task: DecodeTask
    router: Incarnation
    lapses_s: float


class Orphanage:
    """Tasks without a router, by the name of their choice. Without I/O; `now_s` is the worker's monotonic clock."""

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self._orphans: dict[RequestId, _Orphan] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def take_in(self, task: DecodeTask, *, now_s: float) -> None:
        """Its router has gone."""
        self._orphans[task.request_id] = _Orphan(task=task, router=task.port.router, lapses_s=now_s + self.keep_s)

    def give_away(self, request_id: RequestId) -> DecodeTask | None:
        """To a router that asks for it. None: it is not here, or came to no good end."""
        orphan = self._orphans.pop(request_id, None)
        if orphan is None or (orphan.task.is_over and orphan.task.finish is None):
            return None
        return orphan.task

    def lapsed(self, now_s: float) -> list[DecodeTask]:
        """Those that nobody has asked for in time; they are not here any more."""
        return self._let_go(lambda orphan: orphan.lapses_s <= now_s)

    def of_router(self, router: Incarnation) -> list[DecodeTask]:
        """Those that a router which is back has long continued elsewhere; they are not here any more."""
        return self._let_go(lambda orphan: orphan.router == router)

    def _let_go(self, wanted: Callable[[_Orphan], bool]) -> list[DecodeTask]:
        gone = [request_id for request_id, orphan in self._orphans.items() if wanted(orphan)]
        return [self._orphans.pop(request_id).task for request_id in gone]
