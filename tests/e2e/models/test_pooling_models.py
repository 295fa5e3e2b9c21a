"""Embedding models and rerankers through a real cluster say what `transformers` and the files' formulas say."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
import torch

from router.api.pooled_inputs import QWEN3_INSTRUCTION
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tests.support.engine.pooling_models import (
    PROMPTS,
    PoolingFiles,
    PoolingOracle,
    save_classifier,
    save_embedder,
    save_judge,
    save_model,
    save_tokenizer,
)
from tests.support.oracle import noise
from tests.support.running_cluster import WAIT_S, RunningCluster, running

STORY = "The fox sat by the river and waited for the heron to come back from the hills. "
TEXTS = ["A fox.", STORY, STORY * 9, STORY * 9 + "It rained.", " An owl, two owls\n"]
QUERY, DOCUMENTS = "Where did the fox wait?", ["By the river.", STORY * 6, "An owl."]
TWO_RANKS = {"prefill__tensor_parallel_size": 2, "engine__prefill_chunk_tokens": 64, "model__dtype": "float32"}
LAST = PoolingFiles()
MIXED = PoolingFiles(
    modes=("max", "mean", "weightedmean"),
    includes_prompt=False,
    dense=((48, "Tanh"), (32, "Identity")),
    architecture="LlamaModel",
)


async def post(cluster: RunningCluster, path: str, body: dict[str, Any]) -> Any:
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("files", [LAST, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["last", "mixed"])
async def test_embeddings_equal_transformers_in_chunks_on_two_ranks(files: PoolingFiles, fork_servers, tmp_path):
    """Twice: behind cached prefixes where the pooling allows it, and at once."""
    save_embedder(tmp_path / "model", files)
    oracle = PoolingOracle(tmp_path / "model")
    ids = noise(5, 300)
    async with running(command=fork_servers.command, model__path=str(tmp_path / "model"), **TWO_RANKS) as cluster:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S
        ) as client:
            for _ in range(2):
                answer = await client.embeddings.create(model="model", input=TEXTS)
                found = torch.tensor([one.embedding for one in answer.data])
                torch.testing.assert_close(found, oracle.embeddings(TEXTS, files), atol=1e-4, rtol=1e-4)
            cosines = torch.nn.functional.cosine_similarity(found, oracle.embeddings(TEXTS, files))
            assert float((1 - cosines).max()) <= 1e-5
            assert answer.model_extra["trained_for_embeddings"] is True
            queries = await client.embeddings.create(
                model="model", input=TEXTS, dimensions=16, extra_body={"prompt_name": "query"}
            )
            expected = oracle.embeddings(TEXTS, files, PROMPTS["query"])[:, :16]
            expected = torch.nn.functional.normalize(expected, dim=-1)
            found = torch.tensor([one.embedding for one in queries.data])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            several = await asyncio.gather(*(client.embeddings.create(model="model", input=ids) for _ in range(8)))
            for one in several:
                found = torch.tensor([one.data[0].embedding])
                torch.testing.assert_close(found, oracle.embeddings([ids], files), atol=1e-4, rtol=1e-4)
        await long_texts_are_refused_or_cut(cluster, oracle, files)
        await cosines_equal(cluster, oracle, files)
        refused = await cluster.http.post("/v1/completions", json={"prompt": "A fox", "max_tokens": 4})
        assert (refused.status_code, "generates no text" in refused.text) == (400, True)
        hits = await cluster.figure("vllm:prefix_cache_hits_total")
        assert hits > 0
        if files is MIXED:
            behind_prompt = len(TEXTS) + 2  # and the query of a rerank and of a score
            assert hits <= behind_prompt * HASH_BLOCK_TOKENS, "every row that is pooled is computed"
        await cluster.until_idle()


async def long_texts_are_refused_or_cut(cluster: RunningCluster, oracle: PoolingOracle, files: PoolingFiles) -> None:
    """Beyond `max_seq_length`; what is cut keeps the end token of the tokenizer's post-processor."""
    long = STORY * 60
    response = await cluster.http.post("/v1/embeddings", json={"input": long})
    assert (response.status_code, "at most 512" in response.text) == (400, True)
    answer = await post(cluster, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert answer["usage"]["prompt_tokens"] == 512
    kept = [*oracle.encode(long)[:511], oracle.encode("")[-1]]
    expected = oracle.embeddings([kept], files)
    torch.testing.assert_close(torch.tensor([answer["data"][0]["embedding"]]), expected, atol=1e-4, rtol=1e-4)


async def cosines_equal(cluster: RunningCluster, oracle: PoolingOracle, files: PoolingFiles) -> None:
    """Rerank puts the model's prompts in front; both servers say the same."""
    (query,) = oracle.embeddings([QUERY], files, PROMPTS["query"])
    expected = oracle.embeddings(DOCUMENTS, files) @ query
    answer = await post(cluster, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert_ranked(answer, expected.tolist())
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        scored = await InferenceStub(channel).Score(pb.ScoreRequest(queries=[QUERY], documents=DOCUMENTS))
    assert list(scored.scores) == pytest.approx(expected.tolist(), abs=1e-4)


def assert_ranked(answer: dict[str, Any], expected: list[float]) -> None:
    """The answer to a rerank request has these scores, the best first."""
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [scores[i] for i in range(len(expected))] == pytest.approx(expected, abs=1e-4)
    assert [one["index"] for one in answer["results"]] == sorted(scores, key=lambda index: -scores[index])
    assert [one["document"]["text"] for one in answer["results"]] == [
        DOCUMENTS[one["index"]] for one in answer["results"]
    ]


async def test_rerankers_equal_transformers(fork_servers, tmp_path):
    """A generative one and a classifier, twice each: behind cached prefixes, too."""
    save_judge(tmp_path / "judge")
    save_classifier(tmp_path / "classifier")
    judge, classifier = PoolingOracle(tmp_path / "judge"), PoolingOracle(tmp_path / "classifier")
    expected = {
        "judge": [judge.judged(f"<|user|>{QUERY}<|end|><|system|>{one}<|end|><|assistant|>") for one in DOCUMENTS],
        "classifier": [classifier.classified(QUERY, one) for one in DOCUMENTS],
    }
    for name, scores in expected.items():
        assert max(scores) - min(scores) > 1e-3, "they differ by more than the tolerance"
        await reranks(tmp_path / name, scores, fork_servers)


async def reranks(path: Path, expected: list[float], fork_servers) -> None:
    async with running(command=fork_servers.command, model__path=str(path), **TWO_RANKS) as cluster:
        for _ in range(2):
            assert_ranked(await post(cluster, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}), expected)
        body = {"text_1": QUERY, "text_2": DOCUMENTS}
        scores = [one["score"] for one in (await post(cluster, "/v1/score", body))["data"]]
        assert scores == pytest.approx(expected, abs=1e-4)
        refused = await cluster.http.post("/v1/embeddings", json={"input": "a"})
        assert (refused.status_code, "it is a reranker" in refused.text) == (400, True)
        assert await cluster.figure("vllm:prefix_cache_hits_total") > 0
        await cluster.until_idle()


QWEN3_TEMPLATE = (
    "{% for m in messages %}{{ '<|system|>' if m['role'] == 'system' else '<|user|>' }}{{ m['content'] }}"
    "{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '(quiet)' }}{% endif %}"
)


async def test_reranker_setting_judges_as_qwen3s_model_card_says(fork_servers, tmp_path):
    """The tokens are those of yes and no; a template that can think is told not to."""
    save_model(tmp_path, "Qwen3ForCausalLM", vocab_size=2050)
    save_tokenizer(tmp_path, ends=False, template=QWEN3_TEMPLATE, words=("yes", "no"))
    oracle = PoolingOracle(tmp_path)
    labels = tuple(oracle.encode(word)[-1] for word in ("yes", "no"))
    settings = {"model__path": str(tmp_path), "model__name": "judge", "model__reranker": "qwen3"}
    async with running(command=fork_servers.command, prefill__replicas=0, **settings) as cluster:
        answer = await post(cluster, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        expected = [
            oracle.judged(
                f"<|system|>{system}<|end|><|user|><Instruct>: {QWEN3_INSTRUCTION}\n<Query>: {QUERY}\n"
                f"<Document>: {one}<|end|><|assistant|>(quiet)",
                labels,
            )
            for one in DOCUMENTS
        ]
        assert_ranked(answer, expected)
        text = await cluster.complete([300, 301], 4)
        assert text["usage"]["completion_tokens"] == 4, "it goes on generating"
        await cluster.until_idle()
