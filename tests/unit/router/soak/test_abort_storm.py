"""A storm of aborts leaves nothing behind, and the router as fast as before (docs/extend/incidents.md)."""

from random import Random

import pytest

from router.admission.cluster_capacity import CapacityPolicy
from router.admission.types import AdmissionEntry, AdmissionPolicy
from tests.support.router.overload_world import Served, World
from tests.support.router.whole_router import MAX_INFLIGHT, Fate, WholeRouter

ABORTED = 0.89
PATIENT = 10_000
STORM = (Fate.ANSWER, Fate.ANSWER, Fate.STOP_SHORT, Fate.HANG, Fate.FULL)
"""Outcomes of attempts; those that hang or stop short are aborted, sooner or later."""


async def storm(whole: WholeRouter, num_crowds: int) -> int:
    """Crowds of which a share leaves at random moments. Returns how many were not served."""
    rng = Random(9)
    whole.draw = lambda: rng.choice(STORM)

    def patience() -> int:
        return rng.randrange(12) if rng.random() < ABORTED else 60

    unserved = 0
    for _ in range(num_crowds):
        unserved += 2 * MAX_INFLIGHT - await whole.crowd(2 * MAX_INFLIGHT, patience)
        whole.now_s += 0.1
    whole.draw = lambda: Fate.ANSWER
    return unserved


async def test_abort_storm_leaves_no_state() -> None:
    whole = WholeRouter(3)
    unserved = await storm(whole, 8)
    assert unserved >= ABORTED * whole.num_requests
    assert whole.gate.admission.counts.num_turns < whole.num_requests, "some left while they waited for their turn"
    whole.assert_nothing_is_left()


async def turns_to_serve_crowd(whole: WholeRouter) -> int:
    """Turns until a crowd larger than the limit of running requests is served."""
    whole.rng = Random(5)
    assert await whole.crowd(4 * MAX_INFLIGHT, lambda: PATIENT) == 4 * MAX_INFLIGHT
    return whole.num_turns


async def test_abort_storm_does_not_slow_later_work() -> None:
    """Measured in turns of the event loop, the only time here."""
    calm, stormy = WholeRouter(3), WholeRouter(3)
    before = await turns_to_serve_crowd(calm)
    await storm(stormy, 8)
    assert await turns_to_serve_crowd(stormy) <= before / 0.95
    stormy.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", ["aborted", "refused for room"])
async def test_abort_storm_cancelled_probe_leaves_breaker_usable(outcome: str) -> None:
    """A cancelled probe proves nothing: the breaker lets the next one through at once."""
    whole = WholeRouter(3, num_decode=1, num_prefill=0)
    whole.draw = lambda: Fate.BROKEN
    health, (key,) = whole.dispatcher.health, (one.info.key for one in whole.workers)
    while not health.breakers.closed_to(whole.now_s):
        await whole.crowd(1, lambda: 20)
    whole.now_s += 60.0
    whole.draw = lambda: Fate.HANG if outcome == "aborted" else Fate.FULL
    await whole.crowd(1, lambda: 3)
    assert health.breakers.closed_to(whole.now_s) == set()
    whole.draw = lambda: Fate.ANSWER
    assert await whole.crowd(1, lambda: PATIENT) == 1
    assert health.breakers.states(whole.now_s)[key].value == "closed"
    whole.assert_nothing_is_left()


class LeavingWorld(World):
    """Clients may leave; the worker then still computes the prompt to its end."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._left: set[AdmissionEntry] = set()
        self.first_tokens_s: list[float] = []

    def leaves(self, served: Served, when_s: float) -> None:
        """Its client leaves then, unless it has been answered or refused."""

        def go() -> None:
            entry = next((entry for entry, one in self._requests.items() if one is served), None)
            if entry is not None:
                del self._requests[entry]
                self._left.add(entry)
                self.admission.end(entry)
                self._pump()

        self.at(when_s, go)

    def _first(self, worker, entry) -> None:
        if entry in self._left:
            worker.backlog -= entry.ticket.num_tokens
            worker.active -= 1
            self._pump()
            return
        self.first_tokens_s.append(self.now_s)
        super()._first(worker, entry)

    def _end(self, worker, entry) -> None:
        if entry in self._left:
            worker.active -= 1
            self._pump()
            return
        super()._end(worker, entry)


STORM_S = 10.0
RECOVERS_S = 5.0
WATCHED_S = 15.0
RATE = 18.0
"""Requests a second of 100 tokens: nine tenths of what two workers of 1,000 tokens a second compute."""


def num_served_after_storm(*, stormy: bool) -> int:
    """First tokens in the seconds from `RECOVERS_S` after a storm, or after as much calm."""
    policy = AdmissionPolicy(max_queue_s=2.0, room=CapacityPolicy(worker_backlog_s=0.25, max_running_per_worker=32))
    world, rng = LeavingWorld(policy=policy), Random(4)
    now_s = 0.0
    while now_s < STORM_S + RECOVERS_S + WATCHED_S:
        now_s += rng.expovariate(RATE)
        world.ask(Served("steady", 100, 10, now_s))
    now_s = 0.0
    while stormy and now_s < STORM_S:
        now_s += rng.expovariate(10 * RATE)
        one = Served(rng.choice("ab"), 100, 10, now_s)
        world.ask(one)
        if rng.random() < ABORTED:
            world.leaves(one, now_s + rng.uniform(0.0, 0.5))
    begins_s = STORM_S + RECOVERS_S
    world.run(begins_s + WATCHED_S)
    return sum(begins_s <= at_s < begins_s + WATCHED_S for at_s in world.first_tokens_s)


def test_abort_storm_throughput_recovers_in_five_seconds() -> None:
    calm = num_served_after_storm(stormy=False)
    assert calm > 0.8 * RATE * WATCHED_S, "the load that is compared is served"
    assert num_served_after_storm(stormy=True) >= 0.95 * calm
