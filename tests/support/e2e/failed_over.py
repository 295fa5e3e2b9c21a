"""Requests that workers failed in a running cluster, as its traces and its logs tell of them."""

import asyncio
import json
import signal
from collections.abc import Sequence
from itertools import count
from typing import Any

from tests.support.otlp_receiver import OtlpReceiver, Received
from tests.support.running_cluster import WAIT_S, RunningCluster, Streamed, body

PREFILL = frozenset({"prefill-0", "prefill-1"})
ROOT = "text_completion tandem-tiny"
LONG = 400
_TOGETHER = 8
ON_ONE_WORKER = {"tandem.reserve", "tandem.handoff", "tandem.first_decode_step"}
"""Below the `tandem.decode` of an attempt whose prompt was handed over."""


def lines_of(cluster: RunningCluster, request_id: str) -> dict[str, list[dict[str, Any]]]:
    """What the processes, by name, have logged in JSON about a request."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in cluster.logs.lines:
        name, _, text = line.partition(": ")
        if text.startswith("{") and (record := json.loads(text)).get("request_id") == request_id:
            found.setdefault(name, []).append(record)
    return found


async def until_sent(cluster: RunningCluster) -> None:
    """Until a prefill worker is asked for a prompt, as its decode worker reports."""

    async def sent() -> bool:
        return await cluster.figure("tandem_worker_transfers_live", role="decode", direction="received") == 1

    await cluster.until(sent)


async def until_traced(receiver: OtlpReceiver, trace_id: str, names: Sequence[str]) -> list[Received]:
    """The trace's spans once those of these names have come, each as often as it stands here."""

    def has_come() -> bool:
        came = [span.name for span in receiver.of_trace(trace_id)]
        return all(came.count(name) >= names.count(name) for name in names)

    try:
        async with asyncio.timeout(WAIT_S):
            await receiver.until(has_come)
    except TimeoutError:
        came = [(span.name, span.instance) for span in receiver.of_trace(trace_id)]
        raise AssertionError(f"not {names} but {came}") from None
    return receiver.of_trace(trace_id)


async def until_both_are_linked(cluster: RunningCluster, oracle) -> None:
    """Until both prefill workers have handed something over."""
    seeds = count(600)

    async def both() -> bool:
        # Together, so that the slower one gets some; and more than one token: an answer that ends with its first
        # cancels its hand-off before the KV has landed.
        await asyncio.gather(*(cluster.tokens(oracle.story(next(seeds), 100), 8) for _ in range(_TOGETHER)))
        labels = {"role": "prefill", "direction": "sent", "kind": "handoff", "outcome": "committed"}
        # A worker that has sent nothing has no sample.
        sent = await cluster.figures("tandem_worker_transfers_total", **labels)
        return {worker for (_, worker), number in sent.items() if number} == PREFILL

    await cluster.until(both)


async def check_retried_hand_off(
    cluster: RunningCluster, receiver: OtlpReceiver, oracle, headers: dict[str, str]
) -> None:
    """One prefill worker freezes with a prompt; the other one computes it.

    Both hand-offs are of the same `tandem.decode`, and every process that had a part tells of it under one id.
    """
    await until_both_are_linked(cluster, oracle)
    prompt, trace_id = oracle.story(250, 200), headers["traceparent"].split("-")[1]
    for name in PREFILL:
        cluster.local.kill(name, signal.SIGSTOP)
    request = asyncio.create_task(cluster.http.post("/v1/completions", json=body(prompt, 4), headers=headers))
    await until_sent(cluster)
    (decision,) = (await cluster.http.get("/debug/decisions?limit=1")).json()["data"]
    first: str = decision["prefill_worker"]
    (second,) = PREFILL - {first}
    cluster.local.kill(second, signal.SIGCONT)
    answer = await request
    cluster.local.kill(first, signal.SIGCONT)
    assert answer.json()["choices"][0]["token_ids"] == oracle.tokens(prompt, 4)
    request_id = answer.headers["x-request-id"]
    spans = await until_traced(
        receiver, trace_id, [ROOT, "tandem.decode", "tandem.handoff", "tandem.handoff", "tandem.send", "tandem.send"]
    )
    by_name = {span.name: span for span in spans}
    root, decode = by_name[ROOT], by_name["tandem.decode"]
    assert decode.parent_id == root.span_id
    handoffs = sorted((s for s in spans if s.parent_id == decode.span_id and s.name == "tandem.handoff"), key=started)
    assert [span.failed for span in handoffs] == [True, False]
    assert [span.attributes["tandem.transfer.attempt"] for span in handoffs] == [1, 2]
    senders = {s.parent_id: s.instance for s in spans if s.name == "tandem.send"}
    assert [senders.get(span.span_id) for span in handoffs] == [first, second]
    assert [s.parent_id for s in spans if s.name == "tandem.place"] == [root.span_id] * 2

    async def is_logged() -> bool:
        return {"router", "decode-0", first} <= lines_of(cluster, request_id).keys()

    await cluster.until(is_logged)
    logged = lines_of(cluster, request_id)
    assert any(f"hand-off from {first} failed" in line["message"] for line in logged["router"])
    assert any("attempt 1, expired" in line["message"] for line in logged["decode-0"])
    assert any("attempt 1, cancelled" in line["message"] for line in logged[first])


async def read(
    cluster: RunningCluster, prompt: list[int], headers: dict[str, str], got: Streamed, begun: asyncio.Event
) -> str:
    """A stream to its end, into `got`; its request's id."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    post = cluster.http.stream("POST", "/v1/completions", json=body(prompt, LONG, **more), headers=headers)
    async with post as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    got.token_ids += choice.get("token_ids") or []
                begun.set()
        return response.headers["x-request-id"]


async def check_lost_decoder(cluster: RunningCluster, receiver: OtlpReceiver, oracle, headers: dict[str, str]) -> None:
    """The only decode worker is told to stop, and dies before it has answered: its stream and all who came meanwhile
    wait for its successor, and nobody is refused. The attempt that goes on is the lost one's sibling.
    """
    prompt, got, begun = oracle.story(400, 200), Streamed(), asyncio.Event()
    trace_id, pid = headers["traceparent"].split("-")[1], cluster.pid("decode-0")

    stream = asyncio.create_task(read(cluster, prompt, headers, got, begun))
    await begun.wait()
    cluster.local.kill("decode-0", signal.SIGTERM)
    await cluster.until(lambda: has_logged(cluster, "worker decode-0 is draining"))
    cluster.local.kill("decode-0", signal.SIGSTOP)
    assert len(got.token_ids) < LONG, "caught in the middle"
    late = [oracle.story(500 + i, 100) for i in range(2)]
    requests = [asyncio.create_task(cluster.tokens(one, 4)) for one in late]

    async def all_queued() -> bool:
        return await cluster.figure("tandem_queue_requests") == len(late)

    await cluster.until(all_queued)
    cluster.local.kill("decode-0", signal.SIGKILL)
    request_id = await stream
    assert await asyncio.gather(*requests) == [oracle.tokens(one, 4) for one in late]
    await cluster.comes_back("decode-0", pid)
    assert got.token_ids == await cluster.tokens(prompt, LONG), "as undisturbed"

    spans = await until_traced(receiver, trace_id, [ROOT, "tandem.decode", "tandem.place", "tandem.place"])
    (root,) = (span for span in spans if span.name == ROOT)
    (survivor,) = (span for span in spans if span.name == "tandem.decode")
    places = [span for span in spans if span.name == "tandem.place"]
    assert {survivor.parent_id, *(place.parent_id for place in places)} == {root.span_id}
    assert {span.name for span in spans if span.parent_id == survivor.span_id} >= ON_ONE_WORKER
    (lost,) = (s for s in spans if s.name == "tandem.send" and s.start_ns < survivor.start_ns)
    known = {span.span_id: span for span in spans}
    assert survivor.span_id not in ancestors(known, lost), "the first attempt's are not the second's"
    logged = lines_of(cluster, request_id)
    assert any("its worker was lost" in line["message"] for line in logged["router"])
    assert any("continues here after" in line["message"] for line in logged["decode-0"])


def ancestors(known: dict[str, Received], span: Received) -> set[str]:
    """Ids of all spans above one, as far as they were sent."""
    found = set()
    while (parent := known.get(span.parent_id)) is not None:
        found.add(parent.span_id)
        span = parent
    return found | {span.parent_id}


async def has_logged(cluster: RunningCluster, words: str) -> bool:
    """Whether any process has logged that."""
    return any(words in line for line in cluster.logs.lines)


def started(span: Received) -> int:
    """For the order in which spans began."""
    return span.start_ns
