"""Timings of real requests: phases add up, sources are named, a failover is reported, tenants' totals agree."""

import asyncio
import json
import signal
import time

import grpc.aio
import pytest
import pytest_asyncio

from cluster.cli.profile import profile
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.running_cluster import body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"X-Tandem-Timing": "1"}
PHASES = ("queue_s", "prefill_s", "transfer_s", "decode_queue_s", "decode_s")
SETTINGS = {
    "profiling__enabled": True,
    "decode__replicas": 2,
    "prices": {"completion_per_million": 5.0, "prompt_per_million": 1.0, "cached_discount": 0.5, "currency": "EUR"},
}
ROUNDED_S = 1e-5


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, **SETTINGS) as made:
        yield made


async def ask(cluster, prompt, num_tokens, **more):
    """The answer, and its times as the client saw them."""
    begun_s = time.monotonic()
    answer = await cluster.http.post("/v1/completions", json=body(prompt, num_tokens, **more), headers=ASK)
    took_s = time.monotonic() - begun_s
    assert answer.status_code == 200, answer.text
    return answer, took_s


def check(timing, usage, took_s):
    """Each phase is within its bounds, and their sum is within the request's time and complete."""
    assert all(timing[phase] >= 0.0 for phase in PHASES), timing
    spent_s = sum(timing[phase] for phase in PHASES)
    assert spent_s <= timing["total_s"] + ROUNDED_S, timing
    assert timing["total_s"] == pytest.approx(spent_s + timing["other_s"], abs=ROUNDED_S)
    assert timing["total_s"] <= took_s
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert timing["cached_tokens"] == sum(timing["cached_by_source"].values()) == cached
    cost = timing["cost"]
    paid = (usage["prompt_tokens"] - cached / 2) * 1.0 + usage["completion_tokens"] * 5.0
    assert cost["amount"] == pytest.approx(paid / 1e6, abs=1e-9)
    assert cost["currency"] == "EUR"


async def test_timing_covers_handoff_and_cached_prompt(cluster, oracle):
    prompt = oracle.story(9800, 200)
    before = await cluster.disaggregated()
    answer, took_s = await ask(cluster, prompt, 24)
    response = answer.json()
    assert await cluster.disaggregated() == before + 1
    timing = response["timing"]
    check(timing, response["usage"], took_s)
    assert min(timing["prefill_s"], timing["transfer_s"], timing["decode_s"]) > 0.0
    assert (timing["retry_amplification"], timing["cached_tokens"]) == (1.0, 0)
    assert timing["cost"]["kv_byte_s"] > 0.0
    header = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert float(header["decode"]) == pytest.approx(1000 * timing["decode_s"], abs=0.01)

    answer, took_s = await ask(cluster, prompt, 24)
    response = answer.json()
    check(response["timing"], response["usage"], took_s)
    assert response["timing"]["cached_tokens"] >= 160
    pools = response["timing"]["cached_by_source"]
    assert pools["prefill_pool"] + pools["decode_pool"] + pools["fetched"] == response["timing"]["cached_tokens"]


async def test_timing_covers_several_choices_and_stop_string(cluster, oracle):
    answer, took_s = await ask(cluster, oracle.story(9801, 120), 24, n=3, seed=1, temperature=1.0)
    response = answer.json()
    check(response["timing"], response["usage"], took_s)
    first = response["choices"][0]["text"][5:9]
    answer, took_s = await ask(cluster, oracle.story(9801, 120), 24, n=3, seed=1, temperature=1.0, stop=[first])
    response = answer.json()
    assert "stop" in {choice["finish_reason"] for choice in response["choices"]}
    check(response["timing"], response["usage"], took_s)


async def test_timing_over_grpc_equals_http(cluster, oracle):
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=oracle.story(9802, 100)),
            sampling=common.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
        begun_s = time.monotonic()
        call = InferenceStub(channel).Generate(request)
        usage = [response.usage async for response in call if response.HasField("usage")][-1]
        took_s = time.monotonic() - begun_s
        trailing = dict(await call.trailing_metadata())
    timing = json.loads(trailing["tandem-timing"])
    shown = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    check(timing, shown, took_s)
    assert trailing["server-timing"].startswith("queue;dur=")
    assert usage.times.decode_s == pytest.approx(timing["decode_s"], abs=ROUNDED_S)
    assert usage.times.kv_byte_s > 0.0


async def test_timing_totals_equal_sums_over_answers(cluster, oracle):
    before = (await cluster.http.get("/v1/usage")).json()["total"]
    answers = [(await ask(cluster, oracle.story(9804 + i, 90), 5))[0].json() for i in range(3)]
    after = (await cluster.http.get("/v1/usage")).json()
    assert after["currency"] == "EUR"
    assert [one["tenant"] for one in after["data"]] == ["default"]
    total = after["total"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert total[name] - before[name] == sum(answer["usage"][name] for answer in answers)
    for name in ("prefill_s", "decode_s", "kv_byte_s"):
        spent = sum(answer["timing"]["cost"][name] for answer in answers)
        assert total[name] - before[name] == pytest.approx(spent, abs=0.01)
    assert total["cost"] - before["cost"] == pytest.approx(
        sum(answer["timing"]["cost"]["amount"] for answer in answers), abs=1e-8
    )


async def test_timing_after_a_failover_reports_recomputed_tokens(cluster, oracle):
    prompt, num_tokens = oracle.story(9803, 150), 900
    ask_it = body(prompt, num_tokens, stream=True, stream_options={"include_usage": True})
    victim, chunk = "", {}
    begun_s = time.monotonic()
    async with cluster.http.stream("POST", "/v1/completions", json=ask_it, headers=ASK) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not victim:
                decisions = (await cluster.http.get("/debug/decisions?limit=1")).json()["data"]
                victim = decisions[0]["decode_worker"]
                cluster.local.kill(victim, signal.SIGKILL)
    took_s = time.monotonic() - begun_s
    timing, usage = chunk["timing"], chunk["usage"]
    check(timing, usage, took_s)
    assert usage["completion_tokens"] == num_tokens
    assert 1.0 < timing["retry_amplification"] < 4.0


async def test_profile_of_a_busy_cluster_is_returned(cluster, oracle, tmp_path):
    """A trace of a worker's steps and the router's stacks, through the command, with a request under way."""
    stop = asyncio.Event()

    async def work():
        for seed in range(100, 100_000):
            await cluster.tokens(oracle.story(seed, 100), 16)
            if stop.is_set():
                return

    working = asyncio.create_task(work())
    try:
        url = cluster.local.http_url
        trace, flame = tmp_path / "trace.json", tmp_path / "flame.svg"
        await asyncio.to_thread(profile, out=trace, worker="prefill-0", steps=2, seconds=60.0, url=url)
        await asyncio.to_thread(profile, out=flame, router=True, seconds=0.2, url=url)
    finally:
        stop.set()
    await working
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert [name.partition(":")[0] for name in names if name.startswith("step ")] == ["step 1", "step 2"]
    assert any("tokens" in name for name in names)
    assert "event loop" in flame.read_text()
