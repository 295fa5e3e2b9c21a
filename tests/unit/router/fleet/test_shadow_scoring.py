"""Both pools score clients' answers, and metrics compare what they think of them."""

from random import Random

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from router.fleet.shadow_scoring import ShadowScoring
from router.types.requests import MAX_PRIORITY, ResumePoint
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.values.block_hash import root_hash
from tandem.values.ids import Incarnation
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tests.support.fake_worker import SECRET, FakeWorker
from tests.support.router.cluster import PROMPT, Cluster, cluster, collect, routed

ROOT = root_hash(secret=SECRET, model_fingerprint="model-a", salt="shadow")


class Shadow:
    """Scoring over a router, and what it exports."""

    def __init__(self, router: Cluster, share: float = 1.0) -> None:
        self.scoring = ShadowScoring(router.registry, router.dispatcher, share=share, hash_root=ROOT, rng=Random(0))
        self.registry = CollectorRegistry()
        self.registry.register(self.scoring)

    def figure(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tandem_shadow_{name}_total", labels)

    def answers(self) -> dict[str, float | None]:
        return {outcome: self.figure("answers", outcome=outcome) for outcome in ("compared", "failed", "skipped")}


def _pools() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)


async def test_shadow_scoring_compares_both_pools_on_the_answers_tokens() -> None:
    decode, prefill = _pools()
    decode.scoring_script = lambda scoring: scoring.give(scale=1.5)
    async with cluster(decode, prefill) as router:
        shadow = Shadow(router)
        router.dispatcher.on_answer = shadow.scoring.on_answer
        answer = (await collect(router.dispatcher.generate(routed(max_tokens=8))))[0]
        await shadow.scoring.probe_due()
        assert shadow.answers() == {"compared": 1.0, "failed": 0.0, "skipped": 0.0}
        assert shadow.figure("tokens") == shadow.figure("agreeing_tokens") == 8.0
        assert shadow.figure("loss_nats", role="prefill") == sum(answer)
        assert shadow.figure("loss_nats", role="decode") == 1.5 * sum(answer)
        assert shadow.figure("greedy_tokens") == 0.0, "it was sampled"
        for one in (decode, prefill):
            order = one.scorings.get_nowait().order
            assert list(order.prompt_token_ids) == [*PROMPT, *answer]
            assert (order.hash_root, order.num_top, order.priority) == (ROOT, 1, MAX_PRIORITY)
        await shadow.scoring.probe_due()
        assert decode.scorings.empty(), "each answer once"
        router.assert_idle()


async def test_shadow_scoring_counts_tokens_that_pools_disagree_about() -> None:
    decode, prefill = _pools()
    decode.scoring_script = lambda scoring: scoring.give(first_top=5)
    async with cluster(decode, prefill) as router:
        shadow = Shadow(router)
        shadow.scoring.on_answer(routed(), [7, 8, 9])
        await shadow.scoring.probe_due()
        assert (shadow.figure("tokens"), shadow.figure("agreeing_tokens")) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "num_greedy"),
    [
        ({"temperature": 0.0}, 3.0),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0.0, "presence_penalty": 0.5}, 0.0),
        ({"temperature": 0.0, "grammar": "start: /a/"}, 0.0),
        ({"temperature": 0.0, "min_tokens": 2}, 0.0),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0.0),
    ],
)
async def test_shadow_scoring_judges_decoding_by_what_it_took_for_likeliest(
    changes: dict[str, object], num_greedy: float
) -> None:
    decode, prefill = _pools()
    prefill.scoring_script = lambda scoring: scoring.give(rank=1)
    async with cluster(decode, prefill) as router:
        shadow = Shadow(router)
        request = replace(routed(), sampling=SamplingParams(**changes))
        shadow.scoring.on_answer(request, [7, 8, 9])
        await shadow.scoring.probe_due()
        assert shadow.figure("greedy_tokens") == shadow.figure("greedy_agreeing_tokens") == num_greedy


async def test_shadow_scoring_of_a_refusing_or_absent_pool_fails_and_goes_on() -> None:
    decode, prefill = _pools()
    prefill.scoring_script = lambda scoring: scoring.refuse("Overloaded")
    async with cluster(decode, prefill) as router:
        shadow = Shadow(router)
        shadow.scoring.on_answer(routed(), [7])
        await shadow.scoring.probe_due()
        await prefill.crash()
        await router.registry.until_live(1)
        shadow.scoring.on_answer(routed(), [7])
        await shadow.scoring.probe_due()
        assert shadow.answers() == {"compared": 0.0, "failed": 2.0, "skipped": 0.0}
        assert shadow.figure("tokens") == 0.0


async def test_shadow_scoring_keeps_few_answers_and_a_share_of_them() -> None:
    async with cluster(*_pools()) as router:
        shadow, half, none = (Shadow(router, share) for share in (1.0, 0.5, 0.0))
        for one in (shadow, half, none):
            one.scoring.on_answer(routed(), [])
            for _ in range(12):
                one.scoring.on_answer(routed(), [7])
            await one.scoring.probe_due()
        assert shadow.answers() == {"compared": 8.0, "failed": 0.0, "skipped": 4.0}
        assert 2.0 <= half.figure("tokens") <= 8.0
        assert set(none.answers().values()) == {0.0}


async def test_shadow_scoring_gets_no_probes_and_no_continued_streams() -> None:
    decode, prefill = _pools()
    async with cluster(decode, prefill) as router:
        seen: list[object] = []
        router.dispatcher.on_answer = lambda request, token_ids: seen.append((request.request_id, token_ids))
        (key,) = (one.info.key for one in router.registry.snapshots() if one.info.role is WorkerRole.DECODE)
        await collect(router.dispatcher.generate(replace(routed(request_id="probe"), only_worker=key)))
        point = ResumePoint(worker=Incarnation(99), num_tokens=2)
        await collect(router.dispatcher.generate(replace(routed(request_id="again"), resume=(point,))))
        answer = await collect(router.dispatcher.generate(routed(request_id="r")))
        assert seen == [("r", answer[0])]


def test_shadow_share_needs_a_prefill_pool() -> None:
    with pytest.raises(
        ConfigError, match=r"router\.quality\.shadow_share compares the pools and needs prefill\.replicas"
    ):
        load(None, {"router.quality.shadow_share": 0.1, "prefill.replicas": 0})
