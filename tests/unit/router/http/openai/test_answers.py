"""The HTTP server in process: the shapes of its answers."""

from collections.abc import AsyncIterator

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of, events


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer)


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


async def test_chat_unstreamed_answer_is_whole(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello wörld 😀")
    answer = await client.post(CHAT, json=HELLO, headers={"X-Tandem-Timing": "1"})
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == fakes.MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello wörld 😀", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", fakes.END)
    prompt = len(parts.generator.requests[0].prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "total_tokens": prompt + len(ids),
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert body["timing"] == {
        "queue_s": 0.25,
        "prefill_s": 0.5,
        "transfer_s": 0.125,
        "decode_queue_s": 0.25,
        "decode_s": 1.0,
        "other_s": 0.0,
        "total_s": 0.0,
        "cached_tokens": 7,
        "cached_by_source": {"prefill_pool": 4, "decode_pool": 0, "fetched": 2, "host": 1, "disk": 0},
        "retry_amplification": 1.5,
        "cost": {"prefill_s": 0.5, "decode_s": 1.0, "kv_byte_s": 2048.0, "amount": 0.0, "currency": "USD"},
    }
    queue, *_, total = answer.headers["server-timing"].split(", ")
    assert (queue, total) == ("queue;dur=250.000", "total;dur=0.000")


async def test_timing_is_sent_on_request_only(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("hello")
    answer = await client.post(CHAT, json=HELLO)
    assert "timing" not in answer.json()
    assert "server-timing" not in answer.headers


async def test_chat_stream_joins_to_whole_answer(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello 😀")
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = await client.post(CHAT, json=HELLO | options, headers={"X-Tandem-Timing": "1"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == list(parts.generator.requests[0].prompt_token_ids)
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
    assert "".join(texts) == "hello 😀"
    assert [i for c in chunks[:-1] for i in c["choices"][0].get("token_ids", [])] == ids
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["usage"] is None
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    assert chunks[-1]["timing"]["cached_tokens"] == 7


async def test_chat_stream_sends_continuous_usage_and_timing(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello world")
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events((await client.post(CHAT, json=HELLO | options, headers={"X-Tandem-Timing": "1"})).text)
    assert [c["usage"]["completion_tokens"] for c in chunks][-1] == len(ids)
    assert "timing" in chunks[-1]
    assert chunks[-1]["choices"]


async def test_chat_stream_choices_interleave(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello world")
    body = (await client.post(CHAT, json=HELLO | {"n": 3})).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["hello world"] * 3
    assert body["usage"]["completion_tokens"] == 3 * len(ids)
    chunks = events((await client.post(CHAT, json=HELLO | {"n": 3, "stream": True})).text)
    assert [c["choices"][0]["index"] for c in chunks[:3]] == [0, 1, 2]
    assert sum(c["choices"][0]["finish_reason"] == "stop" for c in chunks) == 3


async def test_chat_logprobs_cover_the_answer(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello", logprobs=True)
    body = (await client.post(CHAT, json=HELLO | {"logprobs": True, "top_logprobs": 2})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(ids)
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]) == b"hello"
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert parts.generator.requests[0].sampling.num_logprobs == 2


async def test_chat_stop_string_ends_the_answer(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("hello world STOP here", reason=FinishReason.LENGTH)
    request = HELLO | {"stop": ["STOP", "never"]}
    body = (await client.post(CHAT, json=request)).json()
    assert body["choices"][0]["message"]["content"] == "hello world "
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "STOP")
    assert parts.generator.stopped == [(parts.generator.requests[0].request_id, 0)]
    up_to_stop = len(parts.tokenizer.encode("hello world STOP"))
    assert body["usage"]["completion_tokens"] == up_to_stop
    shown = (await client.post(CHAT, json=request | {"include_stop_str_in_output": True})).json()
    assert shown["choices"][0]["message"]["content"] == "hello world STOP"
    chunks = events((await client.post(CHAT, json=request | {"stream": True})).text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello world "


async def test_stop_string_waits_for_min_tokens(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("ababab")
    count = len(parts.tokenizer.encode("ab"))
    body = (await client.post(CHAT, json=HELLO | {"stop": "ab", "min_tokens": count})).json()
    assert body["choices"][0]["message"]["content"] == "ab"


async def test_completions_answer_every_prompt_form(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello world", logprobs=True)
    for prompt, count in (("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6, 7]], 2)):
        body = (
            await client.post(PLAIN, json={"prompt": prompt, "n": 2, "logprobs": 1, "return_token_ids": True})
        ).json()
        assert [c["index"] for c in body["choices"]] == list(range(2 * count))
        assert {c["text"] for c in body["choices"]} == {"hello world"}
        assert body["choices"][0]["token_ids"] == ids
        assert body["choices"][0]["prompt_token_ids"] == list(parts.generator.requests[-count].prompt_token_ids)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 7 * count
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"][:-1]) == "hello world"
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


async def test_completions_stream_of_several_prompts(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello 漢字 world")
    request = {
        "prompt": ["one", [5, 6]][0:1] * 3,
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events((await client.post(PLAIN, json=request)).text)
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["onehello 漢字 world"] * 3
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * len(ids)
    assert parts.generator.open_streams == 0


async def test_completions_echo_token_ids_and_stop_token(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello world")
    request = {"prompt": parts.tokenizer.encode("fox"), "echo": True, "stop_token_ids": [ids[-2]]}
    parts.generator.script.tokens = ids[:-1]
    body = (await client.post(PLAIN, json=request)).json()
    without_last = parts.tokenizer.decode(ids[:-2])
    assert body["choices"][0]["text"] == "fox" + without_last
    assert body["choices"][0]["stop_reason"] == ids[-2]


async def test_models_and_tokenize_routes_answer(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (fakes.MODEL, fakes.CONTEXT)
    assert (await client.get(f"/v1/models/{fakes.MODEL}")).json() == card
    assert error_of(await client.get("/v1/models/a/b"))["code"] == "model_not_found"
    tokens = (await client.post("/tokenize", json={"prompt": "hello 😀", "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "hello 😀"}
    chat = (await client.post("/tokenize", json=HELLO)).json()
    assert chat["tokens"][0] == fakes.BOS
    for bad in ({}, {"prompt": "a"} | HELLO, {"prompt": "a", "model": "x"}):
        assert (await client.post("/tokenize", json=bad)).status_code in (400, 404)
    assert error_of(await client.post("/detokenize", json={"tokens": [-1]}))["param"] == "tokens"


async def test_health_and_readyz_answer(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200
    parts.ready.reason = "no decode worker"
    waiting = await client.get("/readyz")
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
    assert "no decode worker" in error_of(waiting)["message"]
    assert "version" in (await client.get("/version")).json()


@pytest.mark.parametrize(
    ("options", "along"), [({}, False), ({"stream": True}, True), ({"stop": ["wörld"]}, True), ({"n": 2}, False)]
)
async def test_unstreamed_answer_reads_along_only_for_stop_strings(
    parts: fakes.Servers, client: httpx.AsyncClient, options: dict[str, object], along: bool
) -> None:
    parts.say("hello wörld")
    assert (await client.post(CHAT, json=HELLO | options)).status_code == 200
    assert parts.generator.requests[0].reads_along is along


async def test_log_probabilities_name_tokens_by_their_ids(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello 😀", logprobs=True)
    named = [f"token_id:{token}" for token in ids]
    by_id = {"return_tokens_as_token_ids": True}
    for stream in (False, True):
        answer = await client.post(CHAT, json=HELLO | by_id | {"logprobs": True, "top_logprobs": 2, "stream": stream})
        choices = [chunk["choices"][0] for chunk in events(answer.text)] if stream else answer.json()["choices"]
        shown = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in shown] == named
        assert [[top["token"] for top in entry["top_logprobs"]] for entry in shown] == [
            [n, "token_id:5"] for n in named
        ]
        assert bytes(b for entry in shown[:-1] for b in entry["bytes"]).decode() == "hello 😀"
    body = {"prompt": "the fox", "logprobs": 2, "echo": True, "max_tokens": 20}
    shown = (await client.post(PLAIN, json=body | by_id)).json()["choices"][0]["logprobs"]
    in_words = (await client.post(PLAIN, json=body)).json()["choices"][0]["logprobs"]
    prompt = parts.generator.requests[-1].prompt_token_ids
    assert shown["tokens"] == [*(f"token_id:{token}" for token in prompt), *named]
    assert set(shown["top_logprobs"][-1]) == {named[-1], "token_id:5"}
    assert shown["text_offset"] == in_words["text_offset"]
