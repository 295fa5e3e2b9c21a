"""A simulated worker's schedule equals the real one, for any grouping of its steps and calls."""

from functools import partial
from random import Random

import pytest

from cluster.simulator.inputs.block_names import TraceHasher
from cluster.simulator.inputs.latency import StepLatency, StepWork, work_of
from cluster.simulator.inputs.trace import TraceRequest
from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.request import SimRequest
from cluster.simulator.model.settings import engine_config
from cluster.simulator.model.simulation import Simulation
from cluster.simulator.model.worker import TOKEN, SimWorker, Steps
from engine.scheduler.scheduler import Scheduler
from engine.types.request import FinishReason, Request, SampledToken
from engine.types.step_output import StepOutput
from tandem.values.ids import RequestId
from tests.support.cluster.small_clusters import BLOCK, LATENCY, cluster, load

CONFIG = engine_config(num_blocks=60, block_size=BLOCK, max_running_requests=5, chunk_tokens=64)


class Listener:
    def __init__(self, events: EventQueue) -> None:
        self.events = events
        self.ends: list[tuple[RequestId, float]] = []
        self.admissions: list[tuple[RequestId, int]] = []
        self.num_steps = 0

    def stepped(self, worker: SimWorker, output: StepOutput, steps: Steps) -> None:
        self.num_steps += steps.num_steps
        self.admissions += [(a.request_id, a.num_cached_tokens) for a in output.admissions]
        self.ends += [(e.request_id, self.events.now) for e in output.events if e.finish_reason is FinishReason.LENGTH]


def jobs(seed: int) -> list[tuple[float, Request]]:
    rng = Random(seed)
    made: list[tuple[float, Request]] = []
    for number in range(14):
        wanted = TraceRequest(
            arrival_s=rng.uniform(0.0, 1.5),
            num_prompt_tokens=rng.randint(1, 150),
            num_output_tokens=rng.randint(1, 60),
            names=(),
        )
        request = SimRequest(number, wanted, wanted.arrival_s)
        request.begin_attempt()
        made.append((wanted.arrival_s, request.engine_request(wanted.arrival_s, BLOCK, prefill_only=False)))
    return sorted(made, key=lambda job: job[0])


def by_hand(seed: int) -> Listener:
    """The engine's loop, one step after another."""
    events = EventQueue()
    listener, scheduler = Listener(events), Scheduler(CONFIG, TraceHasher(BLOCK))
    waiting = jobs(seed)
    while waiting or scheduler.load().num_running or scheduler.load().num_waiting:
        while waiting and waiting[0][0] <= events.now:
            scheduler.add(waiting.pop(0)[1])
        batch = scheduler.schedule(events.now)
        if batch is None:
            events.now = waiting[0][0]
            continue
        events.now += LATENCY.seconds(work_of(batch.items))
        sampled = [SampledToken(token_id=TOKEN)] * sum(item.samples for item in batch.items)
        listener.stepped(None, scheduler.commit(batch, sampled), Steps(1, 0.0, 0))  # type: ignore[arg-type]
    return listener


def simulated(seed: int) -> Listener:
    events = EventQueue()
    listener = Listener(events)
    info = next(iter(Simulation(cluster(1, 1), load(2), _choosing(), seed=1).workers.live.values())).info
    worker = SimWorker(info=info, config=CONFIG, latency=LATENCY, events=events, listener=listener)
    for arrival_s, request in jobs(seed):
        events.at(arrival_s, partial(worker.call, partial(_add, request)))
    rng = Random(seed)
    for _ in range(40):  # somebody who wants nothing
        events.at(rng.uniform(0.0, 3.0), partial(worker.call, lambda _: None))
    events.run()
    worker.scheduler.check_invariants()
    return listener


def _choosing():
    from cluster.simulator.model.simulation import Choosing

    return Choosing()


def _add(request: Request, scheduler: Scheduler) -> None:
    scheduler.add(request)


@pytest.mark.parametrize("seed", range(12))
def test_simulated_worker_schedule_matches_scheduler(seed: int) -> None:
    real, ours = by_hand(seed), simulated(seed)
    assert ours.admissions == real.admissions
    assert ours.num_steps == real.num_steps
    assert [name for name, _ in ours.ends] == [name for name, _ in real.ends]
    assert [at for _, at in ours.ends] == pytest.approx([at for _, at in real.ends])


def test_step_latency_of_run_is_sum_of_steps() -> None:
    latency = StepLatency(step_s=0.01, prompt_token_s=1.0, row_s=1e-3, context_token_s=1e-5)
    single = sum(latency.seconds(StepWork(0, 0, 3, 100 + 3 * i)) for i in range(20))
    assert latency.run_seconds(3, 100, 20) == pytest.approx(single)


def test_step_latency_of_chunked_prompt_sums_its_pairs() -> None:
    latency = StepLatency(prompt_token_s=0.0, pair_s=1.0)
    assert latency.prompt_seconds(3, 8, 2) == 4 + 5 + 6 + 7 + 8
