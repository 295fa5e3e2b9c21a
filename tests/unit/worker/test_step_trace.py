"""A trace of a running engine has as many steps as requested, and leaves the engine unchanged."""

import asyncio
import gzip
import json
from threading import Event

import pytest

from engine.types.runner import Runner
from tandem.errors import Unavailable
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner
from tests.unit.engine.test_engine_loop import Harness, running
from worker.trace_service import StepTrace, TracedRunner, trace_steps

WAIT_S = 60.0


class Host:
    """The part of an engine's host that `trace_steps` uses."""

    def __init__(self, harness: Harness) -> None:
        self._engine = harness.engine
        self.runners: list[Runner] = []
        self.was_requested = asyncio.Event()

    async def replace_runner(self, replace):
        def noted(runner):
            self.runners.append(replace(runner))
            return self.runners[-1]

        await asyncio.shield(asyncio.wrap_future(self._engine.call(lambda _: self._engine.replace_runner(noted))))
        self.was_requested.set()


def submit(harness: Harness, max_tokens: int) -> None:
    request = ledger.request(range(10), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    harness.engine.call(lambda scheduler: scheduler.add(request)).result(WAIT_S)


async def tokens(harness: Harness) -> list[int]:
    [answer] = (await asyncio.to_thread(harness.tokens, 1)).values()
    return answer


async def test_step_trace_has_requested_number_of_steps(tmp_path):
    runner = LedgerRunner()
    with running(runner) as harness:
        host, trace = Host(harness), StepTrace()
        recording = asyncio.create_task(trace_steps(host, trace, num_steps=3, timeout_s=WAIT_S))
        await host.was_requested.wait()
        submit(harness, 30)
        assert await recording >= 3
        assert isinstance(host.runners[0], TracedRunner)
        assert host.runners[1] is runner
        assert len(await tokens(harness)) == 30
    await asyncio.to_thread(trace.write, tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert steps[0].startswith("step 1: ")
    assert len(steps) >= 3


@pytest.mark.parametrize("leaves", [False, True])
async def test_step_trace_cancelled_or_idle_changes_nothing(leaves):
    runner = LedgerRunner()
    with running(runner) as harness:
        host = Host(harness)
        recording = asyncio.create_task(
            trace_steps(host, StepTrace(), num_steps=3, timeout_s=WAIT_S if leaves else 0.0)
        )
        await host.was_requested.wait()
        if leaves:
            recording.cancel()
            with pytest.raises(asyncio.CancelledError):
                await recording
        else:
            assert await recording == 0
        assert host.runners[-1] is runner
        submit(harness, 3)
        assert len(await tokens(harness)) == 3


class Counted(StepTrace):
    """Counts begins and ends; `broken`: as when another recording is active."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.begun = self.ended = 0

    def begin(self) -> None:
        if self.broken:
            raise RuntimeError("a recorder is at work")
        self.begun += 1
        super().begin()

    def end(self) -> None:
        self.ended += 1
        super().end()


async def test_step_trace_cancelled_at_start_leaves_no_recorder():
    runner, held = LedgerRunner(), Event()
    with running(runner) as harness:
        host, trace = Host(harness), Counted()
        harness.engine.call(lambda _: held.wait(WAIT_S))
        recording = asyncio.create_task(trace_steps(host, trace, num_steps=3, timeout_s=WAIT_S))
        await asyncio.sleep(0)  # it asks the engine now, which is held
        recording.cancel()
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await recording
        assert trace.begun == trace.ended
        assert host.runners[-1] is runner


async def test_step_trace_recorder_failure_is_reported_and_engine_continues():
    runner = LedgerRunner()
    with running(runner) as harness:
        host, trace = Host(harness), Counted(broken=True)
        with pytest.raises(Unavailable, match="a recorder is at work"):
            await trace_steps(host, trace, num_steps=3, timeout_s=WAIT_S)
        assert trace.ended == 0
        submit(harness, 3)
        assert len(await tokens(harness)) == 3
