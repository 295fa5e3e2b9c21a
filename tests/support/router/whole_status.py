"""The status of a whole router that is in this process, with workers that a test moves."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from router.api.request.client_request import ModelInfo
from router.api.request_meter import RequestMeter
from router.status.feed import StatusFeed
from router.status.snapshot.part import StatusSources
from router.types.requests import ChoiceFinish
from tandem.values.outputs import FinishReason, PhaseTimes
from tests.support.router.whole_router import WholeRouter

MODEL = ModelInfo(
    name="toy", fingerprint="f", max_model_len=512, vocab_size=999, eos_token_ids=frozenset(), created_s=0
)


def sources_of(whole: WholeRouter) -> StatusSources:
    return StatusSources(
        model=MODEL,
        placer=whole.dispatcher.placer,
        health=whole.dispatcher.health,
        admission=whole.gate.admission,
        metrics=whole.metrics,
        decisions=whole.decisions,
        not_ready_reason=whole.readiness.not_ready_reason,
        clock=whole.clock,
    )


def feed_of(whole: WholeRouter, *, others: Callable[[], Awaitable[list[bytes]]] | None = None) -> StatusFeed:
    feed = StatusFeed(sources_of(whole), wall_clock=lambda: 1_000.5)
    if others is not None:
        feed.merge_with(others)
    return feed


async def status_of(feed: StatusFeed, tenant: str = "a") -> dict[str, Any]:
    return dict(orjson.loads(await feed.snapshot(tenant)))


def answer(whole: WholeRouter, *, ttft_s: float, itl_s: float, tokens: int) -> None:
    """As a server would count it."""
    with RequestMeter(whole.metrics, whole.clock, prompt_tokens=40, choices=1) as meter:
        whole.now_s += ttft_s
        meter.tokens(0, 1)
        for _ in range(tokens - 1):
            whole.now_s += itl_s
            meter.tokens(0, 1)
        meter.choice_finished(0, ChoiceFinish(reason=FinishReason.STOP, cached_tokens=30, times=PhaseTimes()))
        meter.succeeded()
