"""Tells requests that crash the workers computing them from those that were merely there. Pure.

A choice is *unproven* on a worker until that worker has sent a token for it. When a worker is lost, every choice
unproven on it may have crashed it, and continues alone: on a worker where no other choice is unproven, and where no new
one is placed meanwhile. If that worker is lost as well, with no token in between, the choice is *condemned*: its
request gets an error, and equal requests are refused for a minute. Streams that had tokens from the lost worker
continue at once, anywhere; only after a second loss without a token do they run alone, too.

Workers also die of other causes. So a loss counts against a choice only if it was alone; a death within the last minute
in which it had no part requires one more loss, and so does a token that it ever had.

A broken session looks like a death. So a loss is in doubt for a while: a worker that reconnects in that time as the
same process did not die, and the loss is forgotten. A choice that would be condemned by losses in doubt runs nowhere
until they are decided.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct, field

from router.types.worker_view import WorkerKey
from tandem.values.ids import RequestId

MAX_SUSPECTS = 8
"""Bound beyond which the choices unproven on a lost worker are not isolated: each is too unlikely to be the cause."""
_ISOLATION_S = 2.0
"""Seconds for which a suspect waits for a worker of its own."""


class _LostWorker(Struct, kw_only=True, eq=False):
    key: WorkerKey
    at_s: float
    unproven: frozenset[RequestId]
    is_back: bool = False
    """The worker was only frozen: if it is lost again, that is a new loss."""


class _TrackedChoice(Struct, kw_only=True):
    """A choice that is on a worker, or was on a lost one."""

    workers: tuple[WorkerKey, ...] = ()
    unproven: bool = False
    met: list[_LostWorker] = field(default_factory=list)
    """Workers lost under it since its last token."""
    suspect: bool = False
    accused: bool = False
    """Whether it is condemned unless one of them comes back."""
    has_run: bool = False
    """Whether it had a token once, so that most of it can evidently be computed."""
    waits_since_s: float | None = None
    reserved: tuple[WorkerKey, ...] = ()
    """Workers on which no new choice is placed, for its sake."""
    failed: frozenset[WorkerKey] = frozenset()
    """Workers that failed on it while unproven: one that dies afterwards may have been failing already."""

    def remain(self, still: tuple[WorkerKey, ...]) -> None:
        """Keep only these of its workers."""
        self.workers, self.unproven, self.reserved = still, self.unproven and bool(still), ()

    def may_have_ended(self, worker: WorkerKey) -> bool:
        """Whether it may have crashed the worker, which had sent no token for it."""
        return (self.unproven and worker in self.workers) or worker in self.failed


class PoisonRequestTracker:
    """Tracks the choices of one router and the workers lost under them."""

    def __init__(self, *, remembered_s: float = 60.0, return_s: float = 0.0) -> None:
        """`remembered_s`: how long condemned requests and other deaths count.

        `return_s`: how long a lost worker may come back without the loss counting.
        """
        self._remembered_s = remembered_s
        self._return_s = return_s
        self._choices: dict[RequestId, _TrackedChoice] = {}
        self.trials: set[RequestId] = set()
        """Suspects that have, or wait for, a worker of their own; none nearly always. All accused choices are here."""
        self._fallen: deque[_LostWorker] = deque()
        self.condemned: dict[tuple[int, bytes], float] = {}
        """Time until which equal requests are refused, by prompt length and digest; empty nearly always."""
        self.num_condemned = 0
        self.num_refused = 0

    def placed(self, choice: RequestId, workers: tuple[WorkerKey, ...]) -> None:
        """Record that it was sent to these workers: the one that decodes and the one that prefills."""
        tracked = self._choices.setdefault(choice, _TrackedChoice())
        tracked.workers, tracked.unproven, tracked.waits_since_s = workers, True, None
        tracked.reserved = workers if tracked.suspect else ()

    def proven(self, choice: RequestId) -> None:
        """Record a token: earlier losses were not its doing."""
        tracked = self._choices.get(choice)
        if tracked is not None and tracked.unproven:
            self._choices[choice] = _TrackedChoice(workers=tracked.workers, has_run=True)
            self.trials.discard(choice)

    def forget(self, choice: RequestId) -> None:
        self._choices.pop(choice, None)
        self.trials.discard(choice)

    def left(self, choice: RequestId, still: tuple[WorkerKey, ...] = (), *, failed: WorkerKey | None = None) -> None:
        """Record that a worker refused it or `failed` without dying, which proves nothing. It is `still` on these
        workers."""
        if (tracked := self._choices.get(choice)) is not None:
            if failed is not None and tracked.unproven:
                tracked.failed |= {failed}
            tracked.remain(still)

    def lost(self, choice: RequestId, worker: WorkerKey, now_s: float, still: tuple[WorkerKey, ...] = ()) -> bool:
        """Record that its worker was lost while it is `still` on these; return whether that condemns it."""
        fallen = self._fall(worker, now_s)
        tracked = self._choices.setdefault(choice, _TrackedChoice())
        tracked.met.append(fallen)
        self._judge(choice, tracked)
        if tracked.suspect:
            self.trials.add(choice)
        tracked.failed -= {worker}
        tracked.remain(still)
        return self.condemns(choice, now_s)

    def condemns(self, choice: RequestId, now_s: float) -> bool:
        """Whether its losses have turned out to condemn it. It is forgotten then."""
        tracked = self._choices.get(choice)
        if tracked is None or not tracked.accused or self.is_in_doubt(choice, now_s):
            return False
        self.forget(choice)
        return True

    def is_in_doubt(self, choice: RequestId, now_s: float) -> bool:
        """Whether it is condemned unless a worker comes back, and one still may."""
        tracked = self._choices.get(choice)
        return tracked is not None and tracked.accused and any(self._may_return(one, now_s) for one in tracked.met)

    def returned(self, live: Collection[WorkerKey], now_s: float) -> None:
        """Set the live workers: a lost worker that soon reappears among them had only lost its session."""
        for fallen in [one for one in self._fallen if not one.is_back and one.key in live]:
            fallen.is_back = True
            if self._may_return(fallen, now_s):
                self._fallen.remove(fallen)
                self._acquit_of(fallen)

    def avoid(self, choice: RequestId) -> set[WorkerKey]:
        """Return workers to avoid for it if there are others."""
        if not self.trials:
            return set()
        if choice in self.trials:
            return self._unproven_elsewhere(choice)
        return {key for one in self.trials if one in self._choices for key in self._choices[one].reserved}

    def must_wait(self, choice: RequestId, live: Callable[[], Iterable[WorkerKey]], now_s: float) -> bool:
        """Whether a suspect must wait for a worker of its own (one is kept free for it for a while), or is in doubt.

        Or whether it is in doubt.
        """
        if choice not in self.trials or (tracked := self._choices.get(choice)) is None:
            return False
        if self.is_in_doubt(choice, now_s):
            return True
        workers = list(live())
        taken = self._unproven_elsewhere(choice)
        if not workers or any(key not in taken for key in workers):
            tracked.reserved, tracked.waits_since_s = (), None
            return False
        if tracked.waits_since_s is None:
            tracked.waits_since_s = now_s
        if not set(tracked.reserved) & set(workers):
            others = {key for one in self.trials if one in self._choices for key in self._choices[one].reserved}
            free = [key for key in workers if key not in others] or workers
            tracked.reserved = (min(free, key=self._num_unproven),)
        return now_s - tracked.waits_since_s < _ISOLATION_S

    def condemn(self, num_tokens: int, digest: bytes, now_s: float) -> None:
        """Refuse requests equal to this one, by prompt length and digest, for a while."""
        self.num_condemned += 1
        self.condemned[num_tokens, digest] = now_s + self._remembered_s

    def is_condemned(self, num_tokens: int, digest: Callable[[], bytes], now_s: float) -> bool:
        """Whether an equal request was condemned recently. `digest` is computed only if a prompt of this length was."""
        self.condemned = {known: until_s for known, until_s in self.condemned.items() if until_s > now_s}
        found = any(num_tokens == known for known, _ in self.condemned) and (num_tokens, digest()) in self.condemned
        self.num_refused += found
        return found

    def _fall(self, worker: WorkerKey, now_s: float) -> _LostWorker:
        while self._fallen and now_s - self._fallen[0].at_s > self._remembered_s:
            self._fallen.popleft()
        for fallen in self._fallen:
            if fallen.key == worker and not fallen.is_back:
                return fallen
        there = (choice for choice, one in self._choices.items() if one.may_have_ended(worker))
        fallen = _LostWorker(key=worker, at_s=now_s, unproven=frozenset(there))
        self._fallen.append(fallen)
        return fallen

    def _may_return(self, fallen: _LostWorker, now_s: float) -> bool:
        return now_s - fallen.at_s < self._return_s

    def _acquit_of(self, fallen: _LostWorker) -> None:
        for choice, tracked in self._choices.items():
            if fallen in tracked.met:
                tracked.met.remove(fallen)
                self._judge(choice, tracked)
                if not tracked.suspect:
                    tracked.reserved = ()
                    self.trials.discard(choice)

    def _judge(self, choice: RequestId, tracked: _TrackedChoice) -> None:
        """Decide what follows from its losses."""
        met = tracked.met
        blamed = any(choice in one.unproven and len(one.unproven) <= MAX_SUSPECTS for one in met)
        tracked.suspect = blamed or len(met) > 1
        known = {one.key for one in met}
        benefit = any(other.key not in known for other in self._fallen) + tracked.has_run
        num_alone = sum(one.unproven == {choice} for one in met)
        is_last_alone = bool(met) and met[-1].unproven == {choice}
        tracked.accused = is_last_alone and len(met) >= 2 + benefit and num_alone >= 1 + benefit

    def _unproven_elsewhere(self, choice: RequestId) -> set[WorkerKey]:
        others = (one for other, one in self._choices.items() if other != choice and one.unproven)
        return {key for one in others for key in one.workers}

    def _num_unproven(self, key: WorkerKey) -> int:
        return sum(one.unproven and key in one.workers for one in self._choices.values())

    def check(self, known: Collection[RequestId]) -> bool:
        """Whether nothing is kept of choices that have ended; for tests."""
        return self._choices.keys() <= set(known) and self.trials <= set(known)
