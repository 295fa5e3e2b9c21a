"""Clusters whose engines look ahead and offload, in pools too small for what is asked: nobody can tell.

Every answer is that of `transformers`, or, where it is drawn, that of a cluster with room whose engine waits for every
step and is asked one thing at a time.
"""

import asyncio
import json
import random
import signal

import grpc.aio
import pytest
import pytest_asyncio

from cluster.processes.effective_config import module_command, module_prefix
from cluster.supervisor.supervisor import Role
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.e2e.observed_decode_worker import MARK, observed
from tests.support.oracle import noise, prompts
from tests.support.running_cluster import Streamed, body, running

TOO_LATE = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TOKENS = 64
TIGHT = {"engine__pipelined": "on", "engine__num_blocks": 40, "engine__offload_bytes": 4 << 20, "decode__replicas": 2}
WAYS = {"shm": {}}
LONG_WAYS = {
    "colocated": {"prefill__replicas": 0},
    "tcp": {"transfer__transport": "tcp", "engine__prefill_chunk_tokens": 16},
    "few-places": {"prefill__replicas": 0, "engine__offload_bytes": 16 << 16},
    "tp-2": {"prefill__replicas": 0, "decode__tensor_parallel_size": 2},
}
NUM_CHOICES = 3
LONG = 450


def command(plan, config_path, ready_fd):
    """Decode workers that log what they do."""
    usual = module_command(plan, config_path, ready_fd)
    if plan.role is not Role.DECODE:
        return usual
    prefix = module_prefix(plan.role)
    return [*prefix[:-1], "tests.support.e2e.observed_decode_worker", *usual[len(prefix) :]]


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[*WAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG_WAYS)],
)
async def cluster(request):
    async with running(command=command, **TIGHT | (WAYS | LONG_WAYS)[request.param]) as made:
        yield made


def drawn(seed):
    """Random options: those that depend on earlier tokens, end early, or sample."""
    draw = random.Random(seed)
    return {
        "seed": seed,
        "temperature": draw.choice([0, 0.8, 1.5]),
        "top_p": draw.choice([1.0, 0.9]),
        "top_k": draw.choice([0, 50]),
        "repetition_penalty": draw.choice([1.0, 1.2]),
        "presence_penalty": draw.choice([0.0, 0.5]),
        "frequency_penalty": draw.choice([0.0, 0.7]),
        "logprobs": draw.choice([None, 3]),
        "stop": draw.choice([None, ["e "], ["the", " a"], ["zzz"]]),
        "stop_token_ids": draw.choice([[], draw.sample(range(300, 2000), 60)]),
        "ignore_eos": draw.random() < 0.5,
        "n": draw.choice([1, 1, NUM_CHOICES]),
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def inference(cluster):
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        yield InferenceStub(channel)


@pytest.fixture(scope="module")
def cases(oracle):
    made = []
    for i, prompt in enumerate(prompts(oracle, 16, seed=11)):
        made.append((prompt[:330], random.Random(i).choice([1, 2, 40, 80]), drawn(i)))
    return made


@pytest.fixture(scope="module")
def long(oracle):
    """Streams of which no pool holds two to their end, and their answers."""
    made = [oracle.story(900 + i, 100) for i in range(4)]
    return made, oracle.batch(made, LONG)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(cluster, fork_servers, cases):
    """Unpipelined, one at a time, with room; over as many ranks, since their number changes the last bits."""
    size = cluster.local.config.decode.tensor_parallel_size
    plainly = {"prefill__replicas": 0, "decode__tensor_parallel_size": size, "engine__pipelined": "off"}
    async with running(command=fork_servers.command, **plainly) as plain:
        return [shown(await plain.complete(prompt, count, **more)) for prompt, count, more in cases]


def shown(answer):
    """All fields that depend neither on caches nor on time."""
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return answer["choices"], usage


async def together(cluster, cases, **more):
    return await asyncio.gather(*(cluster.complete(prompt, count, **own, **more) for prompt, count, own in cases))


@pytest.mark.slow
async def test_greedy_streams_equal_transformers(cluster, oracle):
    made = [(p, oracle.tokens(p, MAX_TOKENS)) for p in (prompt[:330] for prompt in prompts(oracle, 12, seed=5))]
    for salt in ("cold", "warm"):
        answers = await asyncio.gather(*(cluster.stream(p, MAX_TOKENS, cache_salt=salt) for p, _ in made))
        assert [
            i for i, (one, (_, expected)) in enumerate(zip(answers, made, strict=True)) if one.token_ids != expected
        ] == []
    await cluster.until_idle()


@pytest.mark.turn(1)
async def test_sampled_answers_do_not_depend_on_batch(cluster, cases, alone, long):
    for salt in ("first", "again"):
        streams = asyncio.gather(*(cluster.tokens(prompt, LONG, cache_salt=salt) for prompt in long[0]))
        answers = await together(cluster, cases, cache_salt=salt)
        assert await streams == long[1]
        differing = [i for i, one in enumerate(answers) if shown(one) != alone[i]]
        assert differing == [], [(cases[i][1:], shown(answers[i]), alone[i]) for i in differing[:1]]
    await cluster.until_idle()
    # In a crowd so small a pool may have no room for two choices at once.
    await cluster.complete(cases[0][0], 2, n=NUM_CHOICES, cache_salt="shared")
    await cluster.until_idle()
    lines, config = cluster.logs.lines, cluster.local.config
    assert not [line for line in lines if "the engine failed" in line]
    assert observed(lines, "saved"), "nobody's KV went to host memory"
    assert observed(lines, "loaded"), "nobody's KV came back"
    assert (observed(lines, "ahead") > 0) == (config.decode.tensor_parallel_size == 1)
    if not config.prefill.replicas:
        assert observed(lines, "copied"), "no choice shared a prompt"


@pytest.mark.turn(2)
async def test_nan_mid_stream_fails_that_stream_only(cluster, oracle):
    made = [oracle.story(600 + i, 90) for i in range(4)]
    expected = [oracle.tokens(prompt, 40) for prompt in made]

    async def poisoned(prompt):
        marked = body(prompt, 40, logit_bias={str(MARK[0]): MARK[1]}, stream=True)
        async with cluster.http.stream("POST", "/v1/completions", json=marked) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        return [token for chunk in chunks[:-1] for c in chunk["choices"] for token in c["token_ids"]], chunks[-1]

    *answers, (tokens, last) = await asyncio.gather(*(cluster.tokens(p, 40) for p in made), poisoned(made[0]))
    assert answers == expected
    # A stream that is continued elsewhere gets one more from the prefill worker, whose model is sound.
    assert 3 <= len(tokens) < 40
    assert last["error"]["code"], last
    await cluster.until_idle()
    assert await cluster.tokens(made[0], 40) == expected[0]


async def test_clients_leaving_at_any_token_disturb_no_other(cluster, oracle):
    """While others stream; some of those that leave are queued, some offloaded to host memory."""
    stays = [oracle.story(700 + i, 100) for i in range(3)]
    expected = [oracle.tokens(prompt, 150) for prompt in stays]

    async def leave(index):
        got = Streamed()
        prompt = [*stays[index % len(stays)][:80], *noise(index, 60)]
        chunks = cluster.chunks(prompt, 100, got, n=1 + index % 2)
        async for _ in chunks:
            if len(got.token_ids) >= index:
                break
        await chunks.aclose()

    streams = [asyncio.ensure_future(cluster.stream(prompt, 150)) for prompt in stays]
    await asyncio.gather(*(leave(index) for index in range(20)))
    answers = await asyncio.gather(*streams)
    assert [one.token_ids for one in answers] == expected
    await cluster.until_idle()


async def test_deadline_exceeded_leaves_nothing_behind(cluster, oracle, inference):
    """Before the first token or after some, while waiting, running or offloaded."""
    made = [oracle.story(800 + i, 100) for i in range(6)]
    sampling = common.SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

    async def give_up(prompt, patience_s):
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        got = []
        try:
            async for answer in inference.Generate(request, timeout=patience_s):
                got += answer.token_ids
        except grpc.aio.AioRpcError as error:
            # It may also have been in time, or have been refused at once.
            assert error.code() in TOO_LATE  # noqa: PT017
        return got

    answers = await asyncio.gather(*(give_up(prompt, 0.02 * 2**i) for i, prompt in enumerate(made)))
    expected = oracle.batch(made, max(map(len, answers), default=1) or 1)
    assert answers == [whole[: len(tokens)] for whole, tokens in zip(expected, answers, strict=True)]
    await cluster.until_idle()


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_decode_worker_leaving_mid_step_loses_no_stream(cluster, long, signum):
    """With a full pool: some of its requests wait, some are offloaded to host memory."""
    made, expected = long
    answers = asyncio.gather(*(cluster.stream(prompt, LONG, cache_salt=signum.name) for prompt in made))
    victim, pid = await cluster.kill_the_busiest(signum)
    received = await answers
    assert [one.token_ids for one in received] == expected
    await cluster.local.wait_ready(victim, after_pid=pid)
    await cluster.until_workers(len(cluster.local.workers))
    await cluster.until_idle()
