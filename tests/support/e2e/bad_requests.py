"""Requests of hostile or broken clients to the HTTP API, by name, with the responses that they may get."""

from typing import Any

from tests.support.running_cluster import body

CONTEXT = 2048
VOCABULARY = 2048
PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = body(range(300, 320), 8)
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
_MIB = 1 << 20
_ITSELF = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}
OK, REFUSED, UNKNOWN, TOO_LARGE, HEAD_TOO_LARGE = {200}, {400}, {404}, {413}, {431}

Bad = tuple[str, Any, dict[str, str], set[int]]
"""Where, what (bytes as they are, else JSON), headers, and the statuses of which it gets one."""


def _plain(change: dict[str, Any], statuses: set[int] = REFUSED) -> Bad:
    return PLAIN, GOOD | change, {}, statuses


def _chat(change: dict[str, Any], statuses: set[int] = REFUSED) -> Bad:
    return CHAT, TALK | change, {}, statuses


def _raw(content: bytes) -> Bad:
    return PLAIN, content, {}, REFUSED


def _headed(headers: dict[str, str], statuses: set[int]) -> Bad:
    return PLAIN, GOOD, headers, statuses


BAD: dict[str, Bad] = {
    "nested 100,000 deep": _raw(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a key twice": _raw(b'{"prompt": "a", "prompt": "b"}'),
    "a key twice within": (CHAT, b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', {}, REFUSED),
    "temperature NaN": _raw(b'{"prompt": "a", "temperature": NaN}'),
    "temperature 1e400": _raw(b'{"prompt": "a", "temperature": 1e400}'),
    "n 2^31": _plain({"n": 2**31}),
    "max_tokens -1": _plain({"max_tokens": -1}),
    "max_tokens 0": _plain({"max_tokens": 0}),
    "max_tokens 2^63": _plain({"max_tokens": 2**63}),
    "min_tokens above max_tokens": _plain({"min_tokens": 9}),
    "top_logprobs a million": _chat({"logprobs": True, "top_logprobs": 10**6}),
    "logprobs a million": _plain({"logprobs": 10**6}),
    "stop empty": _plain({"stop": [""]}),
    "stop of 1 MiB": _plain({"stop": ["a" * _MIB]}),
    "stop 10,000 times": _plain({"stop": ["a"] * 10_000}),
    "logit_bias beyond the vocabulary": _plain({"logit_bias": {str(VOCABULARY): 1.0}}),
    "logit_bias below it": _plain({"logit_bias": {"-1": 1.0}}),
    "no prompts": _plain({"prompt": []}),
    "100,000 prompts": _plain({"prompt": ["a"] * 100_000}),
    "token -1": _plain({"prompt": [-1]}),
    "token beyond the vocabulary": _plain({"prompt": [300, VOCABULARY]}),
    "token true": _plain({"prompt": [True]}),
    "token 1.5": _plain({"prompt": [1.5]}),
    "one token too many": _plain({"prompt": [300] * (CONTEXT + 1)}),
    "a lone surrogate": _raw(b'{"prompt": "\\ud800"}'),
    "a NUL": _plain({"prompt": "a\0b"}),
    "1 MiB without a space": _plain({"prompt": "a" * _MIB}),
    "control tokens as text": _chat({"messages": [{"role": "user", "content": "<|im_end|><|end|></s><s>"}]}, OK),
    "a regex with nested repeats": _plain(
        {"structured_outputs": {"regex": "(a+)+b"}, "ignore_eos": False}, OK | REFUSED
    ),
    "a regex of 900 million letters": _plain({"structured_outputs": {"regex": "a{900000000}"}, "ignore_eos": False}),
    "a regex of as many behind others": _chat({"structured_outputs": {"regex": "(x|y)[a-f]?a{900000001}"}}),
    "a schema that never ends": _chat(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _ITSELF}}}, OK | REFUSED
    ),
    "a schema that is itself": _chat(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}}
    ),
    "a template": _chat({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    "a template's arguments": _chat({"chat_template_kwargs": {"a": 1}}),
    "a request id of 1 MiB": _headed({"X-Request-Id": "a" * _MIB}, HEAD_TOO_LARGE),
    "a request id of two words": _headed({"X-Request-Id": "a b"}, REFUSED),
    "cache_salt of 1 MiB": _plain({"cache_salt": "a" * _MIB}),
    "headers of others": _headed(
        {"X-Tandem-Tenant": "admin", "X-Priority": "-99", "X-Worker-Id": "decode-0", "X-Forwarded-For": "::1"}, OK
    ),
    "a field of others": _plain({"tenant": "admin"}),
    "1,000 headers": _headed({f"X-{index}": "1" for index in range(1000)}, HEAD_TOO_LARGE),
    "seed 2^64": _plain({"seed": 2**64}),
    "another model": _plain({"model": "gpt-4"}, UNKNOWN),
    "another route": ("/v1/nowhere", GOOD, {}, UNKNOWN),
    "a route spelled otherwise": ("/v1/%63ompletions", GOOD, {}, UNKNOWN),
}
