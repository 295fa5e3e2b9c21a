"""A hanging engine thread is detected, and a slow one is left alone."""

import asyncio
import threading
from dataclasses import replace

import pytest

from engine.scheduler.step_rates import RateMeter
from engine.stall import EngineStalled, EngineTurn, StallWatch
from engine.types.request import Batch
from engine.types.step_output import StepTimings
from tandem.values.outputs import SampledToken
from tests.support.engine import ledger
from tests.support.engine.delayed import DelayedRunner, DelayedStep
from tests.support.engine.ledger import LedgerRunner
from tests.support.engine.ledger_host import parts, settled, stopping
from worker.engine_host import EngineHost

WAIT_S = 60.0


def rates(*, token_s: float = 0.0, decode_s: float = 0.0) -> RateMeter:
    made = RateMeter()
    if token_s:
        made.observe(timings(512, 1, 512 * token_s))
    if decode_s:
        made.observe(timings(4, 4, decode_s))
    return made


def timings(num_tokens: int, num_requests: int, execute_s: float) -> StepTimings:
    return StepTimings(
        schedule_s=0.0, execute_s=execute_s, commit_s=0.0, num_tokens=num_tokens, num_requests=num_requests
    )


def lasts(
    turn: EngineTurn | None, known: RateMeter, *, stall_s: float | None = 30.0, until_s: float = 10_000.0
) -> float:
    """The time after which a turn counts as hanging; infinity for never."""
    watch, now_s = StallWatch(stall_s=stall_s, period_s=0.5, now_s=0.0), 0.0
    while now_s < until_s:
        try:
            watch.check(turn, known, now_s)
        except EngineStalled:
            return now_s
        now_s += 0.5
    return float("inf")


def test_stall_bound_is_wider_for_long_step() -> None:
    known = rates(token_s=0.05, decode_s=0.1)
    assert lasts(EngineTurn(1), known) == pytest.approx(30.0, abs=1.0), "what is done between steps takes no time"
    assert lasts(EngineTurn(1, 4), known) == pytest.approx(30.0, abs=1.0)
    assert lasts(EngineTurn(1, 1024), known) == pytest.approx(8 * 51.3, abs=1.0)
    assert lasts(EngineTurn(1, 256), rates(decode_s=0.1)) == pytest.approx(8 * 25.7, abs=1.0), (
        "no prompt was computed yet"
    )
    assert lasts(EngineTurn(1, 4), rates()) == pytest.approx(300.0, abs=1.0), "kernels may be compiled"
    assert lasts(EngineTurn(1, 4), known, stall_s=None) == float("inf")
    assert lasts(None, known) == float("inf"), "it sleeps"


def test_stall_progressing_engine_is_not_reported() -> None:
    watch, known = StallWatch(stall_s=1.0, period_s=0.5, now_s=0.0), rates(decode_s=0.001)
    for number in range(100):
        watch.check(EngineTurn(number // 2), known, 0.5 * number)
    assert watch.age_s == 0.5


def test_stall_excludes_time_process_was_stopped() -> None:
    watch, known = StallWatch(stall_s=3.0, period_s=0.5, now_s=0.0), rates(decode_s=0.001)
    for now_s in (0.0, 0.5, 3600.0, 3600.5):
        watch.check(EngineTurn(1, 4), known, now_s)
    assert watch.age_s == 2.0
    with pytest.raises(EngineStalled, match=r"a step of 4 tokens has run for 3\.0 s"):
        watch.check(EngineTurn(1, 4), known, 7200.0)


class Hanging:
    """Never returns until the test is over."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.test_is_over = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.test_is_over.wait(WAIT_S)


class HangsInExecute(LedgerRunner):
    """A step ends when its launch returns, which never happens."""

    def __init__(self) -> None:
        super().__init__()
        self.hang = Hanging()

    def execute(self, batch: Batch) -> list[SampledToken]:
        self.hang()
        return super().execute(batch)


class HangsInWaiting(DelayedRunner):
    """Steps are launched one ahead, and then waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.hang = Hanging()

    def run_until(self, step: DelayedStep) -> None:
        self.hang()
        super().run_until(step)


@pytest.mark.parametrize("runner", [HangsInExecute(), HangsInWaiting()], ids=["execute", "pipelined"])
async def test_stall_hung_step_is_reported_once_with_age(
    runner: HangsInExecute | HangsInWaiting,
) -> None:
    is_pipelined, faults = isinstance(runner, HangsInWaiting), []
    host = EngineHost(replace(parts(), runner=runner, stall_s=0.1, is_pipelined=is_pipelined), on_fatal=faults.append)
    host.start(on_output=lambda _: None, ports=tuple)
    async with stopping(host), asyncio.timeout(WAIT_S):
        await host.call(lambda scheduler: scheduler.add(ledger.request([1, 2, 3])))
        await asyncio.to_thread(runner.hang.entered.wait)
        ages = []
        while not faults:
            ages.append((await host.load()).step_age_s)
        assert ages == sorted(ages)
        assert ages[-2] > 0.0
        for _ in range(3):
            await host.load()
        runner.hang.test_is_over.set()
    assert [type(fault) for fault in faults] == [EngineStalled]


async def test_stall_idle_engine_is_not_reported() -> None:
    faults: list[BaseException] = []
    host = EngineHost(replace(parts(), stall_s=0.001), on_fatal=faults.append)
    host.start(on_output=lambda _: None, ports=tuple)
    async with stopping(host), asyncio.timeout(WAIT_S):
        await settled(host)
        while host._engine.turn is not None:  # noqa: ASYNC110 - its thread signals nothing when it goes to sleep
            await asyncio.sleep(0.001)
        for _ in range(20):
            host._check_for_stall()
            await asyncio.sleep(0.001)
        assert (await host.load()).step_age_s == 0.0
    assert faults == []
