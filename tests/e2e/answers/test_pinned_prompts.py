"""Prompt caching with Anthropic's own client, on a cluster of real processes with small pools."""

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.support.running_cluster import WAIT_S, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "tandem-tiny"
KEPT = {"type": "ephemeral"}
BLOCKS = 96
"""Of each pool; one tenant may pin an eighth of them, which is one set of rules."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, engine__num_blocks=BLOCKS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster):
    async with anthropic.AsyncAnthropic(base_url=cluster.local.http_url, api_key="none", timeout=WAIT_S) as made:
        yield made


def rules(name):
    """Some 150 tokens that no other prompt has."""
    return f"You are {name}. " + " ".join(f"Rule {i} of {name}: be kind to the fox number {i}." for i in range(8))


async def ask(client, name, *, kept):
    """The usage of a short question under long rules, with or without a cache mark."""
    block = {"type": "text", "text": rules(name)}
    message = await client.messages.create(
        model=MODEL,
        max_tokens=4,
        extra_body={"temperature": 0.0},
        system=[block | ({"cache_control": KEPT} if kept else {})],
        messages=[{"role": "user", "content": "Who are you?"}],
    )
    assert message.stop_reason in {"end_turn", "max_tokens"}
    return message.usage


async def evict_everything(cluster, number):
    """Prompts, one by one, of twice all blocks of either pool. Each ends in both: its second token needs its KV."""
    before = await cluster.disaggregated()
    size = 32 * 16
    for at in range(2 * BLOCKS // 32):
        first = 10 + (number * 31 + at) % 200
        await cluster.complete([first, *(3 + (at * 7 + i * number) % 250 for i in range(size - 1))], 2)
    assert await cluster.disaggregated() > before


async def test_breakpoint_keeps_prefix_through_eviction(cluster, client):
    first = await ask(client, "Ben", kept=True)
    prompt = first.input_tokens + first.cache_creation_input_tokens
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens > 100
    assert (await ask(client, "Lily", kept=False)).cache_creation_input_tokens == 0
    await cluster.until(lambda: cluster.figure("tandem_worker_pinned_prefixes"))
    pinned = await cluster.figure("tandem_worker_pinned_blocks")
    assert pinned == first.cache_creation_input_tokens // 16
    await evict_everything(cluster, 1)
    kept, lost = await ask(client, "Ben", kept=True), await ask(client, "Lily", kept=False)
    assert kept.cache_read_input_tokens == first.cache_creation_input_tokens
    assert kept.cache_creation_input_tokens == 0
    assert kept.input_tokens == prompt - kept.cache_read_input_tokens
    assert lost.cache_read_input_tokens < 64, "nothing but what every such prompt begins with"


async def test_pin_is_renewed_by_use_and_shown_on_pins_page(cluster, client):
    await ask(client, "Tom", kept=True)
    renewed = await cluster.figure("tandem_worker_pinned_prefix_events_total", event="renewed")
    await ask(client, "Tom", kept=True)

    async def is_renewed():
        return await cluster.figure("tandem_worker_pinned_prefix_events_total", event="renewed") > renewed

    await cluster.until(is_renewed)
    shown = (await cluster.http.get("/debug/pins")).json()
    newest = shown["data"][0]
    assert newest["outcome"] == "held"
    assert 0.0 < newest["ends_in_s"] <= 300.0
    assert newest["num_tokens"] >= 100


async def test_anthropic_stream_counts_cached_tokens(cluster, client):
    await ask(client, "Mia", kept=True)
    starts, text = [], ""
    async with client.messages.stream(
        model=MODEL,
        max_tokens=8,
        extra_body={"temperature": 0.0},
        system=[{"type": "text", "text": rules("Mia"), "cache_control": KEPT}],
        messages=[{"role": "user", "content": "Who are you?"}],
    ) as stream:
        async for event in stream:
            if event.type == "message_start":
                starts.append(event.message.usage.cache_read_input_tokens)
            if event.type == "text":
                text += event.text
        final = await stream.get_final_message()
    assert text == final.content[0].text
    assert text
    assert starts == [final.usage.cache_read_input_tokens]
    assert starts[0] > 100
    counted = await client.messages.count_tokens(
        model=MODEL, system=rules("Mia"), messages=[{"role": "user", "content": "Who are you?"}]
    )
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


async def test_anthropic_refusals_raise_client_exceptions(client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(
            model=MODEL,
            max_tokens=4,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ],
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=4, messages=[{"role": "user", "content": "x"}])


async def test_named_cache_survives_eviction_until_deleted(cluster):
    body = {"model": MODEL, "systemInstruction": {"parts": [{"text": rules("Sam")}]}, "ttl": "600s"}
    made = await cluster.http.post("/v1beta/cachedContents", json=body)
    assert made.status_code == 200, made.text
    cache = made.json()
    kept_tokens = cache["usageMetadata"]["totalTokenCount"]
    assert kept_tokens > 100
    async with openai.AsyncOpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S) as client:
        await evict_everything(cluster, 2)
        answer = await client.chat.completions.create(
            model=MODEL,
            max_tokens=4,
            messages=[{"role": "user", "content": "Who are you?"}],
            extra_body={"cached_content": cache["name"]},
        )
        assert kept_tokens <= answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens
        assert (await cluster.http.delete(f"/v1beta/{cache['name']}")).status_code == 200
        await evict_everything(cluster, 4)
        answer = await client.chat.completions.create(
            model=MODEL,
            max_tokens=4,
            messages=[{"role": "system", "content": rules("Sam")}, {"role": "user", "content": "Who are you?"}],
        )
    assert answer.usage.prompt_tokens_details.cached_tokens < 64


async def test_cached_tokens_after_handoff_are_exact(cluster, client):
    """Only the prefill worker has the marked prefix; transferred tokens still count as cached."""
    first = await ask(client, "Zoe", kept=True)
    await evict_everything(cluster, 5)
    before = await cluster.disaggregated()
    block = {"type": "text", "text": rules("Zoe"), "cache_control": KEPT}
    question = " ".join(f"And what is number {i} of all?" for i in range(20))
    message = await client.messages.create(
        model=MODEL,
        max_tokens=4,
        system=[block],
        messages=[{"role": "user", "content": question}],
    )
    assert await cluster.disaggregated() == before + 1
    usage = message.usage
    assert usage.cache_read_input_tokens == first.cache_creation_input_tokens
    assert usage.input_tokens > 64


async def test_forced_tool_is_called(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    arguments = {
        "model": MODEL,
        "max_tokens": 200,
        "tools": [{"name": "weather", "description": "Tells the weather.", "input_schema": schema}],
        # Not two calls, which chance would have it make now and then.
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    }
    whole = await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        (call,) = message.content
        assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
        assert call.input["city"] in {"Rome", "Bern"}
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "It rains."}
    turns = [
        *arguments["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    after = await client.messages.create(**arguments | {"messages": turns, "tool_choice": {"type": "none"}})
    assert after.stop_reason in {"end_turn", "max_tokens"}
