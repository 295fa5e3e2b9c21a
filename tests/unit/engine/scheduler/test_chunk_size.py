"""Chunk sizes that bound a step's time beside streams; all time here is virtual."""

from dataclasses import dataclass

import pytest

from engine.scheduler.chunk_size import MIN_CHUNK_TOKENS, ChunkSizer, has_decodes
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Batch, BatchItem, SampledToken
from engine.types.step_output import StepTimings
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger

BOUND_S = 0.35
FULL = 1024
NUM_READERS = 16


@dataclass(slots=True)
class Machine:
    """A step takes `decode_s` if it has decodes, and `token_s` for each prompt token; all of it times `slowness`."""

    decode_s: float = 0.05
    token_s: float = 0.0002345
    slowness: float = 1.0

    def step_s(self, chunk: int, *, is_read: bool) -> float:
        return self.slowness * ((self.decode_s if is_read else 0.0) + chunk * self.token_s)


class Paced:
    """A pace that receives steps as from a scheduler."""

    def __init__(self, machine: Machine, max_step_s: float | None = BOUND_S, max_tokens: int = FULL) -> None:
        self.machine = machine
        self.pace = ChunkSizer(max_step_s=max_step_s, max_tokens=max_tokens)

    def observe(self, chunk: int, *, num_readers: int = NUM_READERS) -> float:
        took = self.machine.step_s(chunk, is_read=num_readers > 0)
        rows = num_readers + (chunk > 0)
        timings = StepTimings(
            schedule_s=0.0, execute_s=took, commit_s=0.0, num_tokens=num_readers + chunk, num_requests=rows
        )
        self.pace.observe(timings, beside_decodes=num_readers > 0)
        return took

    def warm(self) -> "Paced":
        for _ in range(8):
            self.observe(0)
            self.observe(FULL)
        return self


def test_chunk_size_before_measurement_or_without_bound_is_maximum() -> None:
    paced = Paced(Machine(slowness=10.0))
    assert paced.pace.chunk_tokens() == FULL
    paced.observe(0)
    paced.observe(20)  # too short to say how fast a prompt is computed
    assert paced.pace.chunk_tokens() == FULL
    unbounded = Paced(Machine(slowness=10.0), max_step_s=None).warm()
    assert unbounded.pace.chunk_tokens() == FULL


@pytest.mark.parametrize("num_readers", [0, NUM_READERS])
@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.3, 2.0, 3.0])
def test_chunk_size_known_rate_fills_time_bound(slowness: float, num_readers: int) -> None:
    """Whether the rate was measured beside decodes or on a prompt alone."""
    paced = Paced(Machine(slowness=slowness))
    for _ in range(12):
        paced.observe(0)
    for _ in range(12):
        paced.observe(FULL, num_readers=num_readers)
    chunk = paced.pace.chunk_tokens()
    if chunk < FULL:
        assert chunk % 32 == 0
        assert 0.8 * BOUND_S < paced.machine.step_s(chunk, is_read=True) <= BOUND_S
    else:
        assert slowness <= 1.0


def test_chunk_size_stays_between_minimum_and_maximum() -> None:
    assert Paced(Machine(slowness=50.0)).warm().pace.chunk_tokens() == MIN_CHUNK_TOKENS
    assert Paced(Machine(slowness=50.0), max_tokens=20).warm().pace.chunk_tokens() == 20
    assert Paced(Machine(slowness=0.01), max_tokens=500).warm().pace.chunk_tokens() == 500


def test_chunk_size_two_slow_steps_shorten_until_three_faster_ones() -> None:
    """A machine whose speed is uneven would otherwise pay, step by step, for the slowest it has just seen."""
    paced = Paced(Machine()).warm()
    for num_slow, num_shorter in ((1, 0), (2, 3)):
        paced.machine.slowness = 2.0
        for _ in range(num_slow):
            assert paced.observe(FULL) > BOUND_S
        paced.machine.slowness = 1.0
        chunks = []
        for _ in range(6):
            chunks.append(paced.pace.chunk_tokens())
            paced.observe(chunks[-1])
        assert all(chunk < 0.6 * FULL for chunk in chunks[:num_shorter])
        assert chunks[num_shorter:] == [FULL] * (6 - num_shorter)


@pytest.mark.parametrize("stall_s", [0.5, 1.0, 2.0, 10.0])
def test_chunk_size_one_stalled_decode_is_ignored(stall_s: float) -> None:
    """The machine stalled once, and no pure decode follows since prompts keep coming."""
    served = Served(Machine()).with_readers()
    served.step()
    usual, served.machine.decode_s = served.machine.decode_s, stall_s
    batch, _ = served.step()
    assert chunk_of(batch) == 0
    served.machine.decode_s = usual
    for _ in range(20):
        served.add(4000, 10)
    assert [chunk_of(served.step()[0]) for _ in range(10)] == [FULL] * 10


def test_chunk_size_after_cold_start_recovers() -> None:
    """The first step of every kind took seconds; again, prompts keep coming."""
    paced = Paced(Machine(slowness=50.0))
    paced.observe(0)
    paced.observe(FULL)
    paced.machine.slowness = 1.0
    chunks = []
    for _ in range(12):
        chunks.append(paced.pace.chunk_tokens())
        paced.observe(chunks[-1])
    assert min(chunks[8:]) > 0.8 * FULL


@pytest.mark.parametrize("decode_s", [0.02, 0.1, 0.15, 0.2, 0.25])
@pytest.mark.parametrize("token_s", [0.0005, 0.001])
@pytest.mark.parametrize("alone_every", [2, 4, 0])
def test_chunk_size_converges_to_step_time_bound(decode_s: float, token_s: float, alone_every: int) -> None:
    """However much of it decodes take, and however seldom they run alone."""
    paced = Paced(Machine(decode_s=decode_s, token_s=token_s)).warm()
    for i in range(60):
        paced.observe(0 if alone_every and i % alone_every == 0 else paced.pace.chunk_tokens())
    chunk = paced.pace.chunk_tokens()
    ideal = (0.95 * BOUND_S - decode_s) / token_s
    assert chunk <= max(ideal + 1, MIN_CHUNK_TOKENS)
    assert chunk > 0.9 * ideal - 32 or chunk == FULL


def test_chunk_size_uninformative_step_is_ignored() -> None:
    """Beside decodes a short chunk pays little of the step's fixed cost, alone it pays all of it."""
    paced = Paced(Machine()).warm()
    paced.machine.slowness = 4.0
    paced.observe(MIN_CHUNK_TOKENS - 1)
    paced.observe(FULL // 2 - 1, num_readers=0)
    assert paced.pace.chunk_tokens() == FULL
    for _ in range(2):
        paced.observe(MIN_CHUNK_TOKENS)
    assert paced.pace.chunk_tokens() < FULL // 2


def test_chunk_size_shrinks_with_decoding_rows() -> None:
    paced = Paced(Machine()).warm()
    paced.machine.decode_s = 0.2
    for _ in range(12):
        paced.observe(0)
    chunk = paced.pace.chunk_tokens()
    assert chunk < 0.7 * FULL
    assert paced.machine.step_s(chunk, is_read=True) <= BOUND_S


def test_has_decodes_counts_newest_tokens_only() -> None:
    fresh, resumed = ledger.request(range(50)), ledger.request(range(50), output=range(5))
    handed_off = ledger.request(range(50), output=range(5), prefill_only=True)
    assert has_decodes([BatchItem(fresh, 0, 40, False), BatchItem(resumed, 54, 1, True)])
    assert not has_decodes([BatchItem(fresh, 49, 1, True)])
    assert not has_decodes([BatchItem(resumed, 40, 15, True)])
    assert not has_decodes([BatchItem(resumed, 53, 1, False)])  # the last bit of a chunk
    assert not has_decodes([BatchItem(handed_off, 54, 1, True)])
    assert not has_decodes([])


class Served:
    """A scheduler on a machine whose steps take virtual time; sampled tokens do not matter here."""

    def __init__(self, machine: Machine, max_step_s: float | None = BOUND_S, *, prefill_only: bool = False) -> None:
        self.machine = machine
        self.sched: Scheduler = ledger.scheduler(
            num_blocks=4000,
            max_model_len=10_000,
            max_batched_tokens=2 * FULL,
            prefill_chunk_tokens=FULL,
            max_running_requests=64,
            max_step_s=max_step_s,
        )
        self._prefill_only = prefill_only
        self._num_prompts = 0
        self.now = 0.0

    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self._num_prompts += 1
        request = ledger.request(
            [self._num_prompts] * num_prompt_tokens,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival_s=float(self._num_prompts),
            prefill_only=self._prefill_only,
        )
        self.sched.add(request)

    def step(self) -> tuple[Batch, float]:
        """The batch, and the seconds that it took."""
        batch = self.sched.schedule(self.now)
        assert batch is not None
        is_read, chunk = reads(batch), chunk_of(batch)
        took = self.machine.step_s(chunk, is_read=is_read)
        self.now += took
        self.sched.commit(batch, [SampledToken(token_id=5) for item in batch.items if item.samples])
        timings = StepTimings(
            schedule_s=0.0,
            execute_s=took,
            commit_s=0.0,
            num_tokens=batch.num_tokens,
            num_requests=len(batch.items),
        )
        self.sched.observe(timings)
        return batch, took

    def with_readers(self) -> "Served":
        """With some streams, and a known rate."""
        for _ in range(NUM_READERS):
            self.add(60, 5000)
        for _ in range(3):
            self.step()
        self.add(2 * FULL, 5000)
        for _ in range(6):
            self.step()
        return self


def reads(batch: Batch) -> bool:
    return any(item.start >= item.request.num_prompt_tokens for item in batch.items)


def chunk_of(batch: Batch) -> int:
    return sum(item.num_tokens for item in batch.items if item.start < item.request.num_prompt_tokens)


def test_chunk_size_only_steps_with_decodes_are_bounded() -> None:
    served = Served(Machine(slowness=2.0)).with_readers()
    served.add(5000, 10)
    with_decodes, _ = served.step()
    assert reads(with_decodes)
    assert MIN_CHUNK_TOKENS < chunk_of(with_decodes) < 0.6 * FULL
    for item in with_decodes.items[:-1]:
        served.sched.abort(item.request.request_id)
    alone, _ = served.step()
    assert (len(alone.items), chunk_of(alone)) == (1, FULL)


def test_chunk_size_is_shared_by_all_prompts_in_step() -> None:
    served = Served(Machine(slowness=2.0)).with_readers()
    for _ in range(8):
        served.add(150, 10)
    batch, took = served.step()
    assert sum(item.start < item.request.num_prompt_tokens for item in batch.items) > 2
    assert took <= BOUND_S


def test_chunk_size_prefill_worker_is_not_bounded() -> None:
    served = Served(Machine(slowness=5.0), prefill_only=True)
    for _ in range(6):
        served.add(900, 10)
    chunks = [chunk_of(served.step()[0]) for _ in range(5)]
    assert chunks == [FULL] * 5


def test_chunk_size_keeps_steps_within_bound_after_two_slow_ones() -> None:
    """The machine halves its speed while prompts are computed, thirds it, and recovers: the chunk follows."""
    served = Served(Machine()).with_readers()
    assert (chunk_of(served.step()[0]), served.sched.load().num_waiting) == (0, 0)
    chunks: dict[float, list[int]] = {}
    for slowness in (1.0, 2.0, 3.0, 1.0):
        served.machine.slowness = slowness
        times, found = [], []
        for _ in range(25):
            if served.sched.load().num_backlog_tokens < 3000:
                served.add(4000, 10)
            batch, took = served.step()
            assert reads(batch)
            times.append(took)
            found.append(chunk_of(batch))
        assert all(took <= BOUND_S for took in times[2:])
        chunks[slowness] = found
    assert chunks[2.0][:2] == [FULL, FULL]  # one slow step says nothing
    assert min(chunks[2.0]) > 0.35 * FULL
    assert min(chunks[3.0]) > 0.15 * FULL
    # What follows the slow time: small while it is remembered, then as before.
    assert max(chunks[1.0][:3]) < FULL // 2
    assert min(chunks[1.0][8:]) == FULL


def test_chunk_size_without_bound_exceeds_step_time() -> None:
    """Control of the previous test."""
    served = Served(Machine(slowness=2.0), None).with_readers()
    served.add(4000, 10)
    assert served.step()[1] > BOUND_S


def test_chunk_size_drafts_belong_to_the_decodes() -> None:
    """Steps of decodes with drafts, which take twice as long, shorten chunks as slower decodes would."""
    found = []
    for num_drafts, decode_s in ((0, 0.04), (6, 0.04)):
        sizer = ChunkSizer(max_step_s=0.1, max_tokens=1024)
        decodes = StepTimings(0.0, decode_s, 0.0, 2 + num_drafts, 2, num_draft_tokens=num_drafts)
        chunk = StepTimings(0.0, decode_s + 0.1, 0.0, 2 + num_drafts + 200, 3, num_draft_tokens=num_drafts)
        for timings, beside in ((decodes, True), (chunk, True), (decodes, True), (chunk, True)):
            sizer.observe(timings, beside_decodes=beside)
        found.append(sizer.chunk_tokens())
    assert found[0] == found[1] < 1024
