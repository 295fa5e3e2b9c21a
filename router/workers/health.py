"""Health as dispatch sees it: circuit breakers of workers, and requests suspected of crashing them. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NoReturn

from router.types.requests import RoutedRequest
from router.types.stream_ids import request_digest
from router.types.worker_view import WorkerKey
from router.workers.poison_request import PoisonRequestTracker
from tandem.circuit_breaker import BreakerPolicy, BreakerState, CircuitBreaker
from tandem.errors import Unavailable
from tandem.values.ids import RequestId

PAUSE_S = 60.0
"""For how long a request that is judged to have crashed workers, and its like, are refused."""
_RETURN_S = 2.0
"""In which a worker that only lost its session is back: the first try comes after 0.1 s
(`router.fleet.connections`)."""


class WorkerBreakers:
    """The breakers of all workers that ever failed; the others' are closed.

    A full worker has not failed. A restarted worker is another one, with a breaker of its own.
    """

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self._policy = policy or BreakerPolicy()
        self._breakers: dict[WorkerKey, CircuitBreaker] = {}

    def closed_to(self, now_s: float) -> set[WorkerKey]:
        """Workers that get no request now."""
        return {key for key, breaker in self._breakers.items() if not breaker.allows(now_s)}

    def began(self, key: WorkerKey, now_s: float) -> None:
        """A request was sent there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.began(now_s)

    def succeeded(self, key: WorkerKey, now_s: float) -> None:
        """A token came from there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.succeeded(now_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """It failed on a request."""
        self._breakers.setdefault(key, CircuitBreaker(self._policy)).failed(now_s)

    def released(self, key: WorkerKey) -> None:
        """A request was taken back from there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.released()

    def keep(self, live: Collection[WorkerKey]) -> None:
        """Forget workers that are gone."""
        for key in self._breakers.keys() - set(live):
            del self._breakers[key]

    def states(self, now_s: float) -> Mapping[WorkerKey, BreakerState]:
        """Of workers that ever failed."""
        return {key: breaker.state(now_s) for key, breaker in self._breakers.items()}


class WorkerHealth:
    """Worker health of one router; choices report the outcomes of their attempts."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.breakers = WorkerBreakers()
        self.poison = PoisonRequestTracker(remembered_s=PAUSE_S, return_s=_RETURN_S)
        self._clock = clock

    def check(self, request: RoutedRequest) -> None:
        """Raises Unavailable for a request like one that crashed workers a short while ago."""
        if self.poison.is_condemned(len(request.prompt_token_ids), partial(_digest, request), self._clock()):
            raise Unavailable(
                "requests like this one have crashed workers; it is refused for a while", retry_after_s=PAUSE_S
            )

    def shunned(self, choice: RequestId) -> set[WorkerKey]:
        """Workers that get no request now, or not this one, as long as there are others."""
        return self.breakers.closed_to(self._clock()) | self.poison.avoid(choice)

    def must_wait(self, choice: RequestId, live: Callable[[], Iterable[WorkerKey]], request: RoutedRequest) -> bool:
        """Whether it must wait for isolation, or for a loss to be decided. Raises as `lost` once that condemns it."""
        now_s = self._clock()
        if self.poison.condemns(choice, now_s):
            self._condemn(request)
        return self.poison.must_wait(choice, live, now_s)

    def is_in_doubt(self, choice: RequestId) -> bool:
        """Whether it is not decided yet if the choice has crashed workers: no new attempt begins until then."""
        return self.poison.is_in_doubt(choice, self._clock())

    def placed(self, choice: RequestId, workers: tuple[WorkerKey, ...], *, beside: tuple[WorkerKey, ...] = ()) -> None:
        """An attempt was sent to these: who decodes it, and who computes its prompt; `beside` has another of it."""
        now_s = self._clock()
        for key in workers:
            self.breakers.began(key, now_s)
        self.poison.placed(choice, (*workers, *beside))

    def answered(self, choice: RequestId, workers: tuple[WorkerKey, ...]) -> None:
        """The first token of an attempt came."""
        now_s = self._clock()
        for key in workers:
            self.breakers.succeeded(key, now_s)
        self.poison.proven(choice)

    def failed(self, choice: RequestId, key: WorkerKey, *, still: tuple[WorkerKey, ...] = ()) -> None:
        """A worker failed on an attempt and lives; `still`: who has another attempt of the choice."""
        self.breakers.failed(key, self._clock())
        self.poison.left(choice, still, failed=key)

    def refused(self, choice: RequestId, key: WorkerKey, *, still: tuple[WorkerKey, ...] = ()) -> None:
        """A worker would not take an attempt, which is no fault of it."""
        self.breakers.released(key)
        self.poison.left(choice, still)

    def left(self, choice: RequestId, workers: tuple[WorkerKey, ...], *, still: tuple[WorkerKey, ...]) -> None:
        """One of its attempts was taken back from `workers`, and it is `still` on others."""
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
        """A worker was lost under an attempt. Raises Unavailable when the request is taken to be the cause."""
        if self.poison.lost(choice, key, self._clock(), still):
            self._condemn(request)

    def gone(self, choice: RequestId, workers: tuple[WorkerKey, ...] = ()) -> None:
        """Forget a choice that has ended; `workers`: those it was cancelled on."""
        for key in workers:
            self.breakers.released(key)
        self.poison.gone(choice)

    def _condemn(self, request: RoutedRequest) -> NoReturn:
        """Raise Unavailable, not InternalError: workers also crash of other causes, and then a retry is welcome."""
        self.poison.condemn(len(request.prompt_token_ids), _digest(request), self._clock())
        message = "two workers crashed while they computed this request alone; it is refused for a while"
        raise Unavailable(message, retry_after_s=PAUSE_S)


def _digest(request: RoutedRequest) -> bytes:
    """The seed is left out: a client that gives none gets another one each time."""
    return request_digest(request.prompt_token_ids, request.hash_root, request.num_choices)
