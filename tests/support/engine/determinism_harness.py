"""An engine driven step by step, whose answers are compared bit for bit: tokens, log-probabilities, keys and values."""

import itertools
from array import array
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from engine.assembly import EngineParts, assemble
from engine.scheduler.scheduler import Scheduler
from engine.spec import EngineSpec
from engine.types.request import Batch, Request, SampledToken
from kv_transfer.memory.shared_memory import SharedPool
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams

_ids = itertools.count()
_MAX_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a request's computation leaves behind."""

    tokens: tuple[SampledToken, ...]
    """With their log-probabilities, as floats that must be equal."""
    kv: bytes
    """Keys and values of every computed token, by rank, layer, key or value, head and position."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What happened on the way."""

    tokens: list[SampledToken] = field(default_factory=list)
    kv: bytes = b""
    num_computed: int = 0
    num_preemptions: int = 0
    largest_batch: int = 0


class Worker:
    """One engine, whose scheduler is made anew, with other bounds, for every run; its pool is wiped before."""

    def __init__(self, spec: EngineSpec) -> None:
        self.parts: EngineParts = assemble(spec, pool=SharedPool if spec.tensor_parallel_size > 1 else None)

    def close(self) -> None:
        self.parts.ranks.close()
        if self.parts.pool is not None:
            self.parts.pool.close()

    def request(self, tokens: Sequence[int], params: SamplingParams, **more: object) -> Request:
        """`tokens`: a prompt, or with `num_prompt_tokens` one that other workers have continued already."""
        values = {"num_prompt_tokens": len(tokens)} | more
        return Request(
            request_id=RequestId(f"r{next(_ids)}"),
            token_ids=array("i", tokens),
            params=params,
            hash_root=root_hash(secret=b"test", model_fingerprint=self.parts.layout.model_fingerprint),
            **values,
        )

    def answer(
        self,
        subject: Request,
        *,
        company: Callable[[int], Sequence[Request]] = lambda _step: (),
        **bounds: int,
    ) -> tuple[Answer, Seen]:
        """Run `subject` to its end, with what `company` adds before each step, within the engine's `bounds`."""
        wipe(self.parts)
        scheduler = Scheduler(replace(self.parts.config, **bounds), self.parts.hasher)
        scheduler.add(subject)
        seen = Seen()
        for step in range(_MAX_STEPS):
            for other in company(step):
                scheduler.add(other)
            batch = scheduler.schedule(float(step))
            if batch is None:
                break
            self._step(scheduler, batch, subject, seen)
            if subject.finish_reason is not None:
                break
        assert subject.finish_reason is not None, "the subject never ended"
        seen.num_preemptions = subject.num_preemptions
        return Answer(tokens=tuple(seen.tokens), kv=seen.kv), seen

    def _step(self, scheduler: Scheduler, batch: Batch, subject: Request, seen: Seen) -> None:
        sampled = list(self.parts.runner.execute(batch))
        places = itertools.count()
        for item in batch.items:
            place = next(places) if item.samples else None
            if item.request is not subject:
                continue
            seen.num_computed += item.num_tokens
            seen.largest_batch = max(seen.largest_batch, len(batch.items))
            if place is not None:
                seen.tokens.append(sampled[place])
            # Of the step before the end at the latest: the last token's own keys are never made.
            seen.kv = kv_bytes(self.parts, list(subject.block_table), item.start + item.num_tokens)
        scheduler.commit(batch, sampled)


def wipe(parts: EngineParts) -> None:
    """Nothing that an earlier run wrote can be taken for this one's."""
    memory = parts.kv_memory()
    torch.frombuffer(memory, dtype=torch.uint8).zero_()


def kv_bytes(parts: EngineParts, blocks: Sequence[int], num_tokens: int) -> bytes:
    """A sequence's keys and values out of the pool's bytes, whatever blocks they lie in and on however many ranks."""
    layout, count = parts.layout, parts.budget.num_blocks
    pool = torch.frombuffer(parts.kv_memory(), dtype=torch.uint8)
    shape = (layout.tp_size, layout.num_layers, count, 2, layout.num_local_kv_heads, layout.block_size, -1)
    own = pool[: layout.tp_size * parts.budget.kv_bytes].view(shape)[:, :, torch.tensor(blocks)]
    rows = own.permute(0, 1, 3, 4, 2, 5, 6).flatten(4, 5)  # [rank, layer, 2, head, token, bytes]
    return rows[:, :, :, :, :num_tokens].contiguous().numpy().tobytes()


@contextmanager
def worker(spec: EngineSpec):
    """A Worker that ends its ranks."""
    made = Worker(spec)
    try:
        yield made
    finally:
        made.close()
