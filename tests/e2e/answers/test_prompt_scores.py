"""Log probabilities of prompts equal those of `transformers` in fp32, over every API that returns them."""

import asyncio

import grpc.aio
import openai
import pytest
import pytest_asyncio
import torch

from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.oracle import prompts
from tests.support.running_cluster import WAIT_S, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ABS = 2e-4
WAYS = {"pools": {"prefill__replicas": 1}, "decode-only": {"prefill__replicas": 0}}


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["pools", pytest.param("decode-only", marks=pytest.mark.slow)]
)
async def cluster(fork_servers, request):
    async with running(command=fork_servers.command, engine__prefill_chunk_tokens=64, **WAYS[request.param]) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S) as made:
        yield made


def own(logprobs, prompt):
    """Log probabilities of the prompt's own tokens."""
    return logprobs.gather(-1, torch.tensor(prompt)[1:, None])[:, 0]


async def test_echoed_logprobs_add_up_to_transformers_sums(cluster, client, oracle):
    """Several prompts of token ids in one call, with zero or one answer token, twice: the caches change nothing."""
    batch = prompts(oracle, 6)
    for max_tokens in (1, 0):
        answer = await client.completions.create(
            model="tandem-tiny", prompt=batch, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, seed=1234
        )
        assert answer.usage.completion_tokens == max_tokens * len(batch)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        for prompt, choice in zip(batch, answer.choices, strict=True):
            found, expected = choice.logprobs, oracle.logprobs(prompt)
            assert len(found.token_logprobs) == len(found.tokens) == len(prompt) + max_tokens
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            mine = torch.tensor(found.token_logprobs[1 : len(prompt)])
            torch.testing.assert_close(mine, own(expected, prompt), atol=ABS, rtol=0)
            context = len(prompt) // 2
            assert float(mine[context - 1 :].sum()) == pytest.approx(
                float(own(expected, prompt)[context - 1 :].sum()), abs=0.01
            )
            greedy = [
                value == max(top.values())
                for value, top in zip(found.token_logprobs[1 : len(prompt)], found.top_logprobs[1:], strict=False)
            ]
            assert greedy == (expected.argmax(-1) == torch.tensor(prompt)[1:]).tolist()
            assert choice.text.startswith(oracle.decode(prompt))
            assert max_tokens or choice.finish_reason == "length"
    await cluster.until_idle()


async def test_prompt_logprobs_do_not_change_the_answer(cluster, oracle):
    prompt = oracle.story(3, 200)
    plain = await cluster.complete(prompt, 12, cache_salt="plain")
    answer = await cluster.complete(prompt, 12, cache_salt="read", prompt_logprobs=4, n=2, seed=3)
    expected = oracle.logprobs(prompt)
    top = expected.topk(4)
    for choice in answer["choices"]:
        assert choice["token_ids"] == plain["choices"][0]["token_ids"]
        first, *places = choice["prompt_logprobs"]
        assert first is None
        assert len(places) == len(prompt) - 1
        for i, place in enumerate(places):
            best = {str(token) for token in top.indices[i].tolist()}
            assert set(place) == best | {str(prompt[i + 1])}
            for token, entry in place.items():
                assert entry["logprob"] == pytest.approx(float(expected[i, int(token)]), abs=ABS)
                assert entry["rank"] == 1 + int((expected[i] > expected[i, int(token)]).sum())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await cluster.until_idle()


async def test_chat_prompt_scores_follow_the_template(cluster, oracle):
    request = {"messages": [{"role": "user", "content": "Tell me of the fox."}], "max_tokens": 4, "temperature": 0}
    response = await cluster.http.post(
        "/v1/chat/completions", json=request | {"prompt_logprobs": 0, "return_token_ids": True}
    )
    assert response.status_code == 200, response.text
    content = response.json()
    prompt = content["prompt_token_ids"]
    scores = [next(iter(place.values()))["logprob"] for place in content["prompt_logprobs"][1:]]
    torch.testing.assert_close(torch.tensor(scores), own(oracle.logprobs(prompt), prompt), atol=ABS, rtol=0)


async def test_prompt_scores_over_grpc_equal_http(cluster, oracle):
    prompt = oracle.story(4, 150)
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt),
        prompt_logprobs=2,
        sampling=common.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
    )
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        answers = [answer async for answer in InferenceStub(channel).Generate(request)]
    places = [place for answer in answers for place in answer.prompt_logprobs]
    expected = oracle.logprobs(prompt)
    assert [place.token_id for place in places] == prompt[1:]
    scores = torch.tensor([place.logprob for place in places])
    torch.testing.assert_close(scores, own(expected, prompt), atol=ABS, rtol=0)
    assert [[top.token_id for top in place.top] for place in places] == expected.topk(2).indices.tolist()
    assert [t for answer in answers for t in answer.token_ids] == oracle.tokens(prompt, 3)


async def test_prompt_logprobs_next_to_streams_are_exact(cluster, oracle):
    """Many at once: each gets what it would get alone."""
    batch = prompts(oracle, 9, seed=2)
    expected = [oracle.tokens(prompt, 8) for prompt in batch]
    read = [
        cluster.http.post("/v1/completions", json=body(prompt, 0, echo=True, logprobs=0, cache_salt=f"r{i}"))
        for i, prompt in enumerate(batch)
    ]
    streams = [cluster.stream(prompt, 8) for prompt in batch]
    answers = await asyncio.gather(*read, *streams)
    for prompt, response in zip(batch, answers[: len(batch)], strict=True):
        scores = torch.tensor(response.json()["choices"][0]["logprobs"]["token_logprobs"][1:])
        torch.testing.assert_close(scores, own(oracle.logprobs(prompt), prompt), atol=ABS, rtol=0)
    assert [stream.token_ids for stream in answers[len(batch) :]] == expected
    await cluster.until_idle()


@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping", "ignore_eos"),
    [
        (4, 1.0, False, False),
        pytest.param(3, -0.5, True, False, marks=pytest.mark.slow),
        (4, 2.0, "never", True),
    ],
)
async def test_cluster_beam_search_equals_transformers(
    cluster, oracle, num_beams, length_penalty, early_stopping, ignore_eos
):
    for prompt in (oracle.encode("Once upon a time"), oracle.story(6, 150)):
        response = await cluster.http.post(
            "/v1/completions",
            json=body(prompt, 24)
            | {"use_beam_search": True, "n": num_beams, "ignore_eos": ignore_eos, "logprobs": 0}
            | {"length_penalty": length_penalty, "early_stopping": early_stopping},
        )
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        expected, scores = oracle.beams(
            prompt, 24, num_beams, length_penalty, early_stopping, None if ignore_eos else oracle.end_id
        )
        assert [choice["token_ids"] for choice in choices] == expected
        found = [
            sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) ** length_penalty for choice in choices
        ]
        assert found == pytest.approx(scores, abs=1e-3)
    await cluster.until_idle()


async def test_embeddings_equal_mean_of_last_hidden_states(cluster, client, oracle):
    """As floats and as base64, which the client asks for by itself; longer than a chunk and shorter."""
    batch = [*prompts(oracle, 5, seed=4), [5], oracle.encode("A fox.")]
    expected = torch.nn.functional.normalize(torch.stack([oracle.mean_state(prompt) for prompt in batch]), dim=-1)
    for more in ({}, {"encoding_format": "float"}):
        answer = await client.embeddings.create(model="tandem-tiny", input=batch, **more)
        embeddings = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(embeddings, expected, atol=1e-5, rtol=0)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, batch))
    text = "The little fox walked to the valley."
    answer = await client.embeddings.create(model="tandem-tiny", input=text)
    expected = torch.nn.functional.normalize(oracle.mean_state(oracle.encode(text)), dim=-1)
    torch.testing.assert_close(torch.tensor(answer.data[0].embedding), expected, atol=1e-5, rtol=0)
    await cluster.until_idle()
