"""Storms: random requests, aborts, deadlines and NaN over one engine and a small real model, turn by turn from a seed.

The engine's own turns are made by hand, without its thread, so that a storm is the same storm every time. In a pool
far too small for all, requests are preempted, saved to the host tier and brought back. Nobody may be able to tell: each
request must say what it says alone in an engine that has room and waits for every step.
"""

import random
import threading
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.engine import Engine
from engine.kv_cache.eviction import POLICIES
from engine.kv_cache.lower_tiers import HostTier
from engine.kv_cache.tiers.cache import TierSpec
from engine.kv_cache.tiers.costs import MeasuredRates
from engine.kv_cache.tiers.disk import DiskSpec
from engine.kv_storage.block_file import cache_identity
from engine.kv_storage.disk_store import DiskStore
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.pending_samples import PendingSamples
from engine.sampling.sampler import Chosen, Sampler, SampleRow, sample_rows
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Batch, FinishReason, Request, RequestState, SampledToken
from engine.types.step_inputs import StepInputs
from engine.types.step_output import StepOutput
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import random_tokens

LIMIT = 120
EOS = 2
WAIT_S = 60.0
CHEAP_COPY = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e12, load_bytes_per_s=1e12)
CUT_SHORT = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Poison:
    """A sampler before which the model makes NaN of some requests."""

    def __init__(self, sampler: Sampler, victims: set[RequestId]) -> None:
        self._sampler = sampler
        self._victims = victims

    def choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Chosen:
        for i, row in enumerate(rows):
            if row.request.request_id in self._victims:
                logits[i, 5] = float("nan")
        return self._sampler.choose(logits, rows)


@dataclass(slots=True, eq=False)
class LateStep:
    """Implements `engine.types.runner.LaunchedStep`."""

    runner: "LateRunner"
    inputs: StepInputs
    rows: list[SampleRow]
    found: Sequence[SampledToken | None] | None = None

    def is_over(self) -> bool:
        return self.found is not None

    def tokens(self) -> Sequence[SampledToken | None]:
        while self.found is None:
            self.runner.run_next()
        return self.found


class LateRunner(ModelRunner):
    """As late as a device can be: what was launched touches the pool only when somebody waits for it."""

    pending: deque[LateStep]

    def launch(self, batch: Batch, _on_layers: object = None) -> LateStep:  # type: ignore[override]
        inputs = self._inputs.build(batch)
        rows = sample_rows(batch)
        step = LateStep(self, replace(inputs, tables=inputs.tables.copy()), rows)
        self.pending.append(step)
        return step

    @torch.inference_mode()
    def run_next(self) -> None:
        """Compute the oldest launched step."""
        step = self.pending.popleft()
        with self._staging.step():
            logits, _ = self._compute(step.inputs)  # nobody asks for scores here
            chosen = None if logits is None else self._sampler.choose(logits, step.rows)
            self._sampled = None if chosen is None else chosen.token_ids
            step.found = [] if chosen is None else PendingSamples(self._queue, chosen).tokens()


@dataclass(slots=True, kw_only=True)
class Received:
    """Tokens and finish reason that one request received."""

    tokens: list[SampledToken] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """What there is below the pool."""

    num_places: int = 0
    num_files: int = 0
    folder: Path | None = None

    def open(self, layout: KVLayout, runner: ModelRunner, landed: threading.Event) -> DiskStore | None:
        if self.folder is None:
            return None
        identity = cache_identity(layout, secret=ledger.SECRET, computed_by=())
        store = DiskStore(self.folder, identity=identity, place=runner.blocks.place)
        store.listen(landed.set)
        return store

    def spec(self, slots: range, runner: ModelRunner, disk: DiskStore | None) -> TierSpec | None:
        if not slots:
            return None
        found = None if disk is None else disk.find(self.num_files)
        return TierSpec(
            slots=slots,
            block_bytes=1,
            copier=runner.blocks,
            disk=None if disk is None else DiskSpec(port=disk, capacity=self.num_files, names=found.names),
        )


NOTHING = Below()


class Rig:
    """One engine whose turns are made by hand."""

    def __init__(
        self,
        model: Decoder,
        *,
        pipelined: bool,
        late: bool = False,
        num_slots: int = 0,
        below: Below = NOTHING,
        **limits: object,
    ) -> None:
        config = ledger.config(max_model_len=LIMIT, eos_token_ids=frozenset({EOS}), **limits)
        layout = kv_layout(
            model.config, fingerprint=model.fingerprint, dtype=str(model.dtype)[6:], block_size=config.block_size
        )
        cache = PagedKVCache(layout, num_blocks=config.num_blocks)
        # What nobody has written is never read for anybody.
        cache.tensor.fill_(float("nan"))
        runner = (LateRunner if late else ModelRunner)(model, cache, num_host_slots=num_slots + below.num_places)
        if isinstance(runner, LateRunner):
            runner.pending = deque()
        self.poisoned: set[RequestId] = set()
        runner._sampler = Poison(runner._sampler, self.poisoned)  # type: ignore[assignment]
        self.tier = HostTier(num_slots)
        self._landed = threading.Event()
        self.disk = below.open(layout, runner, self._landed)
        cache = below.spec(range(num_slots, num_slots + below.num_places), runner, self.disk)
        self.scheduler = self._make_scheduler(config, cache)
        self._maker = threading.current_thread()
        self.now = 0.0
        self.received: dict[RequestId, Received] = {}
        self.ends: SimpleQueue[RequestId] = SimpleQueue()
        self.num_preemptions = self.num_saved = self.num_loaded = self.num_copied = self.num_ahead = 0
        launch = runner.launch

        def counting(batch: Batch, _on_layers: object = None) -> object:
            self.num_saved += len(batch.offloads)
            self.num_loaded += len(batch.loads)
            self.num_copied += len(batch.copies)
            self.num_ahead += any(item.start == item.request.num_tokens for item in batch.items)
            return launch(batch)

        runner.launch = counting  # type: ignore[assignment, method-assign]
        self.engine = Engine(
            scheduler=self.scheduler,
            runner=runner,
            on_step=self._on_step,
            on_fatal=traceback.print_exception,  # a storm whose engine fails waits in vain: say why
            clock=lambda: self.now,
            pipelined=pipelined,
        )

    def _make_scheduler(self, config: SchedulerConfig, cache: TierSpec | None) -> Scheduler:
        """With whatever it has below the pool next to free."""
        tier = self.tier if self.tier.num_slots else None
        made = Scheduler(config, BlockHasher(ledger.SECRET), tier=tier, block_bytes=1, cache=cache)
        if made.offloading is not None:
            made.offloading.rates = CHEAP_COPY
        if made.tiers is not None:
            made.tiers.costs.rates = CHEAP_COPY
        return made

    def turn(self) -> bool:
        """What the engine's thread does in one; False when there was nothing to do."""
        self.now += 1.0
        self._landed.clear()
        did = self.engine._step()
        self.scheduler.check_invariants()
        if not did and self.scheduler.patience_s(self.now) is not None:
            # Somebody waits for the disk; sometimes longer than there is patience.
            self._landed.wait(WAIT_S)
            return True
        return did

    def add(self, request: Request) -> None:
        self.received[request.request_id] = Received()
        self.scheduler.add(request)

    def finish(self) -> None:
        """To the end of everything; nothing is left."""
        while self.turn():
            pass
        assert all(answer.reason is not None for answer in self.received.values())
        ledger.assert_empty(self.scheduler)
        assert self.tier.num_free == self.tier.num_slots
        if self.disk is not None:
            self.disk.close()

    def _on_step(self, output: StepOutput) -> None:
        self.num_preemptions += len(output.preemptions)
        if threading.current_thread() is not self._maker:  # turns by hand check after each
            self.scheduler.check_invariants()
        for event in output.events:
            answer = self.received[event.request_id]
            assert answer.reason is None, "an event after the last one"
            assert event.index == len(answer.tokens), "a token was lost or repeated"
            if event.token is not None:
                answer.tokens.append(event.token)
            answer.reason = event.finish_reason
            if answer.reason is not None:
                self.ends.put(event.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request: as many engine requests as it wants choices."""

    prompt: list[int]
    params: SamplingParams
    num_choices: int
    priority: int

    def requests(self, name: str, *, arrival_s: float, deadline_s: float | None = None) -> list[Request]:
        made = []
        for choice in range(self.num_choices):
            request = ledger.request(
                self.prompt,
                request_id=f"{name}.{choice}",
                params=self.params,
                priority=self.priority,
                arrival_s=arrival_s,
                deadline_s=deadline_s,
            )
            request.choice_index = choice
            made.append(request)
        return made


def any_params(draw: random.Random) -> SamplingParams:
    """Every way to sample that looks at what was sampled before, or at how much."""
    return SamplingParams(
        max_tokens=draw.choice([1, 2, 5, 30, 60]),
        min_tokens=draw.choice([0, 0, 1]),
        temperature=draw.choice([0.0, 0.7, 1.3]),
        top_p=draw.choice([1.0, 0.9]),
        top_k=draw.choice([0, 20]),
        min_p=draw.choice([0.0, 0.0, 0.02]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.8]),
        logit_bias=draw.choice([{}, {}, {5: 2.0, 7: -100.0}]),
        stop_token_ids=tuple(draw.sample(range(3, 97), draw.choice([0, 0, 2, 8]))),
        ignore_eos=draw.random() < 0.5,
        num_logprobs=draw.choice([None, 0, 3]),
        seed=draw.randrange(2**63),
    )


def random_requests(draw: random.Random, count: int) -> list[ClientRequest]:
    """Few beginnings, so that prefixes are shared while others lose theirs."""
    beginnings = [random_tokens(draw, length) for length in (15, 16, 33, 48)]
    made = []
    for _ in range(count):
        own = random_tokens(draw, draw.choice([1, 2, 15, 16, 17, 31]))
        made.append(
            ClientRequest(
                prompt=[*draw.choice([[], *beginnings]), *own],
                params=any_params(draw),
                num_choices=draw.choice([1, 1, 1, 2, 4]),
                priority=draw.choice([0, 0, 1]),
            )
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How often what a storm is for has happened."""

    preemptions: int
    saved: int
    loaded: int
    copied: int
    ahead: int
    reasons: frozenset[FinishReason]
    host_hits: int = 0
    disk_hits: int = 0


class Undisturbed:
    """Answers of an engine with room for all requests that waits for every step; it computes equal requests once."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._known: dict[str, list[Received]] = {}

    def answers(self, orders: Sequence[ClientRequest]) -> dict[RequestId, Received]:
        """Return the answers to all choices of `orders`, by the names that storms give them."""
        if new := {repr(ask): ask for ask in orders if repr(ask) not in self._known}:
            self._compute(new)
        return {
            RequestId(f"{i}.{choice}"): answer
            for i, ask in enumerate(orders)
            for choice, answer in enumerate(self._known[repr(ask)])
        }

    def _compute(self, orders: Mapping[str, ClientRequest]) -> None:
        alone = Rig(self._model, pipelined=False, num_blocks=400, max_running_requests=64, prefill_chunk_tokens=48)
        choices = {key: ask.requests(key, arrival_s=0.0) for key, ask in orders.items()}
        for requests in choices.values():
            for request in requests:
                alone.add(request)
        alone.finish()
        for key, requests in choices.items():
            self._known[key] = [alone.received[request.request_id] for request in requests]


def storm(
    model: Decoder,
    undisturbed: Undisturbed,
    seed: int,
    *,
    pipelined: bool,
    late: bool,
    offload: bool,
    count: int = 10,
    cache_folder: Path | None = None,
) -> Figures:
    """One of them; AssertionError where a request says what it would not say alone, or anything is left over."""
    draw = random.Random(seed)
    orders = random_requests(draw, count)
    below = NOTHING
    if cache_folder is not None:  # what earlier storms left there is of the same model: it may be found
        orders = draw.sample(3 * orders, 3 * count)  # most are asked again when others have pushed them down
        below = Below(num_places=draw.choice([2, 4, 8]), num_files=draw.choice([10, 40]), folder=cache_folder)
    rig = Rig(
        model,
        pipelined=pipelined,
        late=late,
        num_slots=draw.choice([1, 3, 8, 40]) if offload else 0,
        below=below,
        num_blocks=draw.choice([8, 9, 12, 16]),
        prefill_chunk_tokens=draw.choice([1, 7, 20, 48]),
        max_batched_tokens=draw.choice([3, 24, 64]),
        max_running_requests=draw.choice([2, 4, 8]),
        eviction=draw.choice(sorted(POLICIES)),
        max_overtakes=draw.choice([0, 3]),
        priority_aging_s=draw.choice([None, 20.0]),
    )
    _submit_all(rig, draw, orders)
    rig.finish()
    assert_same_answers(rig, undisturbed.answers(orders))
    hits = {counts.tier: counts.hits for counts in rig.scheduler.load().tiers}
    return Figures(
        host_hits=hits.get("host", 0),
        disk_hits=hits.get("disk", 0),
        preemptions=rig.num_preemptions,
        saved=rig.num_saved,
        loaded=rig.num_loaded,
        copied=rig.num_copied,
        ahead=rig.num_ahead,
        reasons=frozenset(answer.reason for answer in rig.received.values() if answer.reason is not None),
    )


def assert_same_answers(rig: Rig, alone: Mapping[RequestId, Received]) -> None:
    """Nor less, unless it was cut short."""
    for request_id, answer in rig.received.items():
        expected = alone[request_id]
        if answer.reason is None or answer.reason in CUT_SHORT:
            assert answer.tokens == expected.tokens[: len(answer.tokens)], request_id
            assert answer.reason is not FinishReason.ERROR or request_id in rig.poisoned
        else:
            assert (answer.tokens, answer.reason) == (expected.tokens, expected.reason), request_id


def _submit_all(rig: Rig, draw: random.Random, orders: Sequence[ClientRequest]) -> None:
    """Submit all requests; some are aborted, exceed their deadline or come to NaN on the way."""
    here: list[Request] = []
    for i, ask in enumerate(orders):
        deadline_s = rig.now + draw.randrange(5, 60) if draw.random() < 0.2 else None
        for request in ask.requests(f"{i}", arrival_s=rig.now, deadline_s=deadline_s):
            rig.add(request)
            here.append(request)
        for _ in range(draw.choice([0, 1, 2, 5, 20])):
            rig.turn()
            alive = [request for request in here if request.state is not RequestState.FINISHED]
            if alive and draw.random() < 0.05:
                assert rig.scheduler.abort(draw.choice(alive).request_id)
            if alive and draw.random() < 0.02:
                rig.poisoned.add(draw.choice(alive).request_id)
