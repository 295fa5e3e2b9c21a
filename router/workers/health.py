"""Worker health as dispatch sees it: circuit breakers, and requests suspected of crashing workers. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NoReturn

from router.types.request_digest import request_digest
from router.types.requests import RoutedRequest
from router.types.worker_view import WorkerKey
from router.workers.poison_request import PoisonRequestTracker
from tandem.circuit_breaker import BreakerPolicy, BreakerState, CircuitBreaker
from tandem.errors import Unavailable
from tandem.values.ids import RequestId

PAUSE_S = 60.0
"""Time for which a request judged to have crashed workers, and requests equal to it, are refused."""
_RETURN_S = 2.0
"""Seconds within which a worker that only lost its session reconnects: the first try comes after 0.1 s
(`router.fleet.connections`)."""


class WorkerBreakers:
    """The circuit breakers of all workers that ever failed; all others are closed.

    A full worker has not failed. A restarted worker is a new one, with its own breaker.
    """

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self._policy = policy or BreakerPolicy()
        self.by_worker: dict[WorkerKey, CircuitBreaker] = {}
        """The breakers of workers that ever failed; mostly there are none, and nothing is to be recorded."""

    def closed_to(self, now_s: float) -> set[WorkerKey]:
        """Return the workers that get no requests now."""
        return {key for key, breaker in self.by_worker.items() if not breaker.allows(now_s)}

    def began(self, key: WorkerKey, now_s: float) -> None:
        """Record a request sent to a worker."""
        if (breaker := self.by_worker.get(key)) is not None:
            breaker.began(now_s)

    def succeeded(self, key: WorkerKey, now_s: float) -> None:
        """Record a token from a worker."""
        if (breaker := self.by_worker.get(key)) is not None:
            breaker.succeeded(now_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """Record that a worker failed on a request."""
        self.by_worker.setdefault(key, CircuitBreaker(self._policy)).failed(now_s)

    def released(self, key: WorkerKey) -> None:
        """Record that a request was withdrawn from a worker."""
        if (breaker := self.by_worker.get(key)) is not None:
            breaker.released()

    def keep(self, live: Collection[WorkerKey]) -> None:
        """Forget workers that are gone."""
        for key in self.by_worker.keys() - set(live):
            del self.by_worker[key]

    def states(self, now_s: float) -> Mapping[WorkerKey, BreakerState]:
        """Return the states of workers that ever failed."""
        return {key: breaker.state(now_s) for key, breaker in self.by_worker.items()}


class WorkerHealth:
    """Worker health of one router; choices report the outcomes of their attempts."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.breakers = WorkerBreakers()
        self.poison = PoisonRequestTracker(remembered_s=PAUSE_S, return_s=_RETURN_S)
        self._clock = clock

    def check(self, request: RoutedRequest) -> None:
        """Check a request against those judged to crash workers. Raises Unavailable for one that equals a recent
        one."""
        if self.poison.condemned and self.poison.is_condemned(
            len(request.prompt_token_ids), partial(_digest, request), self._clock()
        ):
            raise Unavailable(
                "requests like this one have crashed workers; they are refused for a while", retry_after_s=PAUSE_S
            )

    def avoided(self, choice: RequestId) -> set[WorkerKey]:
        """Return workers that get no requests now, or should not get this one, as long as there are others."""
        if not self.breakers.by_worker and not self.poison.trials:
            return set()
        return self.breakers.closed_to(self._clock()) | self.poison.avoid(choice)

    def must_wait(self, choice: RequestId, live: Callable[[], Iterable[WorkerKey]], request: RoutedRequest) -> bool:
        """Whether it must wait for isolation, or for a loss to be judged. Raises as `lost` once judged to crash
        workers."""
        # A choice that is accused is also in trial.
        if not self.poison.trials:
            return False
        now_s = self._clock()
        if self.poison.condemns(choice, now_s):
            self._condemn(request)
        return self.poison.must_wait(choice, live, now_s)

    def is_in_doubt(self, choice: RequestId) -> bool:
        """Whether it is still undecided if the choice has crashed workers: no new attempt begins until then."""
        return self.poison.is_in_doubt(choice, self._clock())

    def placed(self, choice: RequestId, workers: tuple[WorkerKey, ...], *, beside: tuple[WorkerKey, ...] = ()) -> None:
        """Record that an attempt was sent to decode and prefill `workers`; `beside` run another attempt of the
        choice."""
        if self.breakers.by_worker:
            now_s = self._clock()
            for key in workers:
                self.breakers.began(key, now_s)
        self.poison.placed(choice, (*workers, *beside))

    def answered(self, choice: RequestId, workers: tuple[WorkerKey, ...]) -> None:
        """Record the first token of an attempt."""
        if self.breakers.by_worker:
            now_s = self._clock()
            for key in workers:
                self.breakers.succeeded(key, now_s)
        self.poison.proven(choice)

    def failed(self, choice: RequestId, key: WorkerKey, *, still: tuple[WorkerKey, ...] = ()) -> None:
        """Record that a live worker failed on an attempt; `still`: workers that run another attempt of the choice."""
        self.breakers.failed(key, self._clock())
        self.poison.left(choice, still, failed=key)

    def refused(self, choice: RequestId, key: WorkerKey, *, still: tuple[WorkerKey, ...] = ()) -> None:
        """Record that a worker refused an attempt, which does not count against it."""
        self.breakers.released(key)
        self.poison.left(choice, still)

    def left(self, choice: RequestId, workers: tuple[WorkerKey, ...], *, still: tuple[WorkerKey, ...]) -> None:
        """Record that an attempt was withdrawn from `workers`, while the choice is `still` on others."""
        for key in workers:
            self.breakers.released(key)
        self.poison.left(choice, still)

    def keep(self, live: Collection[WorkerKey]) -> None:
        """Set the live workers. Breakers of others are forgotten; a lost worker that is back soon did not crash."""
        self.breakers.keep(live)
        self.poison.returned(live, self._clock())

    def lost(
        self, choice: RequestId, key: WorkerKey, request: RoutedRequest, *, still: tuple[WorkerKey, ...] = ()
    ) -> None:
        """Record a worker's loss during an attempt. Raises Unavailable when the request is judged to be the cause."""
        if self.poison.lost(choice, key, self._clock(), still):
            self._condemn(request)

    def forget(self, choice: RequestId, workers: tuple[WorkerKey, ...] = ()) -> None:
        """Forget a choice that has ended; `workers`: those on which it was cancelled."""
        for key in workers:
            self.breakers.released(key)
        self.poison.forget(choice)

    def _condemn(self, request: RoutedRequest) -> NoReturn:
        """Raise Unavailable rather than InternalError: workers also crash for other causes, and then a retry is
        welcome."""
        self.poison.condemn(len(request.prompt_token_ids), _digest(request), self._clock())
        message = "two workers crashed while computing only this request; it is refused for a while"
        raise Unavailable(message, retry_after_s=PAUSE_S)


def _digest(request: RoutedRequest) -> bytes:
    """Return a digest without the seed: a client that gives none gets a different one each time."""
    return request_digest(request.prompt_token_ids, request.hash_root, request.num_choices)
