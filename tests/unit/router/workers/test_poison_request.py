"""Poison requests: condemned if alone at each crash, never for mere presence."""

from itertools import count
from random import Random

import pytest

from router.dispatch.choices.hedging import Hedging
from router.types.worker_view import WorkerKey
from router.workers.poison_request import MAX_SUSPECTS, PoisonRequestTracker
from tandem.values.ids import Incarnation, RequestId, WorkerId

P = RequestId("poison")


def key(name: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(incarnation))


A, B, C = key("a"), key("b"), key("c")


def names(number: int) -> list[RequestId]:
    return [RequestId(f"i{i}") for i in range(number)]


def test_poison_two_isolated_losses_condemn() -> None:
    book = PoisonRequestTracker()
    book.placed(P, (A,))
    assert not book.lost(P, A, 0.0)
    book.placed(P, (B,))
    assert book.lost(P, B, 1.0)
    assert book.check([])


def test_poison_token_between_losses_acquits() -> None:
    book = PoisonRequestTracker()
    for number in range(5):
        worker = key("w", number)
        book.placed(P, (worker,))
        book.proven(P)
        assert not book.lost(P, worker, float(number))


def test_poison_choice_with_token_needs_one_more_loss() -> None:
    book = PoisonRequestTracker()
    for number, condemned in enumerate((False, False, True)):
        worker = key("w", number)
        book.placed(P, (worker,))
        if number == 0:
            book.proven(P)
            book.left(P)
            book.placed(P, (worker,))
        assert book.lost(P, worker, float(number)) is condemned


def test_poison_bystanders_run_alone_and_are_acquitted() -> None:
    book = PoisonRequestTracker()
    others = names(3)
    for one in (P, *others):
        book.placed(one, (A,))
    for one in (P, *others):
        assert not book.lost(one, A, 0.0)
    book.placed(others[0], (B,))
    # The next request keeps away from there, and so do all others.
    assert book.avoid(others[1]) == {B}
    assert book.avoid(RequestId("new")) == {B}
    assert book.must_wait(others[1], lambda: [B], 0.0)
    assert not book.must_wait(others[1], lambda: [B, C], 0.0)
    book.proven(others[0])
    assert book.avoid(RequestId("new")) == set()
    book.placed(P, (B,))
    assert book.lost(P, B, 1.0)
    # Its neighbour had tokens by then.
    assert not book.lost(others[0], B, 1.0)
    for one in others[1:]:
        book.placed(one, (C,))
        book.proven(one)
        book.forget(one)
    book.forget(others[0])
    assert book.check([])


def test_poison_second_shared_loss_condemns_none() -> None:
    book = PoisonRequestTracker()
    stream, other = names(2)
    book.placed(stream, (A,))
    assert not book.lost(stream, A, 0.0)
    book.placed(stream, (B,))
    book.placed(other, (B,))
    assert not book.lost(stream, B, 1.0)
    assert not book.lost(other, B, 1.0)


def test_poison_unrelated_death_requires_one_more_loss() -> None:
    book = PoisonRequestTracker()
    book.placed(RequestId("x"), (C,))
    book.lost(RequestId("x"), C, 0.0)
    book.forget(RequestId("x"))
    for number, condemned in enumerate((False, False, True)):
        worker = key("w", number)
        book.placed(P, (worker,))
        assert book.lost(P, worker, 1.0 + number) is condemned
    late = RequestId("late")
    for number, condemned in enumerate((False, True)):
        worker = key("v", number)
        book.placed(late, (worker,))
        assert book.lost(late, worker, 100.0 + number) is condemned


def test_poison_established_streams_continue_at_once() -> None:
    book = PoisonRequestTracker()
    streams = names(32)
    for one in streams:
        book.placed(one, (A,))
        book.proven(one)
    for one in streams:
        assert not book.lost(one, A, 0.0)
        assert book.avoid(one) == set()
        book.placed(one, (B,))
        assert not book.must_wait(one, lambda: [B], 0.0)
    for one in streams:
        assert not book.lost(one, B, 1.0)
    # At the second loss without a token each goes alone.
    book.placed(streams[0], (C,))
    assert book.must_wait(streams[1], lambda: [C], 1.0)


def test_poison_many_choices_are_not_isolated() -> None:
    book = PoisonRequestTracker()
    crowd = names(MAX_SUSPECTS + 1)
    for one in crowd:
        book.placed(one, (A,))
    for one in crowd:
        book.lost(one, A, 0.0)
        book.placed(one, (B,))
    assert book.avoid(RequestId("new")) == set()


def test_poison_isolation_wait_is_bounded_and_repels_others() -> None:
    book = PoisonRequestTracker()
    other = RequestId("other")
    book.placed(P, (A,))
    book.lost(P, A, 0.0)
    book.placed(other, (B,))
    assert book.must_wait(P, lambda: [B], 0.0)
    assert book.avoid(RequestId("new")) == {B}
    assert not book.must_wait(P, lambda: [B], 2.0)
    assert not book.must_wait(P, lambda: [], 0.0)
    book.proven(other)
    assert not book.must_wait(P, lambda: [B], 0.1)


def test_poison_prompt_is_condemned_after_two_workers() -> None:
    book = PoisonRequestTracker()
    book.placed(P, (A, B))
    assert not book.lost(P, B, 0.0)
    book.placed(P, (A, C))
    assert book.lost(P, C, 1.0)


def test_poison_equal_request_is_refused_for_a_while() -> None:
    book, digests = PoisonRequestTracker(remembered_s=60.0), []

    def is_condemned(num_tokens: int, digest: bytes, now_s: float) -> bool:
        return book.is_condemned(num_tokens, lambda: digests.append(digest) or digest, now_s)

    assert not is_condemned(9, b"digest", 0.0)
    book.condemn(9, b"digest", 0.0)
    assert not is_condemned(8, b"digest", 59.0)
    # A digest of a long prompt takes long: those that cannot be the like of it are let through without.
    assert digests == []
    assert is_condemned(9, b"digest", 59.0)
    assert not is_condemned(9, b"other", 59.0)
    assert not is_condemned(9, b"digest", 61.0)
    assert digests == [b"digest", b"other"]
    assert (book.num_condemned, book.num_refused) == (1, 1)


@pytest.mark.parametrize("seed", range(6))
def test_poison_random_kills_condemn_none(seed: int) -> None:
    """Random kills under 32 streams, each with a token in nine of ten attempts before the next kill."""
    rng, book, numbers = Random(seed), PoisonRequestTracker(), count()
    live = [key(f"w{i}") for i in range(4)]
    on = {one: rng.choice(live) for one in names(32)}
    for one, worker in on.items():
        book.placed(one, (worker,))
        book.proven(one)
    for kill in range(200):
        now_s = 0.5 * kill
        for one in on:
            if rng.random() < 0.9:
                book.proven(one)
        victim = live.pop(rng.randrange(4))
        live.append(key(f"n{next(numbers)}"))
        for one in [one for one, worker in on.items() if worker == victim]:
            assert not book.lost(one, victim, now_s)
            free = [w for w in live if w not in book.avoid(one)] or live
            on[one] = rng.choice(free)
            book.placed(one, (on[one],))


def test_hedging_learns_quantile_and_respects_budget() -> None:
    hedging = Hedging(quantile=0.9, budget=0.25)
    assert hedging.delay_s is None
    for number in range(100):
        hedging.observe(number / 100)
    assert hedging.delay_s == pytest.approx(0.85, abs=0.07)
    assert not hedging.may_begin
    for _ in range(100):
        hedging.earn()
    while hedging.may_begin:
        hedging.began()
    hedging.won()
    assert (hedging.num_started, hedging.num_won) == (8, 1)


def test_poison_quick_reconnect_is_no_loss() -> None:
    book = PoisonRequestTracker(return_s=2.0)
    for now_s in (0.0, 1.0, 2.0):
        book.placed(P, (A,))
        assert not book.lost(P, A, now_s)
        book.returned({A}, now_s + 0.5)
        assert not book.is_in_doubt(P, now_s + 0.5)
        assert book.avoid(RequestId("new")) == set()
    book.forget(P)
    assert book.check([])


def test_poison_choice_in_doubt_waits() -> None:
    for comes_back in (True, False):
        book = PoisonRequestTracker(return_s=2.0)
        for worker, now_s in ((A, 0.0), (B, 1.0)):
            book.placed(P, (worker,))
            assert not book.lost(P, worker, now_s)
        assert book.must_wait(P, lambda: [C], 1.5)
        if comes_back:
            book.returned({B}, 1.5)
        assert not book.condemns(P, 1.5)
        assert book.must_wait(P, lambda: [C], 1.5) is not comes_back
        assert book.condemns(P, 3.0) is not comes_back


def test_poison_late_reconnect_counts_as_loss() -> None:
    book = PoisonRequestTracker(return_s=2.0)
    for now_s in (0.0, 10.0):
        book.placed(P, (A,))
        assert not book.lost(P, A, now_s)
        book.returned({A}, now_s + 3.0)
    assert book.condemns(P, 13.0)
