"""Compiled grammars of hostile clients: what a worker caches, and which requests wait for a compilation."""

import asyncio
import json
import subprocess
import sys
import threading
from random import Random

import numpy as np
import pytest

from engine.sampling import grammar as guidance
from engine.sampling.grammar import LlGuides, grammar_cache_bytes
from engine.types.token_guide import num_words, unusable
from tandem.model_path import model_directory
from tandem.process.host_memory import resident_bytes
from tandem.values.grammar_bounds import ParserTime, most_bytes
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, stopping
from worker.engine_host import EngineHost

VOCAB, END = 2048, 0
WAIT_S = 60.0
PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)


def regex(pattern):
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def llguides(cache_bytes=256 << 20):
    path = model_directory("builtin") / "tokenizer.json"
    return LlGuides(path, vocab_size=VOCAB, eos_token_ids=[END], cache_bytes=cache_bytes)


def follow(guide, seed, num_tokens=1 << 20):
    """Tokens until the grammar's end, at most so many."""
    random, bits = Random(seed), np.zeros(num_words(VOCAB), np.int32)
    for _ in range(num_tokens):
        bits.fill(0)
        guide.allow(bits)
        allowed = [int(i) for i in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")) if i != END]
        if not guide.accept(random.choice(allowed or [END])) or not allowed:
            return


SLOW_GROWING = "(.{0,%d}b){0,1000}"
"""Looks harmless for its first hundred tokens, and learns hundreds of states with each of those that follow."""


def test_grammar_cache_huge_regexes_stay_small():
    """Routers refuse them; a worker that gets one is safe nevertheless."""
    guides = llguides()
    guides.guide(regex("a"))
    before = resident_bytes()
    for index in range(64):
        follow(guides.guide(regex(f"a{{{900_000_000 + index}}}")), seed=index, num_tokens=200)
        assert guides.kept_bytes <= 256 << 20
    assert resident_bytes() - before < 64 << 20


ENDLESS = [
    'start: /[x-z]{200}/ /a+/ "a"',
    '%llguidance {"no_forcing": false}\nstart: /a+/ "a"',
    'start: "x" @other',
]
FOLLOW_ENDLESS = """
import sys
from tests.unit.engine.sampling.test_grammar_cache import follow, llguides
guide = llguides().guide(sys.argv[1])
guide.forced(8)
follow(guide, seed=0, num_tokens=300)
guide.forced(8)
print(guide.num_tokens)
"""


@pytest.mark.parametrize("lark", ENDLESS)
def test_grammar_endless_grammar_terminates(lark):
    """In a process that can be killed: the loop is inside llguidance, and nothing else ends it."""
    other = {"name": "other", "lark_grammar": 'start: /a+/ "a"'}
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}, other]})
    command = [sys.executable, "-c", FOLLOW_ENDLESS, grammar]
    results = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert results.stdout == "300\n"


AMBIGUOUS = [
    's: s s s | s s | "a"',
    "s: s s s | s s | /[a-z]/",
    's: "x"* t\nt: t t t | t t | " "',
]


@pytest.mark.parametrize("rules", AMBIGUOUS)
def test_grammar_guide_of_ambiguous_grammar_stops_early(rules):
    """Without a bound the 600th token takes a quarter of a second, and so does its mask."""
    guides, grammar = llguides(), json.dumps({"grammars": [{"lark_grammar": f"start: s\n{rules}"}]})
    guide = guides.guide(grammar)
    follow(guide, seed=0, num_tokens=600)
    assert guides.cached_guide(grammar) is None
    assert guide.is_too_costly
    assert guide.has_refused
    assert guide.num_tokens < 400
    assert unusable(guide).param == "grammar"


def test_grammar_guide_beyond_parser_limits_is_too_expensive(monkeypatch):
    monkeypatch.setattr(guidance, "LIMITS", {"max_items_in_row": 300})
    guide = llguides().guide(json.dumps({"grammars": [{"lark_grammar": f"start: s\n{AMBIGUOUS[0]}"}]}))
    follow(guide, seed=0, num_tokens=100)
    assert (guide.is_too_costly, guide.num_tokens) == (True, 59)
    other = llguides().guide(regex("ab"))
    assert not other.accept(1)
    assert (other.is_too_costly, other.has_refused) == (False, True)


STRING = {"type": "string"}
CLOSED = {"additionalProperties": False}
NESTED = STRING
for _level in range(40):
    NESTED = {"type": "object", "properties": {f"k{_level}": NESTED, "x": STRING}, "required": ["x"]} | CLOSED
NAMES = [f"p{i}" for i in range(400)]
ENUMS = {name: {"enum": [f"{name}-{j}" for j in range(40)]} for name in NAMES[:100]}
REALISTIC = {
    "400 properties": {"type": "object", "properties": dict.fromkeys(NAMES, STRING)} | CLOSED,
    "rows of 200": {
        "type": "array",
        "items": {"type": "object", "properties": {name: {"type": "integer"} for name in NAMES[:200]}} | CLOSED,
        "minItems": 20,
    },
    "100 long enums": {"type": "object", "properties": ENUMS, "required": list(ENUMS)} | CLOSED,
    "40 levels": NESTED,
    "50 kinds": {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": i}} | dict.fromkeys(NAMES[:10], STRING)} | CLOSED
            for i in range(50)
        ]
    },
    "one enum of 1500": {"enum": [f"choice number {i}" for i in range(1500)]},
    "any object": {"type": "object"},
}


@pytest.mark.parametrize("schema", REALISTIC.values(), ids=REALISTIC)
def test_grammar_guide_of_large_schema_follows_long_answers(schema):
    guide = llguides().guide(json.dumps({"grammars": [{"json_schema": schema}]}))
    follow(guide, seed=1, num_tokens=400)
    assert not guide.is_too_costly
    assert not guide.has_refused


def test_parser_time_bounds_total_and_tolerates_single_tokens():
    time = ParserTime(VOCAB)
    for _ in range(5):
        time.add(8 * time.token_s)
        assert time.end_token()
        assert all(time.end_token() for _ in range(8))
    within = [ParserTime(VOCAB), ParserTime(128_000)]
    for time in within:
        time.add(0.999 * time.token_s)
        assert time.end_token()
    assert within[1].token_s > 2 * within[0].token_s
    ended = 0
    while True:
        time.add(2 * time.token_s)
        if not time.end_token():
            break
        ended += 1
    assert ended == 8


def test_grammar_cache_growing_regexes_stay_within_bound():
    guides = llguides()
    guides.guide(regex("a"))
    before = resident_bytes()
    for index in range(64):
        follow(guides.guide(regex(SLOW_GROWING % (1000 + index))), seed=index, num_tokens=100)
        assert 0 < guides.kept_bytes <= 256 << 20
        kept = [guides.cached_guide(regex(SLOW_GROWING % (1000 + i))) is not None for i in range(index + 1)]
        assert sum(kept) <= (256 << 20) // most_bytes("")
        assert kept[-1], "the newest is kept"
    assert resident_bytes() - before < 256 << 20


@pytest.mark.parametrize("pattern", [SLOW_GROWING % 1000, r"(.|\n)*[a-m](.|\n){300}"])
def test_grammar_cache_entry_stays_within_counted_bytes(pattern):
    guides = llguides()
    guides.guide(regex("a"))
    before = resident_bytes()
    grammar = regex(pattern)
    guide = guides.guide(grammar)
    counted = guides.kept_bytes
    for seed in range(40):
        follow(guide, seed, num_tokens=400)
        if guide.has_refused:
            break
        guide = guides.cached_guide(grammar)
        if guide is None:
            break
    assert resident_bytes() - before <= most_bytes(grammar) <= counted


def test_grammar_cache_exhausted_lexer_is_dropped():
    guides = llguides()
    grammar = regex(SLOW_GROWING % 1000)
    for seed in range(40):
        guide = guides.guide(grammar)
        follow(guide, seed, num_tokens=400)
        if guide.has_refused:
            break
    assert guide.has_refused
    assert (guides.cached_guide(grammar), guides.kept_bytes) == (None, 0)
    fresh = guides.guide(grammar)
    follow(fresh, seed, num_tokens=20)
    assert fresh.num_tokens == 20


def test_grammar_cache_long_used_entry_is_recompiled(monkeypatch):
    monkeypatch.setattr(guidance, "_MAX_FOLLOWED_TOKENS", 50)
    guides = llguides()
    grammar = regex("[a-z]*")
    follow(guides.guide(grammar), seed=1, num_tokens=50)
    assert guides.cached_guide(grammar) is not None
    follow(guides.cached_guide(grammar), seed=2, num_tokens=1)
    assert (guides.cached_guide(grammar), guides.kept_bytes) == (None, 0)


def test_grammar_cache_oversized_grammar_is_used_and_not_kept():
    guides = llguides(cache_bytes=most_bytes("") - 1)
    follow(guides.guide(regex("[a-z]*")), seed=1, num_tokens=10)
    assert (guides.cached_guide(regex("[a-z]*")), guides.kept_bytes) == (None, 0)


def test_grammar_cache_size_is_share_of_memory():
    assert grammar_cache_bytes(1 << 30) == 128 << 20
    assert grammar_cache_bytes(1 << 40) == 1 << 30


class SlowGuides:
    """Blocks compiling of what begins with `slow` until released; else a real library's guides."""

    def __init__(self):
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads = set()
        self.compiled = []
        self._guides = llguides()
        self._guides.guide(regex("[a-z]*"))

    def cached_guide(self, grammar):
        return None if grammar.startswith("slow") else self._guides.cached_guide(grammar)

    def guide(self, grammar):
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.let_go.wait(WAIT_S)
        self.compiled.append(grammar)
        return self._guides.guide(regex("[a-z]*"))


def request_with(grammar, output=()):
    params = SamplingParams(max_tokens=64, grammar=grammar)
    return ledger.request([1, 2, 3], params=params, output=output)


async def test_grammar_compilation_does_not_block_other_streams():
    made = parts()
    guides = SlowGuides()
    object.__setattr__(made, "guides", guides)
    faults, results = [], asyncio.Queue()
    host = EngineHost(made, on_fatal=faults.append)
    host.start(on_output=lambda output: [results.put_nowait(event) for event in output.events], ports=tuple)
    async with stopping(host), asyncio.timeout(WAIT_S):
        slow = [request_with(f"slow {index}") for index in range(16)]
        waiting = [asyncio.ensure_future(host.guide(request)) for request in slow]
        assert await asyncio.to_thread(guides.begun.acquire, timeout=WAIT_S)
        # What nobody has to compile is not behind them, ...
        known = request_with(regex("[a-z]*"))
        await host.guide(known)
        assert known.guide is not None
        # ... and the engine steps from the first token to the last.
        stream = ledger.request([5, 6, 7], params=PLAIN)
        await host.call(lambda scheduler: scheduler.add(stream))
        while (await results.get()).finish_reason is None:
            pass
        assert not guides.compiled
        assert not guides.begun.acquire(blocking=False), "one after another"
        guides.let_go.set()
        await asyncio.gather(*waiting)
        assert all(request.guide is not None for request in slow)
        assert len(guides.compiled) == 16
        (thread,) = guides.threads
        assert thread.startswith("grammars")
    assert not faults


async def test_engine_host_guide_follows_existing_tokens():
    made = parts()
    object.__setattr__(made, "guides", llguides())
    object.__setattr__(made, "model", type("Model", (), {"vocab_size": VOCAB, "flops_per_token": 0}))
    host = EngineHost(made, on_fatal=lambda error: None)
    host.start(on_output=lambda output: None, ports=tuple)
    async with stopping(host):
        request = request_with(regex("[a-z]*"), output=[2045, 2045, 2045])
        await host.guide(request)
        assert request.guide.num_tokens == 3
        refused = request_with(regex("[a-z]*"), output=[2045, 5, 2045])
        await host.guide(refused)
        assert refused.guide.has_refused
