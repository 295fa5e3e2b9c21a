"""Compares the two pools on what clients are answered: both score a share of the answers again, after they have ended.

So a prefill pool in bfloat16 judges a decode pool in four bits on its real traffic, and nobody waits for it.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet.probes import BackgroundProbe, PromptScoringRunner, ScoresSink
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import MAX_PRIORITY, RoutedRequest
from router.types.worker_view import WorkerKey
from router.workers.registry import WorkerRegistry
from tandem.errors import ServingError
from tandem.values.ids import BlockHash
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

SHADOW_SALT = "shadow"
_MOST_WAITING = 8
"""Answers that wait to be scored. More come only where the share is too large for what the workers can do beside."""
_INTERVAL_S = 0.2
_TIMEOUT_S = 60.0
_POOLS = (WorkerRole.PREFILL, WorkerRole.DECODE)
_log = logging.getLogger(__name__)


class _Answer(NamedTuple):
    prompt: Sequence[int]
    token_ids: Sequence[int]
    is_greedy: bool


class ShadowScoring(BackgroundProbe, Collector):
    """Draws answers, has a worker of each pool score them, and exports what both think of them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        generator: PromptScoringRunner,
        *,
        share: float,
        hash_root: BlockHash,
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share`: of the answers, 0 to 1. `hash_root` must be one that no client's request can have."""
        super().__init__(registry, "shadow", interval_s=_INTERVAL_S, clock=clock)
        self._generator = generator
        self._share = share
        self._hash_root = hash_root
        self._rng = rng
        self._waiting: deque[_Answer] = deque()
        self._outcomes: Counter[str] = Counter(compared=0, failed=0, skipped=0)
        self._nats = dict.fromkeys(_POOLS, 0.0)
        self._num_tokens = self._num_agreeing = 0
        self._num_greedy = self._num_greedy_agreeing = 0

    def on_answer(self, request: RoutedRequest, token_ids: Sequence[int]) -> None:
        """Draw from the answers that have ended: a client's request, and what its first choice was.

        Those of adapters are left out: all that is scored here shares one root of block names.
        """
        if not token_ids or request.adapter is not None or self._rng.random() >= self._share:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._outcomes["skipped"] += 1
            return
        self._waiting.append(_Answer(request.prompt_token_ids, tuple(token_ids), _is_plainly_greedy(request.sampling)))

    async def probe_due(self) -> None:
        """Have the answers scored that wait, one after another so as not to disturb serving."""
        while self._waiting:
            answer = self._waiting.popleft()
            scores = [await self._score(answer, role) for role in _POOLS]
            if None in scores:
                self._outcomes["failed"] += 1
            else:
                self._add(answer, *(one for one in scores if one is not None))

    def _add(self, answer: _Answer, shadow: ScoredPrompt, served: ScoredPrompt) -> None:
        """Count one answer; `shadow`: the scores of the prefill pool."""
        num_tokens = len(answer.token_ids)
        self._outcomes["compared"] += 1
        self._num_tokens += num_tokens
        for role, scored in zip(_POOLS, (shadow, served), strict=True):
            self._nats[role] -= sum(scored.logprobs[-num_tokens:])
        pairs = zip(shadow.top_ids[-num_tokens:], served.top_ids[-num_tokens:], strict=True)
        self._num_agreeing += sum(one == other for one, other in pairs)
        if answer.is_greedy:
            self._num_greedy += num_tokens
            self._num_greedy_agreeing += sum(map((1).__eq__, shadow.ranks[-num_tokens:]))

    async def _score(self, answer: _Answer, role: WorkerRole) -> ScoredPrompt | None:
        if (key := self._idlest(role)) is None:
            return None
        kept = ScoresSink()
        try:
            await self._generator.run(self._request(answer, key), kept)
        except ServingError as error:
            _log.info("worker %s did not score an answer: %s", key.worker_id, error.message)
        return kept.scored or None

    def _idlest(self, role: WorkerRole) -> WorkerKey | None:
        pool = [one for one in self._registry.snapshots() if one.info.role is role and not one.draining]
        return min(pool, key=lambda one: one.backlog_tokens).info.key if pool else None

    def _request(self, answer: _Answer, key: WorkerKey) -> RoutedRequest:
        return RoutedRequest(
            request_id=self._next_id(),
            prompt_token_ids=(*answer.prompt, *answer.token_ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            hash_root=self._hash_root,
            priority=MAX_PRIORITY,
            deadline_s=self._clock() + _TIMEOUT_S,
            only_worker=key,
            scoring=PromptScoringRequest(num_top=1, only=True),
        )

    def collect(self) -> Iterable[Metric]:
        answers = CounterMetricFamily(
            "tandem_shadow_answers",
            "Answers drawn to be scored by both pools, by outcome: compared, failed, skipped (too many waited)",
            labels=("outcome",),
        )
        for outcome, count in self._outcomes.items():
            answers.add_metric((outcome,), count)
        nats = CounterMetricFamily(
            "tandem_shadow_loss_nats",
            "Negative log probability of the compared answers' tokens, summed, by the pool that scored them",
            labels=("role",),
        )
        for role, total in self._nats.items():
            nats.add_metric((role.value,), total)
        yield answers
        yield nats
        for name, count, text in (
            ("tandem_shadow_tokens", self._num_tokens, "Tokens of the compared answers"),
            (
                "tandem_shadow_agreeing_tokens",
                self._num_agreeing,
                "Those in whose place both pools find the same token likeliest",
            ),
            ("tandem_shadow_greedy_tokens", self._num_greedy, "Tokens of compared answers that were sampled greedily"),
            (
                "tandem_shadow_greedy_agreeing_tokens",
                self._num_greedy_agreeing,
                "Those that the prefill pool finds likeliest too: what decoding itself made of them",
            ),
        ):
            yield CounterMetricFamily(name, text, value=count)


def _is_plainly_greedy(sampling: SamplingParams) -> bool:
    """Whether each token was the likeliest one, with nothing that changes logits before."""
    changes = sampling.logit_bias or sampling.grammar or sampling.allowed_token_ids or sampling.bad_words
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return sampling.greedy and not changes and not sampling.min_tokens and penalties == (0.0, 0.0, 1.0)
