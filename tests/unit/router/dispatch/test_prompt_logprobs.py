"""Which worker scores a prompt, and retries when it refuses, dies or is given up."""

import asyncio

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.placement.worker_selection import choose_scoring_worker
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import BeamSearchParams, RoutedRequest
from tandem.errors import DeadlineExceeded, InternalError, InvariantError, Overloaded, ServingError, Unavailable
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, ScoringAttempt, expected_tokens
from tests.support.router.cluster import PROMPT, Cluster, cluster, collect, routed
from tests.support.router.delta_readers import QuickReader
from tests.support.router.worker_views import worker

WAIT_S = 20.0
SCORES = PromptScoringRequest(num_top=2)


def scoring_request(ask: PromptScoringRequest = SCORES, **fields: object) -> RoutedRequest:
    return replace(routed(), scoring=ask, **fields)


async def run(router: Cluster, request: RoutedRequest) -> tuple[ScoredPrompt, QuickReader]:
    reader = QuickReader()
    async with asyncio.timeout(WAIT_S):
        await router.dispatcher.run(request, reader)
    first = reader.taken[0].scored
    assert first is not None
    assert all(delta.scored is None for delta in reader.taken[1:])
    return first, reader


def assert_whole(scored: ScoredPrompt) -> None:
    assert list(scored.logprobs) == [-float(token) for token in PROMPT[1:]]
    assert list(scored.ranks) == list(range(1, len(PROMPT)))
    assert [scored.top(i) for i in range(len(scored))] == [[(0, 0.0), (1, -1.0)]] * (len(PROMPT) - 1)


def prefill(name: str, script: object = None) -> FakeWorker:
    made = FakeWorker(name, role=WorkerRole.PREFILL)
    if script is not None:
        made.scoring_script = script
    return made


async def test_scoring_on_prefill_worker_precedes_answer() -> None:
    decode, scorer = FakeWorker("d0"), prefill("p0")
    async with cluster(decode, scorer) as router:
        scored, reader = await run(router, scoring_request())
        assert_whole(scored)
        assert reader.token_ids() == expected_tokens(PROMPT, count=8, seed=3)
        finish = reader.taken[-1].finish
        assert finish is not None
        assert (finish.cached_tokens, finish.times.prefill_s) == (0, 0.5), "computed for this request, in its time"
        order = (await scorer.scorings.get()).order
        assert (list(order.prompt_token_ids), order.num_top, decode.scorings.qsize()) == (list(PROMPT), 2, 0)
        router.assert_idle()


async def test_scoring_without_prefill_pool_uses_decode_worker() -> None:
    decode = FakeWorker("d0")
    async with cluster(decode) as router:
        scored, reader = await run(
            router, scoring_request(PromptScoringRequest(num_top=None, only=True), num_choices=2)
        )
        assert list(scored.mean) == [len(PROMPT), 3.0, 4.0]
        assert [(d.choice_index, d.finish.reason) for d in reader.taken[1:] if d.finish] == [
            (0, FinishReason.LENGTH),
            (1, FinishReason.LENGTH),
        ]
        assert decode.submissions.empty()
        router.assert_idle()


async def test_scores_in_parts_are_assembled() -> None:
    def in_parts(scoring: ScoringAttempt) -> None:
        scoring.give(0, 4)
        scoring.give(4, 5)
        scoring.give(5)

    async with cluster(FakeWorker("d0"), prefill("p0", in_parts)) as router:
        assert_whole((await run(router, scoring_request()))[0])


@pytest.mark.parametrize("code", ["Overloaded", "Unavailable", "InternalError"])
async def test_scoring_refused_by_worker_tries_another(code: str) -> None:
    async with cluster(FakeWorker("d0"), prefill("p0", lambda scoring: scoring.refuse(code)), prefill("p1")) as router:
        assert_whole((await run(router, scoring_request()))[0])
        router.assert_idle()


@pytest.mark.parametrize(
    ("code", "error", "asked_of"), [("Overloaded", Overloaded, 3), ("ContextLengthExceeded", ServingError, 1)]
)
async def test_scoring_refused_by_all_raises_last_refusal(code: str, error: type[ServingError], asked_of: int) -> None:
    workers = [prefill("p0"), prefill("p1"), FakeWorker("d0")]
    for one in workers:
        one.scoring_script = lambda scoring: scoring.refuse(code)
    async with cluster(*workers) as router:
        with pytest.raises(error):
            await run(router, scoring_request())
        assert sum(one.scorings.qsize() for one in workers) == asked_of
        router.assert_idle()


async def test_scoring_gives_up_after_two_lost_workers() -> None:
    readers = [prefill(f"p{i}", lambda _: None) for i in range(2)]
    decode = FakeWorker("d0")
    async with cluster(decode, *readers) as router:
        task = asyncio.create_task(run(router, scoring_request()))
        for _ in range(2):
            arrivals = [asyncio.create_task(one.scorings.get()) for one in readers]
            done, pending = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
            for other in pending:
                other.cancel()
            (which,) = [one for one, arrival in zip(readers, arrivals, strict=True) if arrival in done]
            readers.remove(which)
            await which.crash()
        with pytest.raises(Unavailable, match="two workers"):
            await task
        assert decode.scorings.empty()
        router.assert_idle()


async def test_scoring_waits_for_returning_worker() -> None:
    decode, scorer = FakeWorker("d0"), prefill("p0", lambda _: None)
    async with cluster(decode, scorer) as router:
        decode.scoring_script = lambda _: None
        task = asyncio.create_task(run(router, scoring_request()))
        await asyncio.wait_for(scorer.scorings.get(), WAIT_S)
        await scorer.crash()
        await asyncio.wait_for(decode.scorings.get(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        router.assert_idle()
    alone = FakeWorker("d0")
    async with cluster(alone, settings=DispatchSettings(rejoin_s=WAIT_S)) as router:
        await alone.crash()
        await router.registry.until_live(0)
        task = asyncio.create_task(run(router, scoring_request()))
        await asyncio.sleep(0)
        await alone.start()
        assert_whole((await task)[0])


async def test_scoring_retries_only_worker_in_new_session() -> None:
    """The same process after a freeze or a network loss."""
    alone = FakeWorker("d0")
    alone.scoring_script = lambda _: None
    async with cluster(alone) as router:
        task = asyncio.create_task(run(router, scoring_request()))
        await asyncio.wait_for(alone.scorings.get(), WAIT_S)
        await alone.crash()
        await router.registry.until_live(0)
        alone.scoring_script = ScoringAttempt.give
        await alone.start()
        assert_whole((await task)[0])
        router.assert_idle()


async def test_scoring_abandoned_is_cancelled_on_worker() -> None:
    slow = prefill("p0", lambda _: None)
    async with cluster(FakeWorker("d0"), slow) as router:
        task = asyncio.create_task(run(router, scoring_request()))
        scoring = await asyncio.wait_for(slow.scorings.get(), WAIT_S)
        task.cancel()
        await asyncio.wait_for(scoring.cancelled.wait(), WAIT_S)
        await asyncio.gather(task, return_exceptions=True)
        now_s = router.dispatcher._context.clock()
        with pytest.raises(DeadlineExceeded):
            await run(router, scoring_request(deadline_s=now_s + 0.05))
        scoring = await asyncio.wait_for(slow.scorings.get(), WAIT_S)
        await asyncio.wait_for(scoring.cancelled.wait(), WAIT_S)
        router.assert_idle()


async def test_scoring_malformed_scores_raise_internal_error() -> None:
    async with cluster(FakeWorker("d0"), prefill("p0", lambda scoring: scoring.give(3))) as router:
        assert_whole((await run(router, scoring_request()))[0])
    lone = FakeWorker("d0")
    lone.scoring_script = lambda scoring: scoring.give(3)
    async with cluster(lone) as router:
        with pytest.raises(InternalError):
            await run(router, scoring_request())


async def test_generate_with_scoring_is_an_invariant_error() -> None:
    async with cluster(FakeWorker("d0")) as router:
        with pytest.raises(InvariantError):
            await collect(router.generate(scoring_request()))


def test_scoring_chooses_worker_done_first() -> None:
    idle, busy = worker("p0", backlog=10), worker("p1", backlog=1000)
    decode = worker("d0")
    everybody = [busy, idle, decode]

    def chosen(num_tokens: int = 100, **avoid: object) -> str | None:
        found = choose_scoring_worker(everybody, num_tokens, **{"excluded": (), "avoided": (), **avoid})
        return None if found is None else found.info.key.worker_id

    assert chosen() == "p0"
    assert chosen(avoided=[idle.info.key]) == "p1"
    assert chosen(excluded=[idle.info.key, busy.info.key]) == "d0"
    assert chosen(avoided=[one.info.key for one in everybody]) == "p0"
    assert chosen(excluded=[one.info.key for one in everybody]) is None
    assert chosen(num_tokens=10**6) is None
    assert choose_scoring_worker([replace(idle, draining=True)], 5, excluded=(), avoided=()) is None


async def test_beam_search_stays_on_one_worker_until_lost() -> None:
    """The most likely token is always its position; the second ends the answer."""
    asked_of: dict[str, list[int]] = {"p0": [], "p1": []}

    def follow(name: str) -> object:
        def answer(scoring: ScoringAttempt) -> None:
            length = len(scoring.order.prompt_token_ids) - len(PROMPT)
            asked_of[name].append(length)
            if len(asked_of[name]) > 3:
                workers[name].send(pb.WorkerMessage())  # what the protocol does not have ends the session
                return
            tops = [(length, -0.1), (900, -3.0), *((100 + i, -9.0 - i) for i in range(2))]
            assert scoring.order.num_next == len(tops)
            order = scoring.order
            part = pb.PromptScores(request_id=order.request_id, attempt=order.attempt)
            part.top_ids.extend(token for token, _ in tops)
            part.top_logprobs.extend(value for _, value in tops)
            cached = common.CachedTokens(prefill_pool=8 if length == 0 else 0)
            part.times.CopyFrom(common.PhaseTimes(prefill_s=0.25, cached=cached))
            workers[name].send(pb.WorkerMessage(prompt_scores=part))

        return answer

    workers = {name: prefill(name, follow(name)) for name in asked_of}
    async with cluster(FakeWorker("d0"), *workers.values()) as router:
        beams = BeamSearchParams(num_beams=2, end_ids=frozenset({900}), early_stopping="never", length_penalty=0.0)
        request = replace(routed(max_tokens=3, n=2), beams=beams)
        reader = QuickReader()
        async with asyncio.timeout(WAIT_S):
            await router.dispatcher.run(request, reader)
        assert [reader.token_ids(choice) for choice in (0, 1)] == [[0, 1, 2], [900]]
        finishes = [delta.finish for delta in reader.taken]
        assert [(f.reason, f.cached_tokens, f.times.prefill_s) for f in finishes if f] == [
            (FinishReason.LENGTH, 8, 0.25),
            (FinishReason.STOP, 8, 0.25),
        ]
        first, second = sorted(asked_of.values(), key=len, reverse=True)
        assert first[:4] == [0, 1, 1, 2], "the same worker goes on"
        assert second == [2, 2], "and another when it is lost"
        router.assert_idle()
