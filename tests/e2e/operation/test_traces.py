"""One request is one trace over all its processes, with the figures of /metrics."""

import asyncio
import signal

import grpc.aio
import pytest

from tandem.v1 import inference_pb2 as pb
from tandem.v1.common_pb2 import SamplingParams
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.e2e.failed_over import check_lost_decoder, check_retried_hand_off, until_sent
from tests.support.otlp_receiver import OtlpReceiver, Received, otlp_receiver
from tests.support.running_cluster import WAIT_S, RunningCluster, body, running

TWO_TO_ONE = {
    "prefill__replicas": 2,
    "log_format": "json",
    # Computing is dear: whatever is held somewhere is worth fetching.
    "engine__prefill_chunk_tokens": 80,
    "engine__max_batched_tokens": 96,
    # Who is frozen is not missed: what it does not do is noticed by those who wait for it.
    "router__worker_silence_s": 60.0,
}
CLIENT_SPAN = "00f067aa0ba902b7"
TOLERANCE_NS = 1_000_000
"""Between two processes' readings of the same clocks."""
MAY_OUTLIVE_ITS_PARENT = {"tandem.send"}
"""The sender hears of the commit after it."""

HANDED_OVER = {
    # (span, of which role): (parent, of which role)
    ("text_completion tandem-tiny", "router"): None,
    ("tandem.preprocess", "router"): ("text_completion tandem-tiny", "router"),
    ("tandem.place", "router"): ("text_completion tandem-tiny", "router"),
    ("tandem.decode", "decode"): ("text_completion tandem-tiny", "router"),
    ("tandem.reserve", "decode"): ("tandem.decode", "decode"),
    ("tandem.handoff", "decode"): ("tandem.decode", "decode"),
    ("tandem.bind", "decode"): ("tandem.handoff", "decode"),
    ("tandem.commit", "decode"): ("tandem.handoff", "decode"),
    ("tandem.first_decode_step", "decode"): ("tandem.decode", "decode"),
    ("tandem.send", "prefill"): ("tandem.handoff", "decode"),
    ("tandem.prefill_queue", "prefill"): ("tandem.send", "prefill"),
    ("tandem.prefill", "prefill"): ("tandem.send", "prefill"),
}
FETCHED = {
    **HANDED_OVER,
    ("tandem.fetch", "prefill"): ("tandem.send", "prefill"),
    ("tandem.handoff", "prefill"): ("tandem.fetch", "prefill"),
    ("tandem.bind", "prefill"): ("tandem.handoff", "prefill"),
    ("tandem.commit", "prefill"): ("tandem.handoff", "prefill"),
    ("tandem.send", "decode"): ("tandem.handoff", "prefill"),
}


FAILED_OVER = [
    # (span, its parent): the prefill worker died, and the decode worker computed the prompt itself
    ("tandem.decode", "text_completion tandem-tiny"),
    ("tandem.first_decode_step", "tandem.decode"),
    ("tandem.handoff", "tandem.decode"),
    ("tandem.place", "text_completion tandem-tiny"),
    ("tandem.place", "text_completion tandem-tiny"),
    ("tandem.prefill", "tandem.decode"),
    ("tandem.prefill_queue", "tandem.decode"),
    ("tandem.preprocess", "text_completion tandem-tiny"),
    ("tandem.reserve", "tandem.decode"),
    ("text_completion tandem-tiny", ""),
]


def traced(trace_id: str) -> dict[str, str]:
    """Headers that make a client's request part of its own trace."""
    return {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01", "tracestate": "vendor=opaque"}


async def ask(cluster: RunningCluster, prompt: list[int], max_tokens: int, trace_id: str) -> list[int]:
    """The answer, as part of a client's own trace."""
    response = await cluster.http.post("/v1/completions", json=body(prompt, max_tokens), headers=traced(trace_id))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def ask_over_grpc(cluster: RunningCluster, prompt: list[int], trace_id: str) -> None:
    """A stream read to its end, as part of a client's own trace."""
    metadata = tuple(traced(trace_id).items())
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), sampling=SamplingParams(max_tokens=6))
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        assert [answer async for answer in InferenceStub(channel).Generate(request, metadata=metadata, timeout=WAIT_S)]


async def check_failover(cluster: RunningCluster, receiver: OtlpReceiver, oracle, trace_id: str) -> None:
    """A prefill worker lost with a prompt leaves a failed attempt beside the successful one."""
    prompt = oracle.story(300, 200)
    cluster.local.kill("prefill-1", signal.SIGKILL)
    await cluster.until_workers(2)
    cluster.local.kill("prefill-0", signal.SIGSTOP)
    answer = asyncio.create_task(ask(cluster, prompt, 4, trace_id))
    await until_sent(cluster)
    cluster.local.kill("prefill-0", signal.SIGKILL)
    assert await answer == oracle.tokens(prompt, 4)
    spans = await all_of(receiver, trace_id, len(FAILED_OVER))
    names = {span.span_id: span.name for span in spans}
    assert sorted((span.name, names.get(span.parent_id, "")) for span in spans) == FAILED_OVER
    assert [span.name for span in spans if span.failed] == ["tandem.handoff"]
    reasons = [s.attributes["tandem.placement.reason"] for s in spans if s.name == "tandem.place"]
    assert sorted(reasons)[0] == "disaggregated"


async def all_of(receiver: OtlpReceiver, trace_id: str, count: int) -> list[Received]:
    """The trace's spans once so many have arrived."""
    try:
        async with asyncio.timeout(WAIT_S):
            await receiver.until(lambda: len(receiver.of_trace(trace_id)) >= count)
    except TimeoutError:
        came = [(span.name, span.instance, span.attributes) for span in receiver.of_trace(trace_id)]
        raise AssertionError(f"not {count} spans but {came}") from None
    return receiver.of_trace(trace_id)


async def complete(receiver: OtlpReceiver, trace_id: str, expected: dict) -> dict[tuple[str, str], Received]:
    """The trace's spans by name and role, once all have arrived; each exactly once."""
    spans = await all_of(receiver, trace_id, len(expected))
    by_name = {(span.name, span.instance.partition("-")[0]): span for span in spans}
    assert sorted(by_name) == sorted(expected)
    assert len(spans) == len(expected)
    return by_name


def check_tree(spans: dict[tuple[str, str], Received], expected: dict) -> None:
    """Parents are right, and no span begins before its parent or, but for those that may, ends after it."""
    for name, parent_name in expected.items():
        span = spans[name]
        assert not span.failed
        assert span.state == "vendor=opaque"
        if parent_name is None:
            assert span.parent_id == CLIENT_SPAN
            continue
        parent = spans[parent_name]
        assert span.parent_id == parent.span_id, name
        assert parent.start_ns - TOLERANCE_NS <= span.start_ns <= span.end_ns, name
        if name[0] not in MAY_OUTLIVE_ITS_PARENT:
            assert span.end_ns <= parent.end_ns + TOLERANCE_NS, name
    for span in spans.values():
        assert all(span.start_ns <= at_ns <= span.end_ns for _, at_ns, _ in span.events)


async def check_figures(cluster: RunningCluster, span: Received, direction: str, kind: str, before: float) -> None:
    """The increase of /metrics since `before` equals the span's figures."""
    labels = {"worker": span.instance, "direction": direction, "kind": kind, "outcome": "committed"}
    moved = span.attributes["tandem.transfer.bytes"]
    assert moved == sum(attributes["bytes"] for name, _, attributes in span.events if name == "chunk") > 0

    async def counted() -> bool:
        return await cluster.figure("tandem_worker_transfer_bytes_total", **labels) - before == moved

    await cluster.until(counted)
    assert await cluster.figure("tandem_worker_transfer_seconds_total", **labels) > 0.0
    assert span.attributes["tandem.transfer.seconds"] > 0.0


def have_short_attributes(spans: list[Received]) -> bool:
    """Whether attributes are short: no prompt, no token ids."""
    texts = [text for span in spans for text in span.attributes.values() if isinstance(text, (str, list))]
    return all(len(text) < 100 for text in texts)


@pytest.mark.turn(1)
async def test_trace_spans_both_pools_and_a_fetch(oracle):
    trace = [f"{number:032x}" for number in range(1, 8)]
    async with otlp_receiver() as receiver:
        endpoint = {"telemetry__otlp_endpoint": f"http://127.0.0.1:{receiver.port}"}
        async with running(**endpoint, telemetry__otlp_headers={"X-Key": "k"}, **TWO_TO_ONE) as cluster:
            first = oracle.story(1, 300)
            answer = await ask(cluster, first, 640, trace[0])
            spans = await complete(receiver, trace[0], HANDED_OVER)
            check_tree(spans, HANDED_OVER)
            received, sent = spans["tandem.handoff", "decode"], spans["tandem.send", "prefill"]
            assert received.attributes["tandem.transfer.bytes"] == sent.attributes["tandem.transfer.bytes"]
            assert received.attributes["tandem.transfer.id"] == sent.attributes["tandem.transfer.id"]
            assert received.attributes["tandem.transfer.transport"] == sent.attributes["tandem.transfer.transport"]
            await check_figures(cluster, received, "received", "handoff", 0.0)
            await check_figures(cluster, sent, "sent", "handoff", 0.0)
            root = spans["text_completion tandem-tiny", "router"].attributes
            assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (300, 640)
            assert root["gen_ai.response.finish_reasons"] == ["length"]

            second = [*first, *answer, *oracle.story(100, 150)]
            assert await ask(cluster, second, 24, trace[1]) == oracle.tokens(second, 24)
            spans = await complete(receiver, trace[1], FETCHED)
            check_tree(spans, FETCHED)
            fetch, lent = spans["tandem.handoff", "prefill"], spans["tandem.send", "decode"]
            assert fetch.attributes["tandem.transfer.bytes"] == lent.attributes["tandem.transfer.bytes"]
            await check_figures(cluster, fetch, "received", "fetch", 0.0)
            await check_figures(cluster, lent, "sent", "fetch", 0.0)
            tokens = spans["tandem.fetch", "prefill"].attributes["tandem.fetch.tokens"]
            assert (
                await cluster.figure("tandem_worker_prefix_fetched_tokens_total", worker=fetch.instance) == tokens > 0
            )

            headers = {"traceparent": f"00-{trace[2]}-{CLIENT_SPAN}-00"}
            await cluster.http.post("/v1/completions", json=body(first, 2), headers=headers)
            await cluster.tokens(first, 2)  # its trace begins at the router
            await cluster.until_idle()
            await ask_over_grpc(cluster, oracle.story(200, 200), trace[3])
            check_tree(await complete(receiver, trace[3], HANDED_OVER), HANDED_OVER)
            await cluster.until_idle()
            held = {state: await cluster.figure("tandem_worker_transfer_blocks", state=state) for state in STATES}
            assert held == dict.fromkeys(STATES, 0.0)
            await check_retried_hand_off(cluster, receiver, oracle, traced(trace[4]))
            await check_lost_decoder(cluster, receiver, oracle, traced(trace[5]))
            await check_failover(cluster, receiver, oracle, trace[6])
        assert not receiver.of_trace(trace[2]), "its client did not want it traced"
        assert {"router", "decode-0"} <= {s.instance for s in receiver.spans if s.trace_id not in trace}
    assert have_short_attributes(receiver.spans)
    assert all(sent["x-key"] == "k" for sent in receiver.metadata)


STATES = ("pinned", "leased", "quarantined")
