"""A worker's reports about its engine, and what becomes of calls to it."""

import asyncio
import gc
import threading

import pytest

from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_rates import NUM_FIRST
from engine.types.step_output import StepTimings
from tandem.errors import InternalError, Unavailable
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult
from tests.support.engine.ledger_host import parts
from worker.engine_host import EngineHost

PREFILL = StepTimings(schedule_s=0.0, execute_s=0.1, commit_s=0.0, num_tokens=101, num_requests=1)
DECODE = StepTimings(schedule_s=0.0, execute_s=0.02, commit_s=0.0, num_tokens=4, num_requests=4)


async def test_load_report_has_rates_after_enough_measurements() -> None:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    host.start(on_output=lambda _: None, ports=tuple)
    for _ in range(NUM_FIRST):
        report = await host.load()
        assert (report.prefill_tokens_per_s, report.decode_step_s) == (0.0, 0.0)
        host.rates.observe(PREFILL)
        host.rates.observe(DECODE)
    report = await host.load()
    assert (report.prefill_tokens_per_s, report.decode_step_s) == (1010.0, 0.02)
    await host.stop()
    assert not faults


async def test_call_that_nobody_awaits_is_reported_once() -> None:
    """A refusal concerns whoever asked; an engine that fails says so itself."""
    reported: list[str] = []
    faults: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(repr(context["exception"])))
    host = EngineHost(parts(), on_fatal=faults.append)
    host.start(on_output=lambda _: None, ports=tuple)

    def refuse(_scheduler: Scheduler) -> None:
        raise Unavailable("not now")

    def fail(_scheduler: Scheduler) -> None:
        raise ArithmeticError("a bug")

    with pytest.raises(Unavailable, match="not now"):
        await host.call(refuse)
    for broken in (refuse, fail, refuse):
        unawaited = [asyncio.ensure_future(host.call(broken))]
        await asyncio.wait(unawaited)
        del unawaited
        gc.collect()
    with pytest.raises(InternalError, match="the engine has failed"):
        await host.call(refuse)
    await host.stop()
    assert not reported
    assert [type(fault) for fault in faults] == [ArithmeticError]


async def test_call_whose_caller_was_cancelled_is_not_reported_when_the_engine_fails() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(repr(context["exception"])))
    host = EngineHost(parts(), on_fatal=lambda _fault: None)
    host.start(on_output=lambda _: None, ports=tuple)
    is_cancelled = threading.Event()

    def fail(_scheduler: Scheduler) -> None:
        is_cancelled.wait(10.0)
        raise ArithmeticError("a bug")

    async def ask() -> None:
        await host.call(fail)

    asking = [asyncio.ensure_future(ask()) for _ in range(2)]
    await asyncio.sleep(0)
    for one in asking:
        one.cancel()
    await asyncio.wait(asking)
    is_cancelled.set()
    with pytest.raises(InternalError, match="the engine has failed"):
        await host.call(lambda _scheduler: None)
    await host.stop()
    del asking
    gc.collect()
    await asyncio.sleep(0)
    assert not reported


async def test_pin_that_is_invalid_has_an_outcome() -> None:
    """The router that ordered it waits for one."""
    outcomes: list[PinResult] = []
    host = EngineHost(parts(), on_fatal=lambda _fault: None)
    host.start(on_output=lambda _: None, ports=tuple)
    key = PinKey("a", "x")
    host.pin(PinOrder(key=key, last_block=BlockHash(b"?"), ttl_s=-1.0), outcomes.append)
    await host.call(lambda _scheduler: None)
    assert outcomes == [PinResult(key=key, outcome=PinOutcome.NO_ROOM)]
    await host.stop()
