"""Requests that cannot be served get a clear 4xx at once, and do not affect a stream beside them."""

import asyncio

import pytest
import pytest_asyncio

from tests.support.running_cluster import body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_BLOCKS = 24
CONTEXT = 2048
VOCABULARY = 2048
GOOD = body(range(300, 320), 8)

BAD = {
    "longer than the context": (body([300] * (CONTEXT + 1), 8), 400, "context_length_exceeded"),
    "longer with its answer": (body([300] * CONTEXT, 8), 400, "context_length_exceeded"),
    "larger than the pool": (body([300] * (NUM_BLOCKS * 16 + 1), 8), 413, None),
    "another model": (GOOD | {"model": "gpt-4"}, 404, "model_not_found"),
    "not JSON": (b'{"prompt": [1, 2', 400, None),
    "nested without end": (b"[" * 100_000, 400, None),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', 400, None),
    "not an object": (b"[]", 400, None),
    "token out of range": (body([300, VOCABULARY], 8), 400, None),
    "negative token": (body([-1], 8), 400, None),
    "token of 64 bits": (body([2**63], 8), 400, None),
    "boolean token": (body([True], 8), 400, None),
    "half a token": (body([1.5], 8), 400, None),
    "no prompt": ({"max_tokens": 8}, 400, None),
    "empty list of prompts": (GOOD | {"prompt": []}, 400, None),
    "too many prompts": (GOOD | {"prompt": [[300]] * 1000}, 400, None),
    "no room for an answer": (body([300], 0), 400, None),
    "endless answer": (body([300], 2**63), 400, None),
    "temperature without end": (b'{"prompt": "a", "temperature": 1e400}', 400, None),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', 400, None),
    "too many choices": (GOOD | {"n": 2**31}, 400, None),
    "bias out of vocabulary": (GOOD | {"logit_bias": {str(VOCABULARY): 1.0}}, 400, None),
    "seed of 65 bits": (GOOD | {"seed": 2**64}, 400, None),
    "empty stop string": (GOOD | {"stop": [""]}, 400, None),
    "half a character": (b'{"prompt": "\\ud800"}', 400, None),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, engine__num_blocks=NUM_BLOCKS) as made:
        yield made


async def refuse(cluster, name):
    """Send it and check the answer's shape."""
    content, status, code = BAD[name]
    raw = {"content": content} if isinstance(content, bytes) else {"json": content}
    response = await cluster.http.post("/v1/completions", headers={"content-type": "application/json"}, **raw)
    error = response.json()["error"]
    assert response.status_code == status, (name, response.text)
    assert error["message"], name
    if code is not None:
        assert error["code"] == code, (name, error)


async def test_bad_input_is_refused_without_disturbing_streams(cluster, oracle):
    prompt = oracle.story(1, 100)
    expected = oracle.tokens(prompt, 120)
    stop = asyncio.Event()
    count = 0

    async def pester():
        nonlocal count
        while not stop.is_set():
            for name in BAD:
                await refuse(cluster, name)
            count += 1

    pest = asyncio.ensure_future(pester())
    salted = [await cluster.stream(prompt, 120, cache_salt=str(i)) for i in range(3)]
    stop.set()
    await pest
    assert count
    for answer in salted:
        assert answer.token_ids == expected
        assert answer.text == oracle.decode(expected)
        assert answer.finish_reason == "length"
    await cluster.until_idle()


async def test_requests_beyond_kv_pool_wait(cluster, oracle):
    """24 blocks serve 12 requests of up to 14 blocks each: by waiting and preemption, with the same tokens."""
    prompts = [oracle.story(100 + i, 150) for i in range(12)]
    answers = await asyncio.gather(*(cluster.tokens(prompt, 64) for prompt in prompts))
    assert answers == oracle.batch(prompts, 64)
    await cluster.until_idle()


async def test_answer_beyond_kv_pool_ends_with_length(cluster, oracle):
    prompt = oracle.story(3, 100)
    room = NUM_BLOCKS * 16 - len(prompt)
    answer = await cluster.complete(prompt, 1000)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["token_ids"] == oracle.tokens(prompt, room)


async def test_conversation_beyond_context_is_refused(cluster):
    chat = {"messages": [{"role": "user", "content": "word " * 3000}]}
    response = await cluster.http.post("/v1/chat/completions", json=chat)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
