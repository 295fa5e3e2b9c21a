"""Ways to feed the real scheduler: continuous batching, and earlier, restricted ways for comparison only.

A policy decides when requests are submitted and with which lengths; blocks, steps and the model are those of the same
engine. Tokens that a policy computes in vain (padding, rows that wait for their batch) do not count.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random
from statistics import mean

from engine.scheduler.scheduler import Scheduler
from engine.types.request import Batch, Request
from engine.types.runner import Runner
from engine.types.step_output import StepOutput
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.engine.workload import Tokens
from tandem_bench.errors import CannotMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a workload."""

    prompt: Tokens
    num_tokens: int
    useful_tokens: int = 0
    """Part of `num_tokens` that is requested; 0: all."""
    arrival_s: float = 0.0

    @property
    def num_useful_tokens(self) -> int:
        """Number of requested tokens."""
        return self.useful_tokens or self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal prompts and answers: most are short, a few are very long."""

    mean_prompt: int
    mean_answer: int
    most: int
    """Maximum tokens of prompt and answer together."""
    sigma: float = 1.0
    """Standard deviation of the logarithm: 0.86 in Azure's public conversation trace, 1.38 in Mooncake's."""

    def draw(self, rng: Random, count: int, vocab_size: int) -> tuple[Ask, ...]:
        """Draw requests that all arrive at once."""
        asks = []
        for _ in range(count):
            num_prompt = min(self.most // 2, self._length(rng, self.mean_prompt))
            num_tokens = min(self.most - num_prompt, self._length(rng, self.mean_answer))
            asks.append(Ask(prompt=tuple(rng.randrange(vocab_size) for _ in range(num_prompt)), num_tokens=num_tokens))
        return tuple(asks)

    def _length(self, rng: Random, wanted: int) -> int:
        # exp(sigma^2 / 2) is the mean of a log-normal distribution with median 1.
        return max(4, round(wanted * rng.lognormvariate(0.0, self.sigma) / exp(self.sigma**2 / 2)))


def arriving(rng: Random, asks: Sequence[Ask], per_s: float) -> tuple[Ask, ...]:
    """Return the same requests with arrivals of a Poisson process."""
    now_s = 0.0
    arrived = []
    for ask in asks:
        now_s += rng.expovariate(per_s)
        arrived.append(replace(ask, arrival_s=now_s))
    return tuple(arrived)


Policy = Callable[[deque[Ask], int], list[Ask]]
"""Function that takes the requests to submit now from the queue, given the number of running ones; may pad them."""


def continuous(waiting: deque[Ask], _num_running: int) -> list[Ask]:
    """Submit everything; the scheduler fills rows as they become free."""
    asks = list(waiting)
    waiting.clear()
    return asks


def closed(batch_size: int) -> Policy:
    """Submit closed batches of waiting requests: the next starts when the longest answer of this one is complete."""

    def select(waiting: deque[Ask], num_running: int) -> list[Ask]:
        return [] if num_running else [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]

    return select


def padded(batch_size: int) -> Policy:
    """Submit closed rectangular batches: prompts padded to the longest, rows kept until the last one is complete."""
    take_closed = closed(batch_size)

    def select(waiting: deque[Ask], num_running: int) -> list[Ask]:
        batch = take_closed(waiting, num_running)
        num_prompt = max((len(ask.prompt) for ask in batch), default=0)
        num_tokens = max((ask.num_tokens for ask in batch), default=0)
        return [
            replace(
                ask,
                prompt=_padding(ask.prompt, num_prompt),
                num_tokens=num_tokens,
                useful_tokens=ask.num_useful_tokens,
            )
            for ask in batch
        ]

    return select


def _padding(prompt: Tokens, length: int) -> Tokens:
    # Padding tokens differ, or the prefix cache would make padding cheap.
    missing = length - len(prompt)
    return (prompt * (1 + missing // len(prompt)))[:missing] + prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Times of one request, in seconds since its arrival."""

    num_tokens: int
    first_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Result of serving a workload."""

    wall_s: float
    busy_s: float
    """Time while requests waited for a row: the rest depends on which request happens to be last."""
    busy_tokens: int
    """Requested tokens that were generated in that time."""
    answers: tuple[Answered, ...]
    kv_use: float
    """Tokens held relative to the capacity reserved for them, averaged over steps."""
    most_rows: int
    num_preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Requested tokens per second while requests waited, or over all the time if none ever did."""
        if self.busy_tokens:
            return self.busy_tokens / self.busy_s
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s

    @property
    def first_s(self) -> float:
        """Mean time to first token."""
        return mean(answer.first_s for answer in self.answers)

    @property
    def s_per_token(self) -> float:
        """Mean of each request's time over its tokens (normalised latency, as in Orca, OSDI 2022)."""
        return mean(answer.end_s / answer.num_tokens for answer in self.answers)


def serve(
    scheduler: Scheduler, runner: Runner, asks: Sequence[Ask], policy: Policy, *, reserved_tokens: int | None = None
) -> Served:
    """Run requests in order of arrival to their ends.

    `reserved_tokens`: what a sequence's memory is taken to be, whatever it holds; None counts its blocks. Raises
    CannotMeasure when the engine stands still.
    """
    run = _Run(asks)
    uses: list[float] = []
    most_rows = num_preemptions = 0
    while run.is_open:
        now_s = run.let_in()
        for number, ask in run.admit(policy):
            scheduler.add(_request(number, ask))
        batch = scheduler.schedule(now_s)
        if batch is None:
            run.skip()
            continue
        most_rows = max(most_rows, len(batch.items))
        uses.append(_kv_use(batch, scheduler.blocks.block_size, reserved_tokens))
        output = scheduler.commit(batch, runner.launch(batch).tokens())
        num_preemptions += len(output.preemptions)
        run.hear(output, is_busy=run.has_waiting or output.load.num_waiting > 0)
    return Served(
        wall_s=run.now_s,
        busy_s=run.busy_s,
        busy_tokens=run.busy_tokens,
        answers=tuple(run.answers),
        kv_use=mean(uses),
        most_rows=most_rows,
        num_preemptions=num_preemptions,
    )


class _Run:
    """Requests still to come, waiting and running, and the times of their answers."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._coming = deque(asks)
        self._waiting: deque[Ask] = deque()
        self._running: dict[RequestId, Ask] = {}
        self._first_s: dict[RequestId, float] = {}
        self._num_taken = 0
        self._skipped_s = 0.0
        self._num_tokens = 0
        self.busy_s = 0.0
        self.busy_tokens = 0
        self._started_s = time.perf_counter()
        self.answers: list[Answered] = []

    @property
    def is_open(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._coming or self._waiting or self._running)

    @property
    def has_waiting(self) -> bool:
        """Whether any request has not been submitted yet."""
        return bool(self._coming or self._waiting)

    @property
    def now_s(self) -> float:
        """Time since the start, on a clock that skips idle time."""
        return time.perf_counter() - self._started_s + self._skipped_s

    def let_in(self) -> float:
        """Queue the requests that have arrived; return the time."""
        now_s = self.now_s
        while self._coming and self._coming[0].arrival_s <= now_s:
            self._waiting.append(self._coming.popleft())
        return now_s

    def admit(self, policy: Policy) -> list[tuple[int, Ask]]:
        """Return the requests to submit now, numbered."""
        taken = []
        for ask in policy(self._waiting, len(self._running)):
            self._running[RequestId(str(self._num_taken))] = ask
            taken.append((self._num_taken, ask))
            self._num_taken += 1
        return taken

    def skip(self) -> None:
        """Skip idle time up to the next arrival."""
        if self._running or not self._coming:
            raise CannotMeasure("the engine makes no progress")
        self._skipped_s += max(0.0, self._coming[0].arrival_s - self.now_s)

    def hear(self, output: StepOutput, *, is_busy: bool) -> None:
        """Record first and last tokens; `is_busy`: a request waits for a row."""
        now_s = self.now_s
        for event in output.events:
            ask = self._running[event.request_id]
            self._num_tokens += event.index < ask.num_useful_tokens
            self._first_s.setdefault(event.request_id, now_s)
            if event.finish_reason is not None:
                del self._running[event.request_id]
                self.answers.append(
                    Answered(
                        num_tokens=ask.num_useful_tokens,
                        first_s=self._first_s.pop(event.request_id) - ask.arrival_s,
                        end_s=now_s - ask.arrival_s,
                    )
                )
        if is_busy:
            self.busy_s, self.busy_tokens = now_s, self._num_tokens


def _kv_use(batch: Batch, block_size: int, reserved_tokens: int | None) -> float:
    held = sum(item.start + item.num_tokens for item in batch.items)
    if reserved_tokens is not None:
        return held / (len(batch.items) * reserved_tokens)
    return held / (sum(len(item.request.block_table) for item in batch.items) * block_size)


def _request(number: int, ask: Ask) -> Request:
    return Request(
        request_id=RequestId(str(number)),
        token_ids=array("i", ask.prompt),
        num_prompt_tokens=len(ask.prompt),
        params=SamplingParams(temperature=0.0, max_tokens=ask.num_tokens, ignore_eos=True),
        hash_root=BlockHash(b"baseline"),
        # In the order of submission, also among those that arrived at the same time.
        arrival_s=ask.arrival_s + 1e-9 * number,
    )
