"""Differential fuzz: HTTP and gRPC accept and refuse the same requests, and name the same field."""

import random
from collections import Counter
from typing import Any

import pytest

from tandem.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from tests.unit.router import doors
from tests.unit.router.both_doors import BothDoors, Inexpressible, in_grpcs_words

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


def turns_of(rng: random.Random) -> list[dict[str, str]]:
    turns = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        turn = {"role": rng.choice(ROLES)}
        if rng.random() < 0.9:
            turn["content"] = rng.choice(TEXTS)
        if rng.random() < 0.2:
            turn["name"] = rng.choice(TEXTS)
        turns.append(turn)
    return turns


def prompt_of(rng: random.Random) -> Any:
    return rng.choice(TEXTS) if rng.random() < 0.5 else lists_of(IDS, doors.CONTEXT)(rng)


def one_of(*values: Any) -> Any:
    return lambda rng: rng.choice(values)


COMMON: dict[str, Any] = {
    "model": one_of(doors.MODEL, "", "other", "x" * 5000),
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
}
_LOGPROBS = one_of(0, 1, MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS + 1, 2**31, 2**32)
CHAT_ONLY: dict[str, Any] = {
    "messages": turns_of,
    "add_generation_prompt": one_of(*FLAGS),
    "logprobs": one_of(*FLAGS),
    "top_logprobs": _LOGPROBS,
}
PLAIN_ONLY: dict[str, Any] = {"prompt": prompt_of, "add_special_tokens": one_of(*FLAGS), "logprobs": _LOGPROBS}
BASES = (
    (CHAT_ONLY, {"messages": [{"role": "user", "content": "hello"}]}),
    (PLAIN_ONLY, {"prompt": "hello"}),
)


def case_of(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """A body, and those of its fields that may be at fault."""
    own, base = rng.choice(BASES)
    fields = COMMON | own
    chosen = rng.sample(sorted(fields), rng.choice((1, 1, 1, 2, 3)))
    body = base | {name: fields[name](rng) for name in chosen}
    if "top_logprobs" in body:
        body["logprobs"] = True  # over gRPC the one is said with the other
    return body, chosen


@pytest.mark.parametrize(("count", "seed"), [(2_000, 11), pytest.param(100_000, 12, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
async def test_both_doors_say_the_same(count: int, seed: int) -> None:
    both, rng = BothDoors(), random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["asked"] < count:
        body, chosen = case_of(rng)
        try:
            request = in_grpcs_words(body)
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
    refused = {name.removeprefix("refused ") for name in seen if name.startswith("refused ")}
    assert {"temperature", "max_tokens", "n", "stop", "logit_bias", "messages", "prompt", "cache_salt"} <= refused
    assert count // 5 < seen["accepted"] < count
