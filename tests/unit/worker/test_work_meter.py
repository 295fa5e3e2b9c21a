"""Sums over a worker's steps, and how routers show them."""

from dataclasses import asdict

import pytest

from engine.types.step_output import Load, SettledDraft, StepOutput, StepTimings
from router.fleet.session_wire import load_from_pb
from router.metrics.router_metrics import RouterMetrics
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import RequestId
from tandem.values.prefix_pin import PinTotals
from tandem.values.step_sizes import STEP_SIZES
from tests.support.router.worker_views import worker
from worker.wire import load_to_pb
from worker.work_meter import WorkMeter


def output(num_tokens: int, num_requests: int, seconds: float, preemptions: tuple[str, ...] = ()) -> StepOutput:
    timings = StepTimings(0.0, seconds, 0.0, num_tokens, num_requests)
    empty: tuple[()] = ()
    return StepOutput(empty, empty, empty, preemptions, None, None, timings)  # type: ignore[arg-type]


def test_work_meter_separates_prefill_and_decode_steps() -> None:
    meter = WorkMeter()
    for step in (output(100, 2, 0.5), output(4, 4, 0.125, ("r",)), output(8, 8, 0.125)):
        meter.observe(step)
    meter.observe(output(1, 1, 1.0, ("q", "r"))._replace(timings=None))
    assert (meter.prefill.steps, meter.prefill.tokens, meter.prefill.seconds) == (1, 100, 0.5)
    assert (meter.decode.steps, meter.decode.requests, meter.decode.seconds) == (2, 12, 0.25)
    assert meter.preemptions == 3
    sizes = dict(zip((*STEP_SIZES, "more"), meter.sizes, strict=True))
    assert {size: count for size, count in sizes.items() if count} == {8: 2, 128: 1}
    meter.observe(output(20_000, 1, 1.0))
    assert meter.sizes[-1] == 1


def test_work_meter_report_is_exported_under_worker_name() -> None:
    snapshot = pb.LoadSnapshot(
        work=pb.WorkReport(
            decode=pb.StepTotals(steps=3, seconds=1.5, tokens=9, requests=9),
            preemptions=2,
            resident_bytes=7,
            flops_per_token=11,
            step_sizes=[2, 1, *[0] * (len(STEP_SIZES) - 1)],
        )
    )
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("w", load=load_from_pb(snapshot))])
    value, labels = metrics.registry.get_sample_value, {"worker": "w", "role": "decode"}
    assert value("tandem_worker_step_seconds_total", labels | {"kind": "decode"}) == pytest.approx(1.5)
    assert value("tandem_worker_step_requests_total", labels | {"kind": "prefill"}) == 0
    assert value("tandem_worker_memory_bytes", labels | {"kind": "resident"}) == 7
    assert value("tandem_worker_flops_per_token", labels) == 11
    assert value("vllm:num_preemptions_total", {"model_name": "m", "engine": "w"}) == 2
    assert value("vllm:iteration_tokens_total_bucket", {"model_name": "m", "engine": "w", "le": "8.0"}) == 3
    assert value("vllm:iteration_tokens_total_sum", {"model_name": "m", "engine": "w"}) == 9
    strange = load_from_pb(pb.LoadSnapshot(work=pb.WorkReport(step_sizes=[1, 2])))
    metrics.worker_loads([worker("w", load=strange)])
    assert value("vllm:iteration_tokens_total_count", {"model_name": "m", "engine": "w"}) is None
    metrics.worker_loads([worker("old", load=load_from_pb(pb.LoadSnapshot()))])
    assert value("tandem_worker_flops_per_token", labels) is None


def test_work_meter_reserved_and_waiting_are_separate() -> None:
    fields = dict.fromkeys(Load._fields, 0) | {"num_running": 1, "num_waiting": 2, "num_reservations": 3}
    load = Load(**fields | {"tiers": (), "pins": PinTotals()})
    snapshot = load_to_pb(load, prefill_tokens_per_s=0.0, decode_step_s=0.0, kv_bytes_per_s=0.0)
    assert snapshot.num_waiting == 5  # routers that ignore reservations count them as waiting
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("d", load=load_from_pb(snapshot))])
    states = {"running": 1, "waiting": 2, "reserved": 3}
    for state, count in states.items():
        labels = {"worker": "d", "role": "decode", "state": state}
        assert metrics.registry.get_sample_value("tandem_worker_requests", labels) == count
    # No worker has more reserved than it has.
    assert load_from_pb(pb.LoadSnapshot(num_waiting=1, num_reserved=9)).num_reserved == 1


def test_work_meter_step_with_drafts_is_a_decode_step() -> None:
    meter = WorkMeter()
    step = output(12, 4, 0.5)
    for drafts, accepted in ((8, 5), (7, 2)):
        timings = step.timings._replace(num_draft_tokens=drafts, num_accepted_tokens=accepted)  # type: ignore[union-attr]
        meter.observe(step._replace(timings=timings))
    assert (meter.decode.steps, meter.prefill.steps) == (1, 1)
    assert (meter.decode.tokens, meter.decode.draft_tokens, meter.decode.accepted_tokens) == (12, 8, 5)
    report = pb.WorkReport(**{kind: pb.StepTotals(**asdict(getattr(meter, kind))) for kind in ("prefill", "decode")})
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("w", load=load_from_pb(pb.LoadSnapshot(work=report)))])
    value, labels = metrics.registry.get_sample_value, {"worker": "w", "role": "decode", "kind": "decode"}
    assert value("tandem_worker_step_draft_tokens_total", labels) == 8
    assert value("tandem_worker_step_accepted_tokens_total", labels) == 5
    # Of a worker whose version does not tell the sources.
    unknown = {"model_name": "m", "engine": "w", "source": "unknown"}
    assert value("vllm:spec_decode_num_draft_tokens_total", unknown) == 15
    assert value("vllm:spec_decode_num_accepted_tokens_total", unknown) == 7
    assert value("vllm:spec_decode_num_drafts_total", unknown) is None
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", unknown | {"position": "0"}) is None


def test_work_meter_counts_drafts_by_source_and_place() -> None:
    meter = WorkMeter()
    for drafts in ((("prediction", 4, 2), ("lookup", 1, 0)), (("prediction", 20, 18),), (("prediction", 1, 1),)):
        settled = tuple(SettledDraft(RequestId("r"), *draft) for draft in drafts)
        meter.observe(output(25, 4, 0.5)._replace(drafts=settled))
    reported = pb.WorkReport(
        drafts=[pb.DraftTotals(source=source, **asdict(totals)) for source, totals in meter.drafts.items()]
    )
    reported.drafts.add(source="magic", drafts=5)
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("w", load=load_from_pb(pb.LoadSnapshot(work=reported)))])

    def value(name: str, source: str, **more: str) -> float | None:
        whose = {"worker": "w", "role": "decode"} if name.startswith("tandem") else {"model_name": "m", "engine": "w"}
        return metrics.registry.get_sample_value(name, whose | {"source": source} | more)

    assert value("vllm:spec_decode_num_drafts_total", "prediction") == 3
    assert value("vllm:spec_decode_num_draft_tokens_total", "prediction") == 25
    assert value("vllm:spec_decode_num_accepted_tokens_total", "prediction") == 21
    assert value("vllm:spec_decode_draft_acceptance_rate", "prediction") == pytest.approx(21 / 25)
    assert value("vllm:spec_decode_draft_acceptance_rate", "lookup") == 0
    assert value("vllm:spec_decode_num_drafts_total", "magic") is None
    at = {
        place: (
            value("tandem_worker_draft_tokens_total", "prediction", position=place),
            value("tandem_worker_draft_accepted_tokens_total", "prediction", position=place),
        )
        for place in ("0", "1", "2", "14", "15+")
    }
    assert at == {"0": (3, 3), "1": (2, 2), "2": (2, 1), "14": (1, 1), "15+": (5, 3)}
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", "prediction", position="15+") == 3
    assert value("tandem_worker_draft_tokens_total", "lookup", position="1") is None
