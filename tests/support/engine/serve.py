"""A whole engine with its thread over a small real model, run to the end of some requests."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from engine.engine import Engine
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from engine.types.request import FinishReason, Request, SampledToken
from engine.types.step_output import StepOutput
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import random_tokens

WAIT_S = 60.0


def every_way_to_sample(rng: Random, count: int) -> list[Request]:
    """Every way to sample that looks at what was sampled before, or at how much."""
    found = []
    for i in range(count):
        prompt = random_tokens(rng, rng.choice([3, 17, 33, 40]))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 45),
            min_tokens=rng.choice([0, 0, 1]),
            temperature=rng.choice([0.0, 0.0, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.8]),
            logit_bias=rng.choice([{}, {5: 2.0, 7: -100.0}]),
            stop_token_ids=tuple(rng.sample(range(3, 97), rng.choice([0, 8]))),
            num_logprobs=rng.choice([None, 0, 3]),
            seed=i,
        )
        found += [ledger.request(prompt, params=params, arrival_s=float(i)) for _ in range(rng.choice([1, 1, 3]))]
    return found


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one request received."""

    tokens: list[SampledToken] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Serve:
    """One engine; a context manager that ends its thread."""

    def __init__(self, model: Decoder, *, pipelined: bool, graphs: bool = False, **limits: Any) -> None:
        config = ledger.config(**{"max_model_len": 120, "eos_token_ids": frozenset({2})} | limits)
        layout = kv_layout(
            model.config, fingerprint=model.fingerprint, dtype=str(model.dtype)[6:], block_size=config.block_size
        )
        cache = PagedKVCache(layout, num_blocks=config.num_blocks, device=model.device)
        self.runner = ModelRunner(model, cache)
        if graphs:
            self.runner.record_graphs(
                max_rows=config.max_running_requests,
                max_tokens=config.max_batched_tokens,
                max_length=config.max_model_len,
            )
        self.scheduler = Scheduler(config, BlockHasher(ledger.SECRET))
        self.preemptions = 0
        self._answers: dict[RequestId, Answer] = {}
        self._left = 0
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.engine = Engine(
            scheduler=self.scheduler,
            runner=self.runner,
            on_step=self._on_step,
            on_fatal=self._on_fatal,
            pipelined=pipelined,
        )

    def __enter__(self) -> "Serve":
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.stop(WAIT_S)

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """All at once; their answers in order. What ended the engine is raised here."""
        self._over.clear()

        def add(scheduler: Scheduler) -> None:
            self._left = len(requests)
            for request in requests:
                self._answers[request.request_id] = Answer()
                scheduler.add(request)

        self.engine.call(add).result(WAIT_S)
        assert self._over.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        # After the last answer a step may still be under way, for nobody.
        self.engine.call(lambda scheduler: scheduler.check_invariants()).result(WAIT_S)
        return [self._answers[request.request_id] for request in requests]

    def _on_step(self, output: StepOutput) -> None:
        self.preemptions += len(output.preemptions)
        for event in output.events:
            answer = self._answers[event.request_id]
            if event.token is not None:
                answer.tokens.append(event.token)
            if event.finish_reason is not None:
                assert answer.reason is None
                answer.reason = event.finish_reason
                self._left -= 1
        if not self._left:
            self._over.set()

    def _on_fatal(self, error: BaseException) -> None:
        self._error = error
        self._over.set()
