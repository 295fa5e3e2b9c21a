"""Real clients: the official `openai` package over HTTP, and the public gRPC service."""

import asyncio
import json
import signal

import grpc.aio
import openai
import pytest
import pytest_asyncio

from tandem.client.options import Options, Turn
from tandem.client.sync import Client
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.running_cluster import WAIT_S, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "tandem-tiny"
STORY = "Once upon a time there was a little fox named Lily. Every day Lily walked to the valley to see Ben. " * 6
QUESTION = f"The code of amber is 4821. {STORY}What is the code of amber?"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers, tmp_path_factory):
    batches = {"path": str(tmp_path_factory.mktemp("batches"))}
    async with running(command=fork_servers.command, router__batches=batches) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def inference(cluster):
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        yield InferenceStub(channel)


def chat(question=QUESTION):
    return [{"role": "user", "content": question}]


async def test_streamed_chat_answers_and_counts_tokens(cluster, client):
    before = await cluster.disaggregated()
    usages = []
    for _ in range(2):
        text = ""
        stream = await client.chat.completions.create(
            model=MODEL, messages=chat(), temperature=0, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usages += [chunk.usage] if chunk.usage is not None else []
        assert text.strip() == "4821"
    first, second = usages
    assert first.prompt_tokens == second.prompt_tokens
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 16 * 16
    assert await cluster.disaggregated() == before + 1, "the second time nothing is left to compute elsewhere"


async def test_streamed_completion_equals_unstreamed(client, oracle):
    prompt = oracle.story(1, 150)
    expected = oracle.decode(oracle.tokens(prompt, 20))
    arguments = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    arguments["extra_body"] = {"ignore_eos": True}
    whole = await client.completions.create(**arguments)
    pieces = [chunk.choices[0] async for chunk in await client.completions.create(**arguments, stream=True)]
    assert whole.choices[0].text == "".join(piece.text for piece in pieces) == expected
    assert whole.choices[0].finish_reason == pieces[-1].finish_reason == "length"
    assert whole.usage.completion_tokens == 20


async def test_completion_with_choices_logprobs_and_stop_strings_is_exact(client, oracle):
    prompt = oracle.story(2, 150)
    arguments = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "seed": 7}
    arguments["extra_body"] = {"ignore_eos": True}
    two = await client.completions.create(**arguments, n=2, temperature=1.5)
    again = await client.completions.create(**arguments, n=2, temperature=1.5)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text != two.choices[1].text
    assert [choice.text for choice in two.choices] == [choice.text for choice in again.choices]

    greedy = await client.completions.create(**arguments, temperature=0, logprobs=3)
    logprobs = greedy.choices[0].logprobs
    assert "".join(logprobs.tokens) == greedy.choices[0].text
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)

    text = greedy.choices[0].text
    stop = text[len(text) // 2 :][:4]
    stopped = await client.completions.create(**arguments, temperature=0, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"

    answer = await client.chat.completions.create(
        model=MODEL, messages=chat(), n=2, temperature=0, logprobs=True, top_logprobs=2
    )
    assert {choice.message.content.strip() for choice in answer.choices} == {"4821"}
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)


async def test_sync_client_streams(cluster):
    """In a thread of its own: this one runs the cluster's supervisor."""

    def ask():
        with openai.OpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            with client.chat.completions.create(model=MODEL, messages=chat(), temperature=0, stream=True) as stream:
                text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="gpt-4", messages=chat())
            return text

    assert (await asyncio.to_thread(ask)).strip() == "4821"


async def test_grpc_streams_the_same_text(cluster, inference, oracle):
    for seed, length in ((3, 20), (4, 300)):
        prompt = oracle.story(seed, length)
        sampling = common.SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        answers = [answer async for answer in inference.Generate(request)]
        over_http = await cluster.stream(prompt, 40, temperature=0.8, seed=11)
        assert "".join(answer.text for answer in answers) == over_http.text
        assert [token for answer in answers for token in answer.token_ids] == over_http.token_ids
        assert answers[-1].usage.completion_tokens == 40
        assert answers[-1].usage.prompt_tokens == length
        assert answers[-1].finish_reason == common.FINISH_REASON_LENGTH


async def test_tandem_sync_client_answers(cluster, oracle):
    prompt = oracle.story(9600, 90)

    def ask():
        with Client(cluster.local.grpc_address) as own:
            answer = own.generate(prompt, Options(max_tokens=12, temperature=0.0, ignore_eos=True))
            reply = own.chat([Turn(role="user", content=QUESTION)], Options(temperature=0.0)).text
            with pytest.raises(InvalidRequest) as wrong:
                own.generate(prompt, Options(top_p=2.0))
            return answer, reply, own.detokenize(own.tokenize(QUESTION)), wrong.value.param

    answer, reply, text, param = await asyncio.to_thread(ask)
    assert answer.choices[0].token_ids == oracle.tokens(prompt, 12)
    assert answer.timing["total_s"] > 0.0
    assert (reply.strip(), param) == ("4821", "top_p")
    assert text.endswith(QUESTION)


async def test_grpc_chat_tokenize_and_models(inference):
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=QUESTION)]))
    request.sampling.temperature = 0
    text = "".join([answer.text async for answer in inference.Generate(request)])
    assert text.strip() == "4821"
    models = await inference.ListModels(pb.ListModelsRequest())
    assert [model.id for model in models.models] == [MODEL]
    ids = (await inference.Tokenize(pb.TokenizeRequest(text="Lily and the owl", add_special_tokens=False))).token_ids
    assert (await inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "Lily and the owl"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await inference.Tokenize(pb.TokenizeRequest(model="gpt-4", text="x"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_batch_continues_after_router_is_killed(cluster, client, oracle):
    """With OpenAI's client: each request has exactly one result, equal to its answer outside the batch."""
    prompts = {f"story-{i}": oracle.story(9700 + i, 60) for i in range(12)}
    requests = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body(prompt, 40)}
        for name, prompt in prompts.items()
    ]
    text = "\n".join(json.dumps(one) for one in requests).encode()
    file = await client.files.create(file=("stories.jsonl", text), purpose="batch")
    assert (await client.files.content(file.id)).read() == text
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "stories"}
    )
    pid = cluster.pid("router")

    async def has_some():
        return (await client.batches.retrieve(batch.id)).status != "validating"

    await cluster.until(has_some)
    cluster.local.kill("router", signal.SIGKILL)
    await cluster.local.wait_ready("router", after_pid=pid)
    await cluster.until_workers(2)

    async def has_ended():
        return (await client.batches.retrieve(batch.id)).status == "completed"

    await cluster.until(has_ended)
    batch = await client.batches.retrieve(batch.id)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.error_file_id) == (12, 12, None)
    results = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    tokens = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in results}
    assert len(results) == len(tokens)
    assert tokens == {name: oracle.tokens(prompt, 40) for name, prompt in prompts.items()}
    assert [one.id async for one in client.batches.list()] == [batch.id]
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)
