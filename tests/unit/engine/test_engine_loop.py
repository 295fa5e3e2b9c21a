import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from engine.engine import Engine
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Batch, SampledToken
from engine.types.runner import Runner
from engine.types.step_output import StepOutput
from tandem.errors import InternalError, InvalidRequest, InvariantError, Unavailable
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner

WAIT_S = 60.0


class Harness:
    """An engine whose outputs and end can be waited for."""

    def __init__(self, runner: Runner, *, pipelined: bool = False) -> None:
        self.scheduler = ledger.scheduler()
        self.outputs: SimpleQueue[StepOutput] = SimpleQueue()
        self.fatal: Future[BaseException] = Future()
        self.engine = Engine(
            scheduler=self.scheduler,
            runner=runner,
            on_step=self.outputs.put,
            on_fatal=self.fatal.set_result,
            pipelined=pipelined,
        )

    def tokens(self, num_requests: int) -> dict[str, list[int]]:
        """Collect until so many requests have ended."""
        tokens_by_request: dict[str, list[int]] = {}
        while num_requests:
            for event in self.outputs.get(timeout=WAIT_S).events:
                if event.token is not None:
                    tokens_by_request.setdefault(event.request_id, []).append(event.token.token_id)
                num_requests -= event.finish_reason is not None
        return tokens_by_request


@contextmanager
def running(runner: Runner | None = None, *, pipelined: bool = False) -> Iterator[Harness]:
    harness = Harness(runner or LedgerRunner(), pipelined=pipelined)
    harness.engine.start()
    yield harness
    assert harness.engine.stop(WAIT_S)


class GatedRunner(LedgerRunner):
    """Blocks in its first step until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def bind_thread(self) -> None:
        pass

    def execute(self, batch: Batch) -> list[SampledToken]:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return super().execute(batch)


class BrokenRunner(GatedRunner):
    def bind_thread(self) -> None:
        pass

    def execute(self, batch: Batch) -> list[SampledToken]:
        super().execute(batch)
        raise RuntimeError("the device is gone")


def test_engine_requests_from_many_threads_get_own_answers() -> None:
    with running() as harness:
        requests = [ledger.request([k] * (k + 1)) for k in range(24)]
        threads = [
            threading.Thread(target=lambda r=r: harness.engine.call(lambda s: s.add(r)).result(WAIT_S))
            for r in requests
        ]
        for thread in threads:
            thread.start()
        tokens_by_request = harness.tokens(len(requests))
        for thread in threads:
            thread.join()
        for k, request in enumerate(requests):
            assert tokens_by_request[request.request_id] == ledger.continuation([k] * (k + 1), request.params)
        harness.engine.call(ledger.assert_empty).result(WAIT_S)


def test_engine_wakes_from_idle_for_every_call() -> None:
    with running() as harness:
        for k in range(20):
            assert harness.engine.call(lambda s, k=k: (threading.current_thread().name, k)).result(WAIT_S) == (
                "tandem-engine",
                k,
            )
        for _ in range(3):
            request = ledger.request(range(20))
            harness.engine.call(lambda s, r=request: s.add(r)).result(WAIT_S)
            assert len(harness.tokens(1)[request.request_id]) == 8


def test_engine_refused_call_fails_its_caller_only() -> None:
    with running() as harness:
        with pytest.raises(InvalidRequest):
            harness.engine.call(lambda s: s.add(ledger.request([]))).result(WAIT_S)
        assert harness.engine.call(lambda s: s.load().num_waiting).result(WAIT_S) == 0
        assert not harness.fatal.done()


def test_engine_abort_during_step_takes_effect_after_it() -> None:
    runner = GatedRunner()
    with running(runner) as harness:
        request = ledger.request(range(10))
        harness.engine.call(lambda s: s.add(request)).result(WAIT_S)
        assert runner.entered.wait(WAIT_S)
        aborted = harness.engine.call(lambda s: s.abort(request.request_id))
        cancelled = harness.engine.call(lambda s: s.load())
        assert cancelled.cancel()
        runner.go_on.set()
        assert aborted.result(WAIT_S)
        assert len(harness.tokens(1)[request.request_id]) == 1


def test_engine_admission_is_reported_before_its_step() -> None:
    runner = GatedRunner()
    with running(runner) as harness:
        request = ledger.request(range(10), prefill_only=True)
        harness.engine.call(lambda s: s.add(request)).result(WAIT_S)
        assert runner.entered.wait(WAIT_S)
        early = harness.outputs.get(timeout=WAIT_S)
        assert [(a.request_id, a.prefill_only) for a in early.admissions] == [(request.request_id, True)]
        assert early.timings is None
        runner.go_on.set()
        output = harness.outputs.get(timeout=WAIT_S)
        assert output.progress[0].is_complete
        assert output.timings is not None
        assert (output.timings.num_tokens, output.timings.num_requests) == (10, 1)
        assert output.load.num_held == 1
        harness.engine.call(lambda s: s.release_held(request.request_id)).result(WAIT_S)


def test_engine_abort_without_work_is_reported() -> None:
    with running() as harness:

        def add_and_abort(sched: Scheduler) -> None:
            request = ledger.request([1])
            sched.add(request)
            sched.abort(request.request_id)

        harness.engine.call(add_and_abort).result(WAIT_S)
        output = harness.outputs.get(timeout=WAIT_S)
        assert output.events[0].token is None
        assert output.timings is None


def test_engine_runner_failure_ends_engine() -> None:
    runner = BrokenRunner()
    with running(runner) as harness:
        harness.engine.call(lambda s: s.add(ledger.request([1]))).result(WAIT_S)
        assert runner.entered.wait(WAIT_S)
        pending = harness.engine.call(lambda s: s.load())
        runner.go_on.set()
        assert isinstance(harness.fatal.result(WAIT_S), RuntimeError)
        with pytest.raises(InternalError):
            pending.result(WAIT_S)
        with pytest.raises(InternalError):
            harness.engine.call(lambda s: s.load()).result(WAIT_S)


class ShortRunner(LedgerRunner):
    def bind_thread(self) -> None:
        pass

    def execute(self, batch: Batch) -> list[SampledToken]:
        return super().execute(batch)[1:]


@pytest.mark.parametrize("how", ["call", "runner"])
def test_engine_broken_invariant_ends_engine(how: str) -> None:
    def damage(sched: Scheduler) -> None:
        sched.blocks.unpromise(1)

    with running(ShortRunner()) as harness:
        if how == "call":
            with pytest.raises(InvariantError):
                harness.engine.call(damage).result(WAIT_S)
        else:
            harness.engine.call(lambda s: s.add(ledger.request([1]))).result(WAIT_S)
        assert isinstance(harness.fatal.result(WAIT_S), InvariantError)


def test_engine_stop_waits_for_step_and_fails_pending_calls() -> None:
    runner = GatedRunner()
    harness = Harness(runner)
    harness.engine.start()
    request = ledger.request(range(5), params=SamplingParams(max_tokens=90, ignore_eos=True))
    harness.engine.call(lambda s: s.add(request)).result(WAIT_S)
    assert runner.entered.wait(WAIT_S)
    pending = harness.engine.call(lambda s: s.load())
    assert not harness.engine.stop(0.0)
    runner.go_on.set()
    assert harness.engine.stop(WAIT_S)
    with pytest.raises(Unavailable):
        pending.result(WAIT_S)
    with pytest.raises(Unavailable):
        harness.engine.call(lambda s: s.load()).result(WAIT_S)
    assert not harness.fatal.done()
