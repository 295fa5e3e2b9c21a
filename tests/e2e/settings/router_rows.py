"""Settings of routers: bounds of requests, the queue, placement, grammars, kept prompts, probes, batches, parsers."""

import asyncio
import json
import math
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import jsonschema

from router.text.reasoning import FAMILIES, ThinkingMarks
from tests.e2e.settings.row import Asked, Row
from tests.support.oracle import noise
from tests.support.running_cluster import body

PROBE = "A fox sat by the river and waited for the heron to come back from the hills."
WORDS = [{"role": "user", "content": "Tell me about the fox. " * 12}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


async def refused(asked: Asked, path: str, request: dict[str, Any], *parts: str, status: int = 400) -> None:
    """It is, with a message that has these parts."""
    response = await asked.post(path, request)
    assert response.status_code == status, response.text
    assert all(part in response.text for part in parts), response.text


async def bounds_hold(asked: Asked) -> None:
    """One step beyond each bound is refused by the field's name; there is no page of decisions."""
    models = (await asked.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("my-model", 1500)]
    await refused(asked, "/v1/completions", body([300], 4, n=3), "n ", "2")
    await refused(asked, "/v1/completions", body([300], 4) | {"prompt": [[300], [301], [302]]}, "prompt", "2")
    await refused(asked, "/v1/completions", body([300], 300, n=2), "500")
    await refused(asked, "/v1/completions", body(noise(1, 1600), 4), "1500")
    assert (await asked.get("/debug/decisions")).status_code == 404
    long = [{"role": "user", "content": "A fox sat by the river. " * 180}, {"role": "assistant", "content": "Yes."}]
    for _ in range(2):
        answer = await asked.post("/v1/chat/completions", {"messages": [*long, *WORDS], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
    assert await asked.cluster.figure("tandem_tokenizer_cache_tokens_total", source="known") == 0


async def queue_is_bounded(asked: Asked) -> None:
    """One request runs; beyond five in the queue, or 2,000 tokens, the others get 429 with a time to come back."""
    for num_tokens in (80, 700):
        prompts = [noise(num_tokens + i, num_tokens) for i in range(14)]
        responses = await asyncio.gather(*(asked.post("/v1/completions", body(prompt, 8)) for prompt in prompts))
        served = 0
        for prompt, response in zip(prompts, responses, strict=True):
            if response.status_code == 200:
                served += 1
                assert response.json()["choices"][0]["token_ids"] == asked.oracle.tokens(prompt, 8)
            else:
                assert response.status_code == 429, response.text
                assert int(response.headers["Retry-After"]) >= 1
        assert 1 <= served <= (8 if num_tokens == 80 else 5)


async def prompts_stay(asked: Asked) -> None:
    """With the decode worker, whatever a hand-off would cost; a lost worker's only attempt was the last one."""
    assert await asked.cluster.disaggregated() == 0
    reading = asyncio.create_task(asked.post("/v1/completions", body(asked.oracle.story(3, 90), 400)))
    name, pid = await asked.cluster.kill_the_busiest(signal.SIGKILL)
    response = await reading
    assert response.status_code == 503, response.text
    await asked.cluster.comes_back(name, pid)


async def slow_requests_are_hedged(asked: Asked) -> None:
    """About half, by the median of the times so far; with the same tokens. So are the choices of a vote."""
    prompts = [noise(300 + i, 90) for i in range(120)]  # 64 are looked at before the first is hedged
    for at in range(0, len(prompts), 4):
        few = prompts[at : at + 4]
        got = await asyncio.gather(*(asked.cluster.tokens(prompt, 4) for prompt in few))
        assert got == [asked.oracle.tokens(prompt, 4) for prompt in few]
        if await asked.cluster.figure("tandem_hedges_total"):
            break
    assert await asked.cluster.figure("tandem_hedges_total") > 0
    best = await asked.cluster.complete(prompts[0], 8, best_of=3, n=1)
    assert best["choices"][0]["token_ids"] == asked.oracle.tokens(prompts[0], 8)
    vote = await asked.cluster.complete(prompts[1], 8, n=3, vote=True)
    assert vote["choices"][0]["token_ids"] == asked.oracle.tokens(prompts[1], 8)


async def grammars_are_bounded(asked: Asked) -> None:
    """Objects have no other properties than the schema names; a grammar that takes too long is refused."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    for seed in range(4):
        request = {"messages": WORDS, "max_tokens": 60, "temperature": 1.0, "seed": seed, "response_format": wanted}
        answer = (await asked.post("/v1/chat/completions", request)).json()
        assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"city"}
    endless = 'start: /[x-z]{3}/ /a+/ "a"'  # llguidance 1.9 never ends with it
    request = {"prompt": "The fox", "max_tokens": 4, "structured_outputs": {"grammar": endless}}
    await refused(asked, "/v1/completions", request, "structured_outputs", "more than 2 s")


async def kept_prompts_are_bounded(asked: Asked) -> None:
    """By number and by time; the pool's share is as set; what one tenant has computed, another finds."""
    for worker in asked.cluster.local.workers:
        (limit,) = (await asked.cluster.figures("tandem_worker_pinned_blocks_limit", worker=worker.name)).values()
        assert limit == 30
    cache = {
        "model": "models/tandem-tiny",
        "contents": [{"role": "user", "parts": [{"text": "Rules for foxes. " * 30}]}],
    }
    created = await asked.post("/v1beta/cachedContents", cache | {"ttl": "50s"}, key="key-of-a")
    assert created.status_code == 200, created.text
    for ttl, key, part in (("50s", "key-of-a", "1"), ("70s", "key-of-b", "ttl")):
        response = await asked.post("/v1beta/cachedContents", cache | {"ttl": ttl}, key=key)
        assert response.status_code in (400, 429), response.text
        assert part in response.text
    prompt = noise(5, 120)
    for key, num_cached in (("key-of-a", 0), ("key-of-b", 112)):
        response = (await asked.post("/v1/completions", body(prompt, 4), key=key)).json()
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
    figures = (await asked.get("/metrics", key="key-of-a")).text
    assert "tandem_worker_kv_blocks{" not in figures, "of the cluster, not of this tenant"


async def probe_has_its_text(asked: Asked) -> None:
    """Every worker has scored it, as `transformers` does."""
    ids = asked.oracle.encode(PROBE)
    logprobs = asked.oracle.logprobs(ids)
    loss = -sum(float(logprobs[i, token]) for i, token in enumerate(ids[1:])) / (len(ids) - 1)

    async def scored() -> bool:
        found = await asked.cluster.figures("tandem_quality_loss_nats")
        return len(found) == 2 and all(math.isclose(value, loss, rel_tol=1e-3) for value in found.values())

    await asked.cluster.until(scored)


def batch_of(count: int) -> bytes:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tandem-tiny"} | body([300 + i], 4),
        }
        for i in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


async def batches_are_bounded(asked: Asked) -> None:
    """By the size of a file and of all, the number of requests and of batches; what has ended goes in time."""
    http = asked.cluster.http

    async def upload(content: bytes) -> Any:
        return await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})

    async def create(file: str) -> Any:
        return await asked.post(
            "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        )

    assert (await upload(b" " * 2001)).status_code == 413
    three, four = (await upload(batch_of(3))).json()["id"], (await upload(batch_of(4))).json()["id"]
    first = await create(three)
    assert first.status_code == 200, first.text
    second = await create(three)
    if second.status_code != 200:  # the first had not ended
        assert second.status_code == 429, second.text
    batch = first.json()["id"]

    async def ended() -> bool:
        shown = (await asked.get(f"/v1/batches/{batch}")).json()
        return shown["status"] == "completed" and shown["request_counts"]["completed"] == 3

    await asked.cluster.until(ended)
    too_many = await create(four)
    if too_many.status_code == 200:

        async def failed() -> bool:
            return (await asked.get(f"/v1/batches/{too_many.json()['id']}")).json()["status"] == "failed"

        await asked.cluster.until(failed)
    else:
        assert too_many.status_code == 400, too_many.text
    assert list((asked.folder / "batches").iterdir())

    async def gone() -> bool:
        return (await asked.get(f"/v1/batches/{batch}")).status_code == 404

    await asked.cluster.until(gone)


async def tools_are_called(asked: Asked) -> None:
    """In the model's format, whatever it is, and told apart from text."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    request = {"messages": WORDS, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "temperature": 1.0}
    answer = await asked.post("/v1/chat/completions", request | {"parallel_tool_calls": False, "seed": 3})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
    plain = await asked.post("/v1/chat/completions", {"messages": WORDS, "max_tokens": 12})
    assert plain.status_code == 200, plain.text


def reasoning_is_told_apart(marks: ThinkingMarks) -> Callable[[Asked], Awaitable[None]]:
    """From an answer that a grammar makes begin with the mark."""

    async def check(asked: Asked) -> None:
        text = f"{marks.begin}It is a fox.{marks.end}A fox."
        request = {"messages": WORDS, "max_tokens": 60, "structured_outputs": {"choice": [text]}}
        message = (await asked.post("/v1/chat/completions", request)).json()["choices"][0]["message"]
        assert message["reasoning_content"]
        assert marks.begin not in message["reasoning_content"] + message["content"]

    return check


ROWS = {
    "bounds": Row(
        settings={
            "model.name": "my-model",
            "model.max_model_len": 1500,
            "router.max_choices": 2,
            "router.max_prompts": 2,
            "router.max_answer_values": 500,
            "router.decisions_kept": 0,
            "router.tokenizer_cache_bytes": 0,
            "router.stream_buffer_tokens": 64,
        },
        check=bounds_hold,
    ),
    "queue": Row(
        settings={
            "router.max_inflight_requests": 4,
            "router.queue": {
                "max_requests": 5,
                "max_tokens": 2000,
                "max_running_per_worker": 1,
                "max_itl_s": 60.0,
                "input_weight": 2.0,
                "output_weight": 3.0,
                "worker_backlog_s": 0.05,
            },
        },
        check=queue_is_bounded,
    ),
    "prompts-stay": Row(
        settings={
            "router.local_prefill_tokens": 2000,
            "router.max_local_prefill_tokens": 2000,
            "router.max_attempts": 1,
            "router.rejoin_s": 120.0,
            "router.takeover_s": 0.0,
        },
        check=prompts_stay,
        moves=False,
    ),
    "hedging": Row(
        settings={"router.hedging": {"quantile": 0.5, "budget": 0.5}, "prefill.replicas": 2, "decode.replicas": 2},
        check=slow_requests_are_hedged,
        moves=False,
    ),
    "grammars": Row(
        settings={
            "router.grammars": {"compile_s": 2.0, "compile_bytes": 128 << 20, "disable_additional_properties": True}
        },
        check=grammars_are_bounded,
    ),
    "kept-prompts": Row(
        settings={
            "engine.num_blocks": 100,
            "engine.pinned_share": 0.3,
            "engine.pinned_tenant_share": 0.2,
            "router.prompt_cache": {"shared_by_tenants": True, "max_pins": 8, "max_named": 1, "max_ttl_s": 60.0},
            "router.api_keys": [{"key": "key-of-all", "operator": True}, "key-of-a", "key-of-b"],
            "router.operator_access": {"metrics": "key"},
        },
        check=kept_prompts_are_bounded,
        key="key-of-all",
    ),
    "quality": Row(settings={"router.quality": {"period_s": 1.0, "text": PROBE}}, check=probe_has_its_text),
    "batches": Row(
        settings={
            "router.batches": {
                "path": "{folder}/batches",
                "max_file_bytes": 2000,
                "max_tenant_bytes": 8000,
                "max_requests": 3,
                "max_batches": 1,
                "max_concurrent": 1,
                "keep_s": 8.0,
            }
        },
        check=batches_are_bounded,
    ),
    **{
        f"tools-{name}": Row(
            settings={"router.tool_parser": name, "router.reasoning_parser": "none", "prefill.replicas": 0},
            check=tools_are_called,
            moves=False,
        )
        for name in ("hermes", "qwen3_coder", "mistral", "llama3", "deepseek", "pythonic")
    },
    **{
        f"reasoning-{name}": Row(
            settings={"router.reasoning_parser": name, "prefill.replicas": 0},
            check=reasoning_is_told_apart(marks),
            moves=False,
        )
        for name, marks in FAMILIES.items()
    },
}
