"""Processes that crash or leave under load, without effect on clients."""

import asyncio
import signal
from functools import partial

import pytest
import pytest_asyncio

from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 8
ANSWER = 900


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow)]
)
async def cluster(request):
    """Two decode workers; one prefill worker, slow enough to be signalled mid-prompt."""
    slow = {
        "engine__prefill_chunk_tokens": 16,
        "engine__max_batched_tokens": 64,
        "router__queue__worker_backlog_s": 60.0,
        # What a drain may take is not what is tested: beside other work the answers take a slow machine half a minute.
        "prefill__drain_s": 300.0,
        "decode__drain_s": 300.0,
    }
    async with running(decode__replicas=2, transfer__transport=request.param, **slow) as made:
        yield made


@pytest.fixture(scope="module")
def long_prompts(oracle):
    made = [oracle.story(7000 + i, 1100 + 16 * i) for i in range(STREAMS)]
    return made, [oracle.tokens(prompt, 24) for prompt in made]


@pytest.fixture(scope="module")
def long_answers(oracle):
    made = [oracle.story(8000 + i, 120) for i in range(STREAMS)]
    return made, oracle.batch(made, ANSWER)


async def retries(cluster, reason):
    return await cluster.figure("tandem_dispatch_retries_total", reason=reason)


async def stop_at_the_first_token(cluster, prompts, salt, signum):
    """Send the prompts, and a signal to the prefill worker when one is complete and the others are in flight."""
    gone = asyncio.Event()

    def send_signal(_):
        if not gone.is_set():
            gone.set()
            cluster.local.kill("prefill-0", signum)

    streams = [
        asyncio.ensure_future(cluster.stream(prompt, 24, on_token=send_signal, cache_salt=salt)) for prompt in prompts
    ]
    await gone.wait()
    return streams


@pytest.mark.turn(2)
async def test_prefill_worker_killed_mid_prefill_loses_no_request(cluster, oracle, long_prompts):
    prompts, expected = long_prompts
    before, pid, salt = await retries(cluster, "transfer_failed"), cluster.pid("prefill-0"), "killed"
    answers = await asyncio.gather(*await stop_at_the_first_token(cluster, prompts, salt, signal.SIGKILL))
    assert [one.token_ids for one in answers] == expected
    assert await retries(cluster, "transfer_failed") > before
    await cluster.comes_back("prefill-0", pid)

    before = await cluster.disaggregated()
    again = oracle.story(9000, 200)
    assert await cluster.tokens(again, 24, cache_salt=salt) == oracle.tokens(again, 24)
    assert await cluster.disaggregated() == before + 1
    await cluster.until_idle()


async def received(cluster, outcome):
    return await cluster.figure("tandem_worker_transfers_total", direction="received", kind="handoff", outcome=outcome)


@pytest.mark.turn(3)
async def test_prefill_worker_drains_after_last_handoff(cluster, oracle, long_prompts):
    prompts, expected = long_prompts
    pid, num_lines = cluster.pid("prefill-0"), len(cluster.logs.lines)
    outcomes = ("committed", "failed", "expired", "cancelled")
    before = {outcome: await received(cluster, outcome) for outcome in outcomes}
    streams = await stop_at_the_first_token(cluster, prompts, "drained", signal.SIGTERM)

    async def is_draining():
        return any("prefill-0 is draining" in line for line in cluster.logs.lines[num_lines:])

    await cluster.until(is_draining)
    placed, late = await cluster.disaggregated(), oracle.story(9100, 200)
    assert await cluster.tokens(late, 24) == oracle.tokens(late, 24)
    assert await cluster.disaggregated() == placed, "it takes nothing new"
    answers = await asyncio.gather(*streams)
    assert [one.token_ids for one in answers] == expected
    await cluster.comes_back("prefill-0", pid)
    assert any("prefill-0: exited with code 0" in line for line in cluster.logs.lines[num_lines:])
    await cluster.until_idle()
    after = {outcome: await received(cluster, outcome) for outcome in outcomes}
    # A commit of an earlier test may have been reported since.
    assert after["committed"] >= before["committed"] + STREAMS, "all that was outstanding was served"
    assert after | {"committed": 0} == before | {"committed": 0}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.in_turns
async def test_decode_worker_leaving_mid_stream_loses_no_stream(cluster, oracle, long_answers, signum):
    prompts, expected = long_answers
    before, salt = await retries(cluster, "worker_lost"), f"decode {signum.name}"
    reading: set[int] = set()
    all_read = asyncio.Event()

    def watch(index, got):
        if len(got.token_ids) >= 3:
            reading.add(index)
        if len(reading) == STREAMS:
            all_read.set()

    streams = [
        asyncio.ensure_future(cluster.stream(p, ANSWER, on_token=partial(watch, i), cache_salt=salt))
        for i, p in enumerate(prompts)
    ]
    await all_read.wait()
    victim, pid = await cluster.kill_the_busiest(signum)
    answers = await asyncio.gather(*streams)
    assert [one.token_ids for one in answers] == expected
    assert [one.text for one in answers] == [oracle.decode(tokens) for tokens in expected]
    assert {one.usage["completion_tokens"] for one in answers} == {ANSWER}
    lost = await retries(cluster, "worker_lost") - before
    assert lost > 0 if signum is signal.SIGKILL else lost == 0, "a kill loses what runs there, a drain loses nothing"
    await cluster.comes_back(victim, pid)
    await cluster.until_idle()


async def test_router_restart_keeps_cluster_serving(cluster, oracle):
    pid = cluster.pid("router")
    cluster.local.kill("router")
    await cluster.local.wait_ready("router", after_pid=pid)
    await cluster.until_workers(len(cluster.local.workers))
    prompt = oracle.story(9001, 200)
    assert await cluster.tokens(prompt, 24) == oracle.tokens(prompt, 24)
    await cluster.until_idle()
