"""Several router processes behind one port act as one cluster, also when one is lost."""

import asyncio
import signal
import time

import httpx
import pytest
import pytest_asyncio

from tests.support.running_cluster import WAIT_S, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = 24
LOOKS = 12
NUM_PROCESSES = 3
PER_MINUTE = 5
IN_A_ROW = 20
LONG = 1500
SETTINGS = {
    "router__processes": NUM_PROCESSES,
    "router__api_keys": [
        {"key": "key-of-all"},
        {"key": "key-of-operator", "operator": True},
        {"key": "key-of-few", "tenant": "few"},
        {"key": "key-of-one", "tenant": "one"},
    ],
    "router__limits": {"tenants": {"few": {"requests_per_minute": PER_MINUTE}, "one": {"concurrent_requests": 1}}},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster():
    async with running(**SETTINGS) as made:
        yield made


async def post(cluster, prompt, num_tokens, key="key-of-all", **more):
    """Over a new connection: the kernel chooses the process."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
        return await http.post("/v1/completions", json=body(prompt, num_tokens, **more), headers=headers)


async def request_named_cache(cluster, method, name="", **more):
    """One request about a named cache, to any of the processes."""
    headers = {"Authorization": "Bearer key-of-all"}
    path = f"/v1beta/{name or 'cachedContents'}"
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, verify=False) as http:
        return await http.request(method, path, headers=headers, **more)


async def looks_at(cluster, name=""):
    """Status and body over so many connections."""
    responses = await asyncio.gather(*(request_named_cache(cluster, "GET", name) for _ in range(LOOKS)))
    return [(look.status_code, look.json()) for look in responses]


async def chat_with(cluster, name):
    """The usage of a question behind a named cache."""
    request = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2, "cached_content": name}
    headers = {"Authorization": "Bearer key-of-all"}
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, verify=False) as http:
        response = await http.post("/v1/chat/completions", json=request, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


async def make_named(cluster):
    """Return the description of a named cache as its creator gets it."""
    rules = " ".join(f"Rule {i}: be kind to the fox number {i}." for i in range(8))
    body = {"model": "tandem-tiny", "systemInstruction": {"parts": [{"text": rules}]}, "ttl": "600s"}
    made = await request_named_cache(cluster, "POST", json=body)
    assert made.status_code == 200, made.text
    return made.json()


async def ask(cluster, prompt, num_tokens=8):
    """Return the token ids of a completion."""
    response = await post(cluster, prompt, num_tokens)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def usage(cluster, key):
    """The usage that the key's holder may see."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
        return (await http.get("/v1/usage", headers=headers)).json()


async def figure(cluster, name, **labels):
    """Return a metric's value from whichever process answers."""
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
        text = (await http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items()))


@pytest.mark.turn(0)
async def test_router_processes_metrics_cover_all_processes(cluster, oracle):
    prompt = oracle.story(9500, 60)
    expected = oracle.tokens(prompt, 8)
    assert await asyncio.gather(*(ask(cluster, prompt) for _ in range(ASKED))) == [expected] * ASKED
    totals = [await figure(cluster, "vllm:request_success_total") for _ in range(6)]
    assert totals == [ASKED] * 6, "whichever process was asked"
    books = [await usage(cluster, "key-of-operator") for _ in range(6)]
    assert [book["total"]["requests"] for book in books] == [ASKED] * 6
    assert (await usage(cluster, "key-of-few"))["total"]["requests"] == 0
    assert await figure(cluster, "tandem_workers", role="decode", state="live") == 1
    names = {view.name for view in cluster.local.processes}
    assert {"router-0", "router-1", "router-2"} <= names


@pytest.mark.turn(1)
async def test_router_processes_status_covers_all_processes(cluster, oracle):
    async def status(key="key-of-all"):
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
            return (await http.get("/status/snapshot", headers=headers)).json()

    prompt = oracle.story(9503, 60)
    await asyncio.gather(*(ask(cluster, prompt) for _ in range(ASKED)))
    for _ in range(4):  # whichever process is asked
        answer = await status()
        assert answer["processes"] == NUM_PROCESSES
        assert [len(pool["workers"]) for pool in answer["pools"]] == [1, 1]
        assert {len(decision["request_id"]) > 30 for decision in answer["decisions"]} == {True}
    assert (await status("key-of-few"))["decisions"] == []
    # A whole step of the history has to pass: all that was read, by whichever process, is in the curves then.
    async with asyncio.timeout(WAIT_S):
        while sum((await status())["curves"]["prompt_tokens_per_s"]) * 5 < ASKED * len(prompt):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_named_cache_is_shared_by_router_processes(cluster):
    cache = await make_named(cluster)
    name, num_tokens = cache["name"], cache["usageMetadata"]["totalTokenCount"]
    assert await looks_at(cluster, name) == [(200, cache)] * LOOKS
    used = await asyncio.gather(*(chat_with(cluster, name) for _ in range(LOOKS)))
    assert min(usage["prompt_tokens_details"]["cached_tokens"] for usage in used) >= num_tokens

    async def one_pin():
        return await cluster.figure("tandem_worker_pinned_prefixes") == 1

    await cluster.until(one_pin)  # reported with the worker's next load; whichever process renews it, it is one
    patched = (await request_named_cache(cluster, "PATCH", name, json={"ttl": "1200s"})).json()
    assert patched["expireTime"] > cache["expireTime"]
    assert await looks_at(cluster) == [(200, {"cachedContents": [patched]})] * LOOKS
    assert (await request_named_cache(cluster, "DELETE", name)).json() == {}
    assert {status for status, _ in await looks_at(cluster, name)} == {404}


async def test_router_process_killed_is_restarted(cluster, oracle):
    cache = await make_named(cluster)
    prompt, pid = oracle.story(9501, 60), cluster.pid("router-1")
    expected = oracle.tokens(prompt, 8)
    cluster.local.kill("router-1", signal.SIGKILL)
    while cluster.pid("router-1") == pid:  # noqa: ASYNC110 - the supervisor learns of it by itself
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*(ask(cluster, prompt) for _ in range(ASKED))) == [expected] * ASKED
    await cluster.local.wait_ready("router-1", after_pid=pid)
    assert await asyncio.gather(*(ask(cluster, prompt) for _ in range(ASKED))) == [expected] * ASKED
    assert await looks_at(cluster, cache["name"]) == [(200, cache)] * LOOKS, "it has learned what the others have"


async def test_hung_router_process_is_replaced(cluster, oracle):
    prompt, pid = oracle.story(9502, 60), cluster.pid("router-2")
    cluster.local.kill("router-2", signal.SIGSTOP)
    await cluster.local.wait_ready("router-2", after_pid=pid)
    assert any(line.startswith("router-2: no heartbeat for") for line in cluster.logs.lines)
    assert await asyncio.gather(*(ask(cluster, prompt) for _ in range(ASKED))) == [oracle.tokens(prompt, 8)] * ASKED


async def test_rate_limit_over_router_processes_is_exact(cluster):
    began_s = time.monotonic()
    answers = [await post(cluster, (300, 301), 1, key="key-of-few") for _ in range(IN_A_ROW)]
    served = [answer.status_code for answer in answers].count(200)
    assert {answer.status_code for answer in answers} == {200, 429}
    assert PER_MINUTE <= served <= PER_MINUTE + (time.monotonic() - began_s) * PER_MINUTE / 60.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [4, 40])
async def test_sequential_requests_are_never_refused_by_any_process(cluster, num_tokens, stream):
    answers = [await post(cluster, (300, 301), num_tokens, key="key-of-one", stream=stream) for _ in range(IN_A_ROW)]
    assert [answer.status_code for answer in answers] == [200] * IN_A_ROW
    assert not stream or all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)


async def test_second_concurrent_request_is_refused_by_any_process(cluster):
    headers, request = {"Authorization": "Bearer key-of-one"}, body((300, 301), LONG, stream=True)
    async with (
        httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=request, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        others = await asyncio.gather(*(post(cluster, (300, 301), 1, key="key-of-one") for _ in range(LOOKS)))
    assert [other.status_code for other in others] == [429] * LOOKS
    assert min(int(other.headers["retry-after"]) for other in others) >= 1

    async def is_served():
        return (await post(cluster, (300, 301), 1, key="key-of-one")).status_code == 200

    await cluster.until(is_served)  # once its process has seen that the client of the long one has left
