"""Differential fuzz: HTTP and gRPC accept and refuse the same requests, and name the same field."""

import random
from collections import Counter
from typing import Any

import pytest

from router.api.prompts import MAX_PREDICTION_TOKENS
from router.text.tools import MAX_CALLS, MAX_TOOLS
from tandem.values.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import CACHE, VARIABLE, BothServers, Inexpressible, grpc_request

VOCAB = 320
LARGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63)
TEXTS = ("", "a", "STOP", "漢字 😀", "\x00", *("x" * n for n in (64, 65, 256, 257, 1024, 1025)), " ", "~!")
IDS = (0, 1, 5, VOCAB - 60, VOCAB, VOCAB + 1000, -1, 2**31, 2**32)
REALS = (
    *(0, 0.0, -0.0, 1e-9, 0.5, 1, 1.0, 1.5, 2, 2.0, 2.0000001, -2.0, -2.1),
    *(10.0, 10.5, 100, -100.0, 101.0, 1e308, 5e-324),
)
COUNTS = (0, 1, 2, 3, 15, 16, 17, 64, 127, 128, 129, 499, 500, 511, 512, 513, -1, -2, *LARGE)
FLAGS = (True, False)
ROLES = ("system", "user", "assistant", "developer", "tool", "User", "")
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": '{"type": "object"}'},
    {"json": "{"},
    {"json": "[]"},
    {"json": "true"},
    {"json": ""},
    {"json_object": True},
    {"json_object": False},
    {"regex": "[a-z]+"},
    {"regex": ""},
    {"choice": ["yes", "no"]},
    {"choice": []},
    {"choice": ["yes", ""]},
    {"choice": ["x"] * 4097},
    {"grammar": 'start: "a"'},
    {"grammar": ""},
    {"grammar": 'root ::= "a"'},
)
CALL_IDS = ("call_1", "", "a b", "x" * 256, "x" * 257, "é")
ARGUMENTS = (
    "{}",
    "",
    '{"city": "Köln"}',
    "[]",
    "{",
    '{"x": NaN}',
    '{"x": 1, "x": 2}',
    '{"x": ' + "[" * 60 + "]" * 60 + "}",
)
NAMES = ("weather", "clock", "", "a b", "x" * 128, "x" * 129, "<|end|>")
DESCRIPTIONS = ("Of a place.", "", "\x00", "<|end|>", "x" * 16_384, "x" * 16_385)
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMAS: tuple[Any, ...] = (
    *(CITY, {}, {"type": "array"}, {"enum": ["x" * 1000] * 140}, {"type": "object", "properties": {"city": True}}),
    *(["city"], True, "text", {"properties": {"x": CITY}}, {"description": "<|user|>"}),
)
CHOICES: tuple[Any, ...] = (
    *("none", "auto", "required", "sometimes", ""),
    {"type": "function", "function": {"name": "weather"}},
    {"type": "function", "function": {"name": "other"}},
    {"type": "function", "function": {"name": ""}},
    *(
        {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": named}]}}
        for mode in ("auto", "required", "none", "")
        for named in ({"name": "weather"}, {"name": "other"})
    ),
)
VARIABLES: tuple[dict[str, Any], ...] = (
    *({}, {VARIABLE: True}, {VARIABLE: None}, {VARIABLE: 0.5}, {VARIABLE: -(2**63)}, {VARIABLE: 2**63}),
    *({VARIABLE: "x" * 256}, {VARIABLE: "x" * 257}, {VARIABLE: "<|end|>"}, {VARIABLE: ["x"]}, {"other": "x"}),
    *({"messages": "x"}, {"": "x"}, {"tools": True}, {VARIABLE: False, "other": 1}),
    {f"v{i}": i for i in range(17)},
)
PREDICTIONS: tuple[dict[str, Any], ...] = tuple(
    {"type": "content", "content": content}
    for content in (
        *("the quick brown fox", "", "\x00", "漢" * MAX_PREDICTION_TOKENS),
        [{"type": "text", "text": "the quick"}, {"type": "text", "text": " brown fox"}],
        [],
    )
)
SEEDS = (0, -1, 1, 2**63 - 1, -(2**63), 2**63)


def lists_of(values: tuple[Any, ...], most: int) -> Any:
    def draw(rng: random.Random) -> list[Any]:
        length = rng.choice((0, 1, 1, 2, 3, most, most + 1))
        return [rng.choice(values)] * length if length > 3 else [rng.choice(values) for _ in range(length)]

    return draw


def bias_of(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((0, 1, 1, 2, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + 1))
    if length > 2:
        return {str(i): 0.5 for i in range(length)}
    return {str(rng.choice(IDS)): rng.choice(REALS) for _ in range(length)}


def turns_of(rng: random.Random) -> list[dict[str, Any]]:
    turns = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        turn: dict[str, Any] = {"role": rng.choice(ROLES)}
        if rng.random() < 0.9:
            turn["content"] = rng.choice(TEXTS)
        if rng.random() < 0.2:
            turn["name"] = rng.choice(TEXTS)
        if rng.random() < 0.2:
            turn["tool_calls"] = calls_of(rng)
        if rng.random() < (0.8 if turn["role"] == "tool" else 0.1):
            turn["tool_call_id"] = rng.choice(CALL_IDS)
        turns.append(turn)
    return turns


def calls_of(rng: random.Random) -> list[dict[str, Any]]:
    call = {
        "id": rng.choice(CALL_IDS),
        "type": rng.choice(("function", "function", "function", "custom")),
        "function": {"name": rng.choice(NAMES), "arguments": rng.choice(ARGUMENTS)},
    }
    return [call] * rng.choice((0, 1, 1, 1, 2, MAX_CALLS, MAX_CALLS + 1))


def tools_of(rng: random.Random) -> list[dict[str, Any]]:
    """Most of them valid, so that other fields can differ."""
    function: dict[str, Any] = {"name": "weather" if rng.random() < 0.7 else rng.choice(NAMES)}
    if rng.random() < 0.5:
        function["description"] = rng.choice(DESCRIPTIONS)
    if rng.random() < 0.5:
        function["parameters"] = CITY if rng.random() < 0.5 else rng.choice(SCHEMAS)
    if rng.random() < 0.3:
        function["strict"] = rng.choice(FLAGS)
    tools = [{"type": "function", "function": function}]
    extra = rng.choice((0, 0, 0, 1, MAX_TOOLS - 1, MAX_TOOLS))
    tools += [{"type": "function", "function": {"name": f"f{i}"}} for i in range(extra)]
    return tools * 2 if rng.random() < 0.05 else tools


def prompt_of(rng: random.Random) -> Any:
    return rng.choice(TEXTS) if rng.random() < 0.5 else lists_of(IDS, fakes.CONTEXT)(rng)


def one_of(*values: Any) -> Any:
    return lambda rng: rng.choice(values)


COMMON: dict[str, Any] = {
    "model": one_of(fakes.MODEL, "", "other", "x" * 5000),
    "max_tokens": one_of(*COUNTS),
    "min_tokens": one_of(*COUNTS),
    "temperature": one_of(*REALS),
    "top_k": one_of(*COUNTS),
    "top_p": one_of(*REALS),
    "min_p": one_of(*REALS),
    "presence_penalty": one_of(*REALS),
    "frequency_penalty": one_of(*REALS),
    "repetition_penalty": one_of(*REALS),
    "ignore_eos": one_of(*FLAGS),
    "seed": one_of(*SEEDS),
    "n": one_of(*COUNTS),
    "priority": one_of(0, 1, -1, 2**31 - 1, -(2**31) + 1, -(2**31), 2**31),
    "cache_salt": one_of(*TEXTS),
    "truncate_prompt_tokens": one_of(*COUNTS),
    "include_stop_str_in_output": one_of(*FLAGS),
    "skip_special_tokens": one_of(*FLAGS),
    "request_id": one_of(*TEXTS, "x" * 128, "x" * 129),
    "stop": lists_of(TEXTS, 16),
    "stop_token_ids": lists_of(IDS, MAX_STOP_TOKENS),
    "allowed_token_ids": lists_of(IDS, 300),
    "bad_words": lists_of(TEXTS, MAX_BAD_WORDS),
    "logit_bias": bias_of,
    "structured_outputs": one_of(*STRUCTURES),
    "stream": one_of(*FLAGS),
    "prompt_logprobs": one_of(0, 1, MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS + 1, -1, 2**32),
    "best_of": one_of(*COUNTS),
    "vote": one_of(*FLAGS),
    "vote_pattern": one_of("", "x" * 513),
    "use_beam_search": one_of(*FLAGS),
    "length_penalty": one_of(*REALS),
    "early_stopping": one_of(*FLAGS, "never"),
    # For conversations alone, or for prompts alone: sent with the other they are refused.
    "tools": tools_of,
    "tool_choice": one_of(*CHOICES),
    "parallel_tool_calls": one_of(*FLAGS),
    "chat_template_kwargs": one_of(*VARIABLES),
    "continue_final_message": one_of(*FLAGS),
    "prediction": one_of(*PREDICTIONS),
    "cached_content": one_of(CACHE, "cachedContents/other", ""),
    "add_generation_prompt": one_of(*FLAGS),
    "add_special_tokens": one_of(*FLAGS),
}
TOGETHER = (
    ("tools", "tool_choice"),
    ("tools", "structured_outputs"),
    ("n", "best_of"),
    ("n", "vote"),
    ("n", "use_beam_search"),
    ("use_beam_search", "vote_pattern"),
    ("use_beam_search", "length_penalty", "early_stopping"),
    ("prompt_logprobs", "max_tokens"),
    *(("prediction", name) for name in ("n", "best_of", "tools", "logprobs", "stream")),
    ("messages", "continue_final_message"),
    *(("stream", name) for name in ("best_of", "vote", "use_beam_search", "prompt_logprobs")),
)
"""What says more together: drawn so now and then."""
EXTRAS = (
    *("tools", "tool_choice", "chat_template_kwargs", "continue_final_message", "cached_content", "prompt_logprobs"),
    *("best_of", "vote", "use_beam_search", "length_penalty", "prediction"),
)
"""Each is both taken and refused in every run."""
_LOGPROBS = one_of(0, 1, MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS + 1, 2**31, 2**32)
CHAT_ONLY: dict[str, Any] = {
    "messages": turns_of,
    "logprobs": one_of(*FLAGS),
    "top_logprobs": _LOGPROBS,
}
PLAIN_ONLY: dict[str, Any] = {"prompt": prompt_of, "logprobs": _LOGPROBS}
BASES = (
    (CHAT_ONLY, {"messages": [{"role": "user", "content": "hello"}]}),
    (PLAIN_ONLY, {"prompt": "hello"}),
)


def case_of(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """A body, and its fields that may be invalid."""
    own, base = rng.choice(BASES)
    fields = COMMON | own
    chosen = rng.sample(sorted(fields), rng.choice((1, 1, 1, 2, 3)))
    if rng.random() < 0.2:
        chosen = sorted({*chosen, *(name for name in rng.choice(TOGETHER) if name in fields)})
    body = base | {name: fields[name](rng) for name in chosen}
    if "top_logprobs" in body:
        body["logprobs"] = True  # over gRPC the one is said with the other
    return body, chosen


@pytest.mark.parametrize(("count", "seed"), [(2_000, 11), pytest.param(100_000, 12, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
async def test_http_and_grpc_accept_and_refuse_the_same(count: int, seed: int) -> None:
    both, rng = BothServers(), random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["asked"] < count:
        body, chosen = case_of(rng)
        try:
            request = grpc_request(body)
        except Inexpressible:
            seen["inexpressible"] += 1
            continue
        http, grpc = await both.over_http(body), await both.over_grpc(request)
        seen["asked"] += 1
        seen["accepted"] += http.status == 200
        shown = f"{str(body)[:300]}: HTTP {http}, gRPC {grpc}"
        assert (http.status == 200) == (grpc.status == 200), shown
        if len(chosen) == 1:
            assert http == grpc, shown
        seen[f"refused {http.param}"] += http.status != 200
        seen.update(f"taken {name}" for name in chosen if http.status == 200)
    refused = {name.removeprefix("refused ") for name in seen if name.startswith("refused ")}
    assert {"temperature", "max_tokens", "n", "stop", "logit_bias", "messages", "prompt", "cache_salt"} <= refused
    assert {*EXTRAS, "add_generation_prompt", "add_special_tokens", "vote_pattern"} <= refused
    assert all(seen[f"taken {name}"] for name in {*EXTRAS, "parallel_tool_calls", "early_stopping"})
    assert count // 5 < seen["accepted"] < count
