"""A worker's reports about its engine."""

from engine.scheduler.step_rates import NUM_FIRST
from engine.types.step_output import StepTimings
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
