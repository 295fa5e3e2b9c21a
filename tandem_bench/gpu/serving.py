"""The engine alone in this process, with its real thread, over a Decoder that was not loaded from files.

`tandem_bench.engine.rig` does this from the cluster's configuration, whose libraries a GPU machine may lack.
"""

import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import torch

from engine.engine import Engine
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Request
from engine.types.step_output import StepOutput
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.errors import CannotMeasure

_SECRET = b"gpu-suite-gpu-suite"
_PATIENCE_S = 300.0
_KV_EVENTS = 65_536
BLOCK_SIZE = 16
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one engine."""

    num_blocks: int
    max_rows: int
    max_tokens: int
    """Maximum tokens computed in one step."""
    chunk_tokens: int
    max_model_len: int
    block_size: int = BLOCK_SIZE
    pipelined: bool = True
    """Whether a step is launched before the previous one has ended, as on a GPU."""
    graphs: bool = True
    """Whether steps are recorded at start, where the backend supports it, as on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, with the time of the engine's thread from one to the next."""

    num_requests: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Result of prompts that were submitted at once."""

    tokens: tuple[Tokens, ...]
    first_token_s: tuple[float, ...]
    """Times to first token per prompt, since the prompts were submitted."""
    end_s: float
    steps: tuple[Step, ...]
    num_cached_tokens: int

    def decode_step_s(self, num_requests: int) -> float:
        """Return the mean length of steps in which exactly so many requests got a token. CannotMeasure without any."""
        lengths = [s.seconds for s in self.steps if s.num_requests == s.num_tokens == num_requests]
        if not lengths:
            raise CannotMeasure(f"no step decoded {num_requests} requests and nothing else")
        return sum(lengths) / len(lengths)


class Serving:
    """Engine and its KV pool; a context manager that stops the engine's thread."""

    def __init__(self, model: Decoder, limits: Limits) -> None:
        layout = kv_layout(
            model.config,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            block_size=limits.block_size,
        )
        self._device = model.device
        cache = PagedKVCache(layout, num_blocks=limits.num_blocks, device=model.device)
        config = SchedulerConfig(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_batched_tokens=limits.max_tokens,
            prefill_chunk_tokens=limits.chunk_tokens,
            max_step_s=None,
            max_running_requests=limits.max_rows,
            max_waiting_requests=4096,
            kv_event_capacity=_KV_EVENTS,
            eos_token_ids=frozenset(model.config.eos_token_ids),
            eviction="lru",
            max_overtakes=0,
            priority_aging_s=None,
        )
        runner = ModelRunner(model, cache)
        if limits.graphs:
            runner.record_graphs(
                max_rows=limits.max_rows, max_tokens=limits.max_tokens, max_length=limits.max_model_len
            )
        self.has_graphs = runner.graphs is not None
        """Whether steps are replayed."""
        self._root = root_hash(secret=_SECRET, model_fingerprint=model.fingerprint)
        self._names = count()
        self._job: _Job | None = None
        self._error: BaseException | None = None
        self._engine = Engine(
            scheduler=Scheduler(config, BlockHasher(_SECRET)),
            runner=runner,
            on_step=self._on_step,
            on_fatal=self._on_fatal,
            clock=time.perf_counter,
            pipelined=limits.pipelined,
        )
        self._engine.start()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def run(self, prompts: Sequence[Tokens], num_tokens: int) -> Served:
        """Continue every prompt greedily by `num_tokens`. Raises what ended the engine."""
        requests = [self._request(prompt, num_tokens) for prompt in prompts]
        job = _Job([request.request_id for request in requests], num_tokens)
        self._job = job

        def hand_over(scheduler: Scheduler) -> None:
            job.begin()
            for request in requests:
                scheduler.add(request)

        self._engine.call(hand_over).result(_PATIENCE_S)
        is_over = job.is_over.wait(_PATIENCE_S)
        if self._error is not None:
            raise self._error
        if not is_over:
            raise CannotMeasure(f"the engine was silent for {_PATIENCE_S:.0f} s")
        self._job = None
        return job.served()

    def _request(self, prompt: Tokens, num_tokens: int) -> Request:
        return Request(
            request_id=RequestId(f"suite-{next(self._names)}"),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            hash_root=self._root,
            arrival_s=time.perf_counter(),
        )

    def _on_step(self, output: StepOutput) -> None:
        if self._job is not None:
            self._job.on_step(output, time.perf_counter())

    def _on_fatal(self, error: BaseException) -> None:
        self._error = error
        if self._job is not None:
            self._job.is_over.set()


class _Job:
    """State of a job, touched only by the engine's thread until `is_over`."""

    def __init__(self, names: list[RequestId], num_tokens: int) -> None:
        self.is_over = threading.Event()
        self._names = names
        self._num_missing = len(names) * num_tokens
        self._tokens: dict[RequestId, list[int]] = defaultdict(list)
        self._first_s: dict[RequestId, float] = {}
        self._cached: dict[RequestId, int] = {}
        self._steps: list[Step] = []
        self._started_s = self._told_s = 0.0

    def begin(self) -> None:
        """Start the clock as the prompts are submitted."""
        self._started_s = self._told_s = time.perf_counter()

    def on_step(self, output: StepOutput, now_s: float) -> None:
        """Record the events of one step."""
        if (timings := output.timings) is not None:
            seconds, self._told_s = now_s - self._told_s, now_s
            self._steps.append(Step(num_requests=timings.num_requests, num_tokens=timings.num_tokens, seconds=seconds))
        for event in output.events:
            if event.token is not None:
                self._tokens[event.request_id].append(event.token.token_id)
                self._first_s.setdefault(event.request_id, now_s - self._started_s)
                self._cached[event.request_id] = event.num_cached_tokens
                self._num_missing -= 1
        if not self._num_missing:
            self.is_over.set()

    def served(self) -> Served:
        """Return the result of the job."""
        return Served(
            tokens=tuple(tuple(self._tokens[name]) for name in self._names),
            first_token_s=tuple(self._first_s[name] for name in self._names),
            end_s=self._told_s - self._started_s,
            steps=tuple(self._steps),
            num_cached_tokens=sum(self._cached.values()),
        )


def random_prompts(rng: Random, num_prompts: int, length: int, vocab_size: int) -> list[Tokens]:
    """Generate prompts without a shared prefix."""
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(num_prompts)]


def pool_blocks(num_seqs: int, length: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the blocks for so many sequences of this length, with some spare room."""
    return num_seqs * (-(-length // block_size) + 1) + 8
