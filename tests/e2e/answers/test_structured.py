"""Structured output over a real cluster: answers match the requested format from the first token on."""

import asyncio
import datetime
import json
import re
import signal

import grpc.aio
import jsonschema
import openai
import pytest
import pytest_asyncio

from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.e2e.schemas import fifty
from tests.support.running_cluster import WAIT_S, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "tandem-tiny"
AT_ONCE = 16
LONG = {"role": "user", "content": "Tell me about the fox and the valley. " * 30}
"""So that a prefill worker computes it."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATES = jsonschema.FormatChecker([])


@DATES.checks("date", raises=ValueError)
def _is_date(text: str) -> bool:
    """As RFC 3339 has it: unlike Python's dates, they may be of the year 0, which is a leap year."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        return False
    return bool(datetime.date.fromisoformat(text.replace("0000-", "2000-", 1)))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, decode__replicas=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S) as made:
        yield made


def as_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


async def chat(client, response_format=None, *, seed=0, **more):
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[LONG],
        seed=seed,
        **({} if response_format is None else {"response_format": response_format}),
        **{"temperature": 1.0, "max_tokens": 1400, **more},
    )
    return answer.choices[0]


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
async def test_structured_answers_validate(cluster, client, count):
    """At temperature 1, over both pools."""
    schemas = fifty()
    before = await cluster.disaggregated()
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(number):
        schema = schemas[number % len(schemas)]
        async with turn:
            choice = await chat(client, as_schema(schema), seed=number, extra_body={"cache_salt": f"of {count}"})
        assert choice.finish_reason == "stop", (schema, choice.message.content)
        jsonschema.validate(json.loads(choice.message.content), schema, format_checker=DATES)

    await asyncio.gather(*map(ask, range(count)))
    assert await cluster.disaggregated() > before, "prefill workers drew first tokens"


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "(red|green) ball [0-9]{3}"}, "(red|green) ball [0-9]{3}"),
        ({"choice": ["yes", 'no "never"', "é/\n"]}, 'yes|no "never"|é/\n'),
        ({"grammar": 'start: "the " ANIMAL " sleeps"\nANIMAL: "fox" | "bear"'}, "the (fox|bear) sleeps"),
        ({"grammar": 'root ::= "x" tail\ntail ::= [0-9]{2} | "!"'}, "x([0-9]{2}|!)"),
    ],
)
async def test_structured_output_every_form_is_honoured(client, structure, pattern):
    for seed in range(4):
        choice = await chat(client, seed=seed, extra_body={"structured_outputs": structure})
        assert re.fullmatch(pattern, choice.message.content)
        assert choice.finish_reason == "stop"


async def test_structured_answer_beyond_grammar_limits_fails_naming_its_field(cluster, client):
    ambiguous = {"structured_outputs": {"grammar": 'start: s "!"\ns: s s s | s s | "a"'}}
    ends = (await cluster.http.post("/tokenize", json={"prompt": "!", "add_special_tokens": False})).json()["tokens"]
    never_ends = dict.fromkeys(map(str, ends), -100)
    other = asyncio.create_task(chat(client, max_tokens=400, extra_body={"ignore_eos": True}))
    try:
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs: too expensive to evaluate") as caught:
            await chat(client, extra_body=ambiguous, logit_bias=never_ends)
    finally:
        undisturbed = await other
    assert caught.value.param == "structured_outputs"
    assert undisturbed.finish_reason == "length"
    short = await chat(client, max_tokens=40, extra_body=ambiguous, logit_bias=never_ends)
    assert (set(short.message.content), short.finish_reason) == ({"a"}, "length")


async def test_json_object_format_yields_an_object(client):
    choice = await chat(client, {"type": "json_object"}, temperature=0, max_completion_tokens=None)
    text = choice.message.content
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


async def test_grpc_structured_answer_validates(cluster):
    async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
        request = pb.GenerateRequest(
            prompt="Once upon a time",
            sampling=common.SamplingParams(max_tokens=200, seed=4),
            structured_output=pb.StructuredOutput(json_schema=json.dumps(PERSON)),
            n=3,
        )
        texts = ["", "", ""]
        async for response in InferenceStub(channel).Generate(request):
            texts[response.choice_index] += response.text
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_structured_stream_survives_worker_loss(cluster, client, temperature):
    schema = {"type": "array", "items": PERSON, "minItems": 30, "maxItems": 30}
    sampling = {"temperature": temperature, "seed": 11}
    expected = await chat(client, as_schema(schema), **sampling)
    text, killed, finish = "", None, None
    stream = await client.chat.completions.create(
        model=MODEL, messages=[LONG], max_tokens=1400, stream=True, response_format=as_schema(schema), **sampling
    )
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
        if len(text) > 60 and killed is None:
            killed = await cluster.kill_the_busiest(signal.SIGKILL)
    assert text == expected.message.content
    assert finish == "stop"
    jsonschema.validate(json.loads(text), schema)
    await cluster.comes_back(*killed)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= (("}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ],
)
async def test_unsupported_structure_is_refused_without_side_effects(cluster, body, param):
    request = {"messages": [LONG], "max_tokens": 5} | body
    answer = await cluster.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.turn(0)
async def test_hostile_patterns_disturb_no_other_request(cluster):
    hostile = ["(a+)+b", "(a|a)*" * 50, "((a{1,200}){1,200}){1,200}", "(.*)" * 200, "[a-z]{1,100000}"]
    steady = asyncio.create_task(cluster.tokens([400] * 20, 200))
    for pattern in hostile:
        request = {"messages": [LONG], "max_tokens": 20, "structured_outputs": {"regex": pattern}}
        answer = await cluster.http.post("/v1/chat/completions", json=request)
        assert answer.status_code in (200, 400), answer.text
    assert await steady == await cluster.tokens([400] * 20, 200)
