"""Runs a beam search over workers: each step requests the likeliest next tokens of every running beam at once.

All steps go to one worker as long as it answers: the beams' common prefix is in its cache, and they differ in at most
one block each. If it is lost, another worker recomputes only the prefix.
"""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from router.dispatch.choices.beam_search import Beam, BeamSearch
from router.dispatch.prompt_logprobs import PromptScorer
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import BeamSearchParams, ChoiceDelta, ChoiceFinish, DeltaSink, RoutedRequest
from router.types.worker_view import WorkerKey
from tandem.values.ids import RequestId
from tandem.values.outputs import FinishReason, SampledToken, TokenLogprob


class BeamRun:
    def __init__(
        self, scorer: PromptScorer, request: RoutedRequest, ask: BeamSearchParams, clock: Callable[[], float]
    ) -> None:
        self._scorer = scorer
        self._request = request
        self._next = PromptScoringRequest(num_top=ask.num_next, only=True, continues=True)
        self._search = BeamSearch(ask, max_tokens=request.sampling.max_tokens)
        self._clock = clock
        self._worker: WorkerKey | None = None
        self._num_steps = 0

    async def search(self, sink: DeltaSink, on_sent: Callable[[], None]) -> None:
        """Search, and send the best beams to `sink`. Raises as `PromptScorer.score`."""
        started_s, first, search = self._clock(), ScoredPrompt(), self._search
        num_computed = 0
        while not search.is_over:
            found = await self._step(on_sent)
            if not self._num_steps:
                first = found[0]
            num_computed += sum(scored.num_computed for scored in found)
            self._num_steps += 1
            self._worker = found[0].worker
            search.advance([self._tokens(scored) for scored in found])
        arrived_s = started_s if self._request.arrived_s is None else self._request.arrived_s
        finish = ChoiceFinish(
            reason=FinishReason.LENGTH,
            cached_tokens=first.times.cached.total,
            times=first.times._replace(
                router_queue_s=max(0.0, started_s - arrived_s),
                decode_s=max(0.0, self._clock() - started_s - first.times.total_s),
            ),
            computed_tokens=num_computed,
            needed_tokens=num_computed,
            prefilled_by=self._scorer.pool_of(first),
        )
        for index, ended in enumerate(search.ended[: self._request.num_choices]):
            sink.on_delta(ChoiceDelta(index, tokens=ended.beam.tokens, finish=replace(finish, reason=ended.reason)))
            # The first choice accounts for the tokens of all choices.
            finish = replace(finish, computed_tokens=0, needed_tokens=0)

    async def _step(self, on_sent: Callable[[], None]) -> list[ScoredPrompt]:
        """Return the likeliest next tokens of each running beam. The first error cancels the others."""
        running = enumerate(self._search.running)
        tasks = [asyncio.create_task(self._continue(index, beam, on_sent)) for index, beam in running]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _continue(self, index: int, beam: Beam, on_sent: Callable[[], None]) -> ScoredPrompt:
        request = self._request
        tokens = [token.token_id for token in beam.tokens]
        step = replace(
            request,
            request_id=RequestId(f"{request.request_id}/{self._num_steps}.{index}"),
            prompt_token_ids=(*request.prompt_token_ids, *tokens),
        )
        return await self._scorer.score(step, self._next, on_sent, prefer=self._worker)

    def _tokens(self, scored: ScoredPrompt) -> list[SampledToken]:
        num_logprobs = self._request.sampling.num_logprobs or 0
        places = scored.top(0)
        top = tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in places[:num_logprobs])
        return [SampledToken(token_id=token_id, logprob=value, top_logprobs=top) for token_id, value in places]
