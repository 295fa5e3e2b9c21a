"""Tools and responses over a real cluster with the `openai` package: calls obey their schemas."""

import json
import signal

import jsonschema
import openai
import pytest
import pytest_asyncio

from tandem.client.aio import AsyncClient
from tandem.client.options import Options, Tool, ToolChoice, Turn
from tests.support.running_cluster import WAIT_S, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "tandem-tiny"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "clock": NOTHING}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = [{"role": "user", "content": "What is the weather in the valley of the fox? " * 6}]
"""So that a prefill worker computes it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster):
    async with client_of(cluster) as made:
        yield made


def client_of(cluster):
    return openai.AsyncOpenAI(base_url=f"{cluster.local.http_url}/v1", api_key="none", timeout=WAIT_S)


def chat_fields(choice, **more):
    return {"model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 600} | more


def check(message, names):
    assert not message.content
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function"
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize(("choice", "names"), [("required", set(SCHEMAS)), (NAMED, {"get_weather"})])
async def test_forced_tool_calls_obey_schemas(cluster, client, choice, names):
    for seed in range(2):
        answer = await client.chat.completions.create(**chat_fields(choice, n=2, temperature=1.0, seed=seed))
        for one in answer.choices:
            assert one.finish_reason == "tool_calls"
            check(one.message, names)
        assert len({call.id for one in answer.choices for call in one.message.tool_calls}) == sum(
            len(one.message.tool_calls) for one in answer.choices
        )
    assert await cluster.disaggregated(), "a prefill worker drew a first token"


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "paint"}}])
async def test_forced_call_of_open_schema_terminates(client, tool_choice):
    """As instructor and LangChain write schemas: a grammar with open properties had this model invent some."""
    colour = {"$ref": "#/$defs/Colour"}
    wall = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}, "colour": colour}}
    schema = {
        "type": "object",
        "properties": {"colour": colour, "wall": {"anyOf": [wall, {"type": "null"}], "default": None}},
        "required": ["colour"],
        "$defs": {"Colour": {"enum": ["red", "green", "blue"], "type": "string", "title": "Colour"}},
    }
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    closed = schema | {"additionalProperties": False}
    for seed in range(6):
        body = chat_fields(
            tool_choice, tools=[tool], temperature=1.0, seed=seed, parallel_tool_calls=False, max_tokens=100
        )
        one = (await client.chat.completions.create(**body)).choices[0]
        assert one.finish_reason == "tool_calls"
        (call,) = one.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), closed)


async def test_forced_tool_calls_stream_equals_whole_answer(client):
    """Assembled by the client library; equal to the whole answer except for the ids."""
    body = chat_fields("required", temperature=1.0, seed=4)
    whole = (await client.chat.completions.create(**body)).choices[0]
    async with client.chat.completions.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        one = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "content.delta" not in kinds
    assert one.finish_reason == "tool_calls"
    check(one.message, set(SCHEMAS))
    assert [call.function.arguments for call in one.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


async def test_tool_calls_over_grpc_equal_http(cluster, client):
    """With `tandem.client`; gRPC's other newer fields against HTTP's as well, on real workers."""
    whole = (
        (await client.chat.completions.create(**chat_fields("required", temperature=1.0, seed=4))).choices[0].message
    )
    tools = [
        Tool(name="get_weather", description="Of a city.", parameters=json.dumps(WEATHER)),
        Tool(name="clock"),
    ]
    turns = [Turn(**turn) for turn in ASKED]
    options = Options(
        tools=tools, tool_choice=ToolChoice(mode="required"), max_tokens=600, temperature=1.0, seed=4, prompt_logprobs=0
    )
    async with AsyncClient(cluster.local.grpc_address) as grpc_client:
        answer = await grpc_client.chat(turns, options)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert [(call.name, call.arguments) for call in choice.tool_calls] == [
            (call.function.name, call.function.arguments) for call in whole.tool_calls
        ]
        assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens - 1
        beams = {"n": 2, "max_tokens": 6}
        over_http = await client.completions.create(
            model=MODEL, prompt="Once", **beams, extra_body={"use_beam_search": True}
        )
        found = await grpc_client.generate("Once", Options(use_beam_search=True, **beams))
    assert [one.text for one in found.choices] == [one.text for one in over_http.choices]


@pytest.mark.slow
async def test_tool_call_survives_worker_loss():
    many = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 60, "maxItems": 60}
    schema = NOTHING | {"properties": {"colours": many}, "required": ["colours"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    body = chat_fields("required", tools=[tool], temperature=1.0, seed=3, parallel_tool_calls=False)
    async with running(decode__replicas=2) as cluster, client_of(cluster) as client:
        whole = (await client.chat.completions.create(**body)).choices[0].message
        text, killed = "", None
        async for chunk in await client.chat.completions.create(**body, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                text += call.function.arguments
            if len(text) > 40 and killed is None:
                killed = await cluster.kill_the_busiest(signal.SIGKILL)
        assert killed is not None
        assert text == whole.tool_calls[0].function.arguments
        jsonschema.validate(json.loads(text), schema)


async def test_tool_result_yields_an_answer(client):
    first = (await client.chat.completions.create(**chat_fields("required", seed=1))).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls]
    again = chat_fields("auto", messages=[*ASKED, first, *results], max_tokens=20)
    answer = await client.chat.completions.create(**again)
    assert answer.choices[0].message.content is not None
    assert answer.usage.completion_tokens <= 20


async def test_strict_tools_with_response_format_obey_both(client):
    """Unforced, the small model answers with text, in the requested format."""
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    plain = await client.chat.completions.create(**chat_fields("auto", tools=strict, max_tokens=30))
    assert plain.choices[0].message.content or plain.choices[0].message.tool_calls
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for seed in range(2):
        one = (await client.chat.completions.create(**chat_fields("auto", response_format=form, seed=seed))).choices[0]
        if one.message.tool_calls:
            check(one.message, set(SCHEMAS))
        else:
            jsonschema.validate(json.loads(one.message.content), schema)


async def test_unsupported_tool_schema_is_refused(client):
    parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        await client.chat.completions.create(**chat_fields("required", tools=[tool]))
    assert caught.value.param == "tools"


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


async def test_responses_tool_results_yield_an_answer(client):
    body = {"model": MODEL, "input": ASKED, "tools": FLAT, "tool_choice": "required", "max_output_tokens": 600}
    body["extra_body"] = {"seed": 5}
    whole = await client.responses.create(**body)
    async with client.responses.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    for answer in (whole, final):
        assert answer.status == "completed"
        assert answer.usage.output_tokens > 0
        for item in answer.output:
            assert item.type == "function_call"
            jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
    assert [item.arguments for item in whole.output] == [item.arguments for item in final.output]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in whole.output]
    again = await client.responses.create(
        model=MODEL, tools=FLAT, input=[*ASKED, *whole.output, *results], max_output_tokens=5
    )
    assert again.output_text
    assert again.usage.input_tokens > whole.usage.input_tokens


async def test_responses_schema_format_validates(client):
    form = {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True}
    body = {"model": MODEL, "input": "Where is the fox?", "text": {"format": form}, "extra_body": {"seed": 2}}
    whole = await client.responses.create(**body)
    async with client.responses.stream(**body) as stream:
        final = await stream.get_final_response()
    assert whole.output_text == final.output_text
    jsonschema.validate(json.loads(whole.output_text), WEATHER)
    with pytest.raises(openai.BadRequestError, match="store"):
        await client.responses.create(model=MODEL, input="x", store=True)
