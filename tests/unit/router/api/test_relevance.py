"""Rerank and score: what each kind of model is asked, how answers look over both servers, and what is refused."""

import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import grpc.aio
import httpx
import pytest

from router.api import embeddings
from router.api.prompts import PromptReader
from router.api.relevance import completed
from router.grpc.server import GrpcServer, build_server
from router.text.tokenizer import Tokenizer
from router.types.requests import DeltaSink, RoutedRequest
from tandem.client.aio import AsyncClient
from tandem.config.admission import QueueConfig
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError
from tandem.pooling_model import JudgeStyle, PoolingModel, PoolingTask
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of, error_of

RERANK, SCORE = "/v1/rerank", "/v1/score"
ROLES = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'query' else '<|assistant|>' }}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EMBEDDER = PoolingModel(
    task=PoolingTask.EMBED,
    pooled_size=3,
    normalizes=True,
    prompts={"query": "the fox ", "passage": "a dog "},
    default_prompt_name="query",
)
JUDGE = PoolingModel(
    task=PoolingTask.JUDGE,
    prompts={"web": "hello"},
    default_prompt_name="web",
    true_token_id=7,
    false_token_id=9,
    max_tokens=60,
)
QWEN3 = PoolingModel(
    task=PoolingTask.JUDGE, style=JudgeStyle.QWEN3, begins_answer=True, true_token_id=7, false_token_id=9
)
CLASSIFIER = PoolingModel(task=PoolingTask.CLASSIFY, activation="identity")
DOCUMENTS = ["the fox", "a dog", "hello"]
FEW = {"truncate_prompt_tokens": 5}
YES = 1.0 / (1.0 + math.exp(-2.0))
"""The fake gives each label minus its id: 9 - 7."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer(ROLES)


async def ask(
    tokenizer: Tokenizer, pooling: PoolingModel | None, path: str, body: dict[str, Any]
) -> tuple[httpx.Response, fakes.Servers]:
    parts = fakes.make_servers(tokenizer, pooling=pooling)
    async with client_of(parts) as client:
        return await client.post(path, json=body), parts


async def test_rerank_embedder_gives_cosines_of_texts_behind_their_prompts(tokenizer: Tokenizer) -> None:
    response, parts = await ask(tokenizer, EMBEDDER, RERANK, {"query": "fox", "documents": DOCUMENTS})
    assert response.status_code == 200, response.text
    body = response.json()
    sent = [tokenizer.decode(request.prompt_token_ids) for request in parts.generator.requests]
    assert sent == ["the fox fox", "a dog the fox", "a dog a dog", "a dog hello"]
    assert [one["relevance_score"] for one in body["results"]] == pytest.approx([1.0] * 3)
    assert [one["document"]["text"] for one in body["results"]] == [DOCUMENTS[one["index"]] for one in body["results"]]
    tokens = sum(len(request.prompt_token_ids) for request in parts.generator.requests)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["model"], body["id"][:7]) == (fakes.MODEL, "rerank-")


async def test_rerank_classifier_is_ordered_and_cut(tokenizer: Tokenizer) -> None:
    """The fake's score grows with the number of tokens."""
    body = {"query": "fox", "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": False}
    response, parts = await ask(tokenizer, CLASSIFIER, RERANK, body)
    assert response.status_code == 200, response.text
    lengths = [len(tokenizer.encode("fox") + tokenizer.encode(one)) for one in DOCUMENTS]
    ranked = sorted(range(3), key=lambda index: -lengths[index])[:2]
    expected = [{"index": index, "relevance_score": 3.0 * lengths[index]} for index in ranked]
    assert response.json()["results"] == expected
    assert all(request.scoring.through_head for request in parts.generator.requests if request.scoring is not None)
    assert {request.operation for request in parts.generator.requests} == {"rerank"}


async def test_rerank_judge_reads_roles_and_compares_labels(tokenizer: Tokenizer) -> None:
    response, parts = await ask(tokenizer, JUDGE, RERANK, {"query": "fox", "documents": ["a <|user|> dog"]})
    assert response.status_code == 200, response.text
    assert response.json()["results"][0]["relevance_score"] == pytest.approx(YES)
    (request,) = parts.generator.requests
    assert request.scoring is not None
    assert request.scoring.label_token_ids == (7, 9)
    shown = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|assistant|>hello<|end|><|user|>fox<|end|><|assistant|>a <|user|> dog<|end|>"
    special = [one for one in request.prompt_token_ids if one in tokenizer.special_ids]
    assert len(special) == 6, "a client's literal is no control token"
    response, parts = await ask(
        tokenizer, JUDGE, RERANK, {"query": "fox", "documents": ["dog"], "instruction": "be kind"}
    )
    assert tokenizer.decode(parts.generator.requests[0].prompt_token_ids).startswith("be kindfox")


async def test_rerank_qwen3_has_the_model_cards_turns(tokenizer: Tokenizer) -> None:
    response, parts = await ask(tokenizer, QWEN3, RERANK, {"query": "fox", "documents": ["dog"]})
    assert response.status_code == 200, response.text
    shown = tokenizer.decode(parts.generator.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "<Query>: fox\n<Document>: dog<|end|><|assistant|>" in shown
    assert "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n" in shown
    assert 'the answer can only be "yes" or "no".' in shown


async def test_rerank_long_document_is_refused_or_cut(tokenizer: Tokenizer) -> None:
    long = {"query": "fox", "documents": ["dog", "漢字 " * 40]}
    for pooling in (JUDGE, CLASSIFIER):
        response, parts = await ask(tokenizer, pooling, RERANK, long | {"truncate_prompt_tokens": 40})
        assert response.status_code == 200, response.text
        assert max(len(request.prompt_token_ids) for request in parts.generator.requests) <= 40
        assert "fox" in tokenizer.decode(parts.generator.requests[1].prompt_token_ids)
    response, _ = await ask(tokenizer, JUDGE, RERANK, long)
    assert response.status_code == 400
    assert error_of(response)["param"] == "documents"
    assert "at most 60" in error_of(response)["message"]


async def test_rerank_document_beyond_any_context_is_cut_or_named(tokenizer: Tokenizer) -> None:
    long = "dog " * (8 * fakes.CONTEXT + 1)
    for pooling in (JUDGE, CLASSIFIER):
        body = {"text_1": "fox", "text_2": ["dog", long]}
        response, parts = await ask(tokenizer, pooling, SCORE, body | {"truncate_prompt_tokens": 40})
        assert response.status_code == 200, response.text
        assert 30 < len(parts.generator.requests[1].prompt_token_ids) <= 40
        response, parts = await ask(tokenizer, pooling, SCORE, body)
        assert (response.status_code, error_of(response)["param"]) == (400, "text_2")
        assert parts.generator.requests == [], "not even the first document"
        swapped = {"text_1": long, "text_2": "dog", "truncate_prompt_tokens": 40}
        response, parts = await ask(tokenizer, pooling, SCORE, swapped)
        assert (response.status_code, error_of(response)["param"]) == (400, "text_1")
        response, parts = await ask(tokenizer, pooling, SCORE, {"text_1": "fox " * 9, "text_2": "dog " * 9} | FEW)
        assert (response.status_code, error_of(response)["param"]) == (400, "text_2")
        assert "5 tokens leave no room for it" in error_of(response)["message"]


async def test_rerank_long_document_is_cut_off_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            inline.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    body = {"query": "fox", "documents": ["dog " * 2000, "漢字 " * 40], "truncate_prompt_tokens": 40}
    response, _ = await ask(tokenizer, JUDGE, RERANK, body)
    assert response.status_code == 200, response.text
    assert inline
    assert max(inline) < 4096


async def test_rerank_embedder_cuts_documents_alone(tokenizer: Tokenizer) -> None:
    embedder = dataclasses.replace(EMBEDDER, max_tokens=20, prompts={}, default_prompt_name=None)
    query = "zxqjvkw"
    count = len(tokenizer.encode(query))
    assert 3 < count <= 20
    for path, body in (
        (RERANK, {"query": query, "documents": [query, "a"]}),
        (SCORE, {"text_1": query, "text_2": [query, "a"]}),
    ):
        response, parts = await ask(tokenizer, embedder, path, body | {"truncate_prompt_tokens": 3})
        assert response.status_code == 200, response.text
        assert [len(request.prompt_token_ids) for request in parts.generator.requests] == [count, 3, 1]
    body = {"query": query * 20, "documents": ["a"], "truncate_prompt_tokens": -1}
    response, parts = await ask(tokenizer, embedder, RERANK, body)
    assert (response.status_code, error_of(response)["param"]) == (400, "query")
    assert "this model takes at most 20" in error_of(response)["message"]
    assert parts.generator.requests == []


class SteppedGenerator(fakes.FakeGenerator):
    """Advances a clock with each request, and notes the sizes of the calls that are admitted together."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.admitted_sizes: list[int] = []

    def admitted(self, requests: Sequence[RoutedRequest]) -> contextlib.AbstractContextManager[None]:
        self.admitted_sizes.append(len(requests))
        return super().admitted(requests)

    async def run(self, request: RoutedRequest, reader: DeltaSink) -> None:
        self.now_s += 1.0
        await super().run(request, reader)


@pytest.mark.parametrize("pooling", [JUDGE, CLASSIFIER])
async def test_rerank_pairs_are_read_and_scored_group_by_group(
    tokenizer: Tokenizer, pooling: PoolingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of pairs a call has, few are held; they count, and time out, as if all had come at once."""
    monkeypatch.setattr(embeddings, "_TOGETHER", 4)
    generator = SteppedGenerator()
    parts = fakes.make_servers(tokenizer, pooling=pooling, clock=lambda: generator.now_s)
    parts = dataclasses.replace(parts, generator=generator)
    scored_before: list[int] = []
    name = "encode_judged" if pooling is JUDGE else "encode_pair"
    encode = getattr(PromptReader, name)

    async def spy(self: PromptReader, *args: Any, **options: Any) -> list[int]:
        scored_before.append(len(generator.requests))
        return await encode(self, *args, **options)

    monkeypatch.setattr(PromptReader, name, spy)
    documents = ["dog " * (1 + n) for n in range(10)]
    async with client_of(parts) as client:
        response = await client.post(RERANK, json={"query": "fox", "documents": documents})
    assert response.status_code == 200, response.text
    assert scored_before == [0] * 4 + [4] * 4 + [8] * 2
    assert generator.admitted_sizes == [4, 4, 2]
    assert {request.deadline_s for request in generator.requests} == {1000.0 + parts.config.request_timeout_s}
    tokens = sum(len(request.prompt_token_ids) for request in generator.requests)
    assert response.json()["usage"]["prompt_tokens"] == tokens
    (spent,) = json.loads(parts.metrics.usage.render())["tenants"].values()
    assert (spent["requests"], spent["prompt_tokens"]) == (10, tokens)
    if pooling is CLASSIFIER:
        assert [one["index"] for one in response.json()["results"]] == list(range(9, -1, -1))


QUERY = "zxqjvkw " * 10


BEYOND_ONE_CALL = [
    (RERANK, {"query": QUERY, "documents": ["a"] * 40}, "query", False),
    (SCORE, {"text_1": [QUERY], "text_2": ["a"] * 40}, "text_1", False),
    (RERANK, {"query": "fox", "documents": ["dog " * 9] * 40}, "documents", True),
    (SCORE, {"queries": ["fox"] * 40, "items": ["dog " * 9] * 40}, "items", True),
]
INSTRUCTED = (SCORE, {"text_1": ["a"] * 40, "text_2": ["a"] * 40, "instruction": QUERY}, "instruction", False)


@pytest.mark.parametrize(
    ("pooling", "path", "body", "param", "are_read"),
    [
        *((JUDGE, *case) for case in (*BEYOND_ONE_CALL, INSTRUCTED)),
        # A classifier takes no instruction.
        *((CLASSIFIER, *case) for case in BEYOND_ONE_CALL),
    ],
)
async def test_relevance_tokens_of_one_call_are_bounded(
    tokenizer: Tokenizer,
    pooling: PoolingModel,
    path: str,
    body: dict[str, Any],
    param: str,
    are_read: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is read again for each document is refused before any is; the rest in the group that is too much."""
    monkeypatch.setattr(embeddings, "_TOGETHER", 8)
    config = RouterConfig(queue=QueueConfig(max_tokens=500))
    parts = fakes.make_servers(tokenizer, config, pooling=dataclasses.replace(pooling, max_tokens=None))
    async with client_of(parts) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["param"] == param
        assert "500" in error["message"]
        assert "one call (router.queue.max_tokens)" in error["message"]
        assert bool(parts.generator.requests) is are_read
        short = {name: [one[:1] for one in texts] if isinstance(texts, list) else "a" for name, texts in body.items()}
        assert (await client.post(path, json=short)).status_code == 200


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"text_1": "fox", "text_2": "dog"}, 1),
        ({"text_1": "fox", "text_2": DOCUMENTS}, 3),
        ({"text_1": DOCUMENTS, "text_2": DOCUMENTS}, 3),
        ({"queries": ["fox"], "documents": DOCUMENTS}, 3),
        ({"queries": "fox", "items": DOCUMENTS}, 3),
    ],
)
@pytest.mark.parametrize("pooling", [EMBEDDER, JUDGE, CLASSIFIER])
async def test_score_accepts_every_form(
    tokenizer: Tokenizer, pooling: PoolingModel, body: dict[str, Any], count: int
) -> None:
    response, _ = await ask(tokenizer, pooling, SCORE, body | {"model": fakes.MODEL})
    assert response.status_code == 200, response.text
    content = response.json()
    assert content["object"] == "list"
    assert [one["index"] for one in content["data"]] == list(range(count))
    assert all(one["object"] == "score" and isinstance(one["score"], float) for one in content["data"])


async def test_score_texts_without_roles_get_the_default_prompt(tokenizer: Tokenizer) -> None:
    _, parts = await ask(tokenizer, EMBEDDER, SCORE, {"text_1": "fox", "text_2": "dog"})
    sent = [tokenizer.decode(request.prompt_token_ids) for request in parts.generator.requests]
    assert sent == ["the fox fox", "the fox dog"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": [""]}, "documents"),
        (RERANK, {"documents": ["a"] * 2049}, "documents"),
        (RERANK, {"documents": [{"text": "a", "title": "b"}]}, "documents"),
        (RERANK, {"documents": ["a\0"]}, "documents"),
        (RERANK, {"documents": ["a"], "query": ""}, "query"),
        (RERANK, {"documents": ["a"], "query": "a\0"}, "query"),
        (RERANK, {"documents": ["a"], "query": 5}, "query"),
        (RERANK, {"documents": ["a"], "top_n": 0}, "top_n"),
        (RERANK, {"documents": ["a"], "top_n": True}, "top_n"),
        (RERANK, {"documents": ["a"], "instruction": "x" * 8193}, "instruction"),
        (RERANK, {"documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (RERANK, {"documents": ["a"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        (RERANK, {"documents": ["a"], "cache_salt": ""}, "cache_salt"),
        (SCORE, {"text_1": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "documents": "b"}, "documents"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        (SCORE, {"text_1": [5], "text_2": "c"}, "text_1"),
    ],
)
async def test_relevance_invalid_request_is_refused(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str
) -> None:
    body = ({"query": "fox"} if path == RERANK else {}) | body
    response, parts = await ask(tokenizer, JUDGE, path, body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert parts.generator.requests == []


@pytest.mark.parametrize(
    ("pooling", "reason"),
    [
        (None, "its files define neither embeddings nor a reranker"),
        (PoolingModel(task=PoolingTask.CLASSIFY, num_labels=3), "its classification head has 3 labels"),
    ],
)
async def test_relevance_model_of_another_kind_is_refused_by_name(
    tokenizer: Tokenizer, pooling: PoolingModel | None, reason: str
) -> None:
    for path, body in ((RERANK, {"query": "a", "documents": ["b"]}), (SCORE, {"text_1": "a", "text_2": "b"})):
        response, _ = await ask(tokenizer, pooling, path, body)
        assert response.status_code == 400
        assert error_of(response)["param"] == "model"
        assert reason in error_of(response)["message"]
    response, _ = await ask(tokenizer, EMBEDDER, RERANK, {"query": "a", "documents": ["b"], "instruction": "c"})
    assert error_of(response)["param"] == "instruction"
    response, _ = await ask(tokenizer, EMBEDDER, RERANK, {"query": "a", "documents": ["b"], "model": "other"})
    assert response.status_code == 404


async def test_score_over_grpc_equals_http(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, pooling=JUDGE)
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        stub = InferenceStub(channel)
        answer = await stub.Score(pb.ScoreRequest(queries=["fox"], documents=DOCUMENTS, truncate_prompt_tokens=-1))
        assert list(answer.scores) == pytest.approx([YES] * 3)
        assert answer.usage.prompt_tokens == sum(len(r.prompt_token_ids) for r in parts.generator.requests)
        async with AsyncClient(f"127.0.0.1:{grpc_server.port}") as client:
            assert await client.score("fox", DOCUMENTS) == pytest.approx([YES] * 3)
            assert await client.score(DOCUMENTS, DOCUMENTS, cache_salt="mine") == pytest.approx([YES] * 3)
        many = pb.ScoreRequest(queries=["fox"], documents=DOCUMENTS * 8)
        parts.frontend.max_call_tokens = 60
        for wrong in (pb.ScoreRequest(), pb.ScoreRequest(queries=["a", "b"], documents=["c"]), many):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Score(wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_relevance_completed_finds_labels_and_checks_the_template(tokenizer: Tokenizer) -> None:
    assert completed(CLASSIFIER, tokenizer, 320) is CLASSIFIER
    assert completed(JUDGE, tokenizer, 320) == JUDGE
    with pytest.raises(ConfigError, match=r"\(7, 9\) are not in the model's vocabulary of 9"):
        completed(JUDGE, tokenizer, 9)
    silent = fakes.make_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not render messages of the roles query and document"):
        completed(JUDGE, silent, 320)
    with pytest.raises(ConfigError, match="needs a chat template"):
        completed(JUDGE, fakes.make_tokenizer(None), 320)
    unknown = PoolingModel(task=PoolingTask.JUDGE, style=JudgeStyle.QWEN3)
    with pytest.raises(ConfigError, match=r"tokens \(None, None\)"):
        completed(unknown, tokenizer, 320)
