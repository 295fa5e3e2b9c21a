"""The process that checks grammars: its verdicts, its bounds, and that no request waits for a dead one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.sampling.grammar import LlGuides
from router.sandbox import grammar_check
from router.sandbox.grammar_check import GrammarProcess
from router.sandbox.grammar_frames import FOLLOWED
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, Overloaded
from tandem.model_path import model_directory
from tests.support.router.servers import fakes

TOKENIZER = model_directory("builtin") / "tokenizer.json"


def process(*, compile_s: float = 20.0, compile_bytes: int = 1 << 30) -> GrammarProcess:
    return GrammarProcess(
        TOKENIZER, vocab_size=2048, eos_token_ids=[0], compile_s=compile_s, compile_bytes=compile_bytes
    )


@pytest.fixture
async def checker() -> AsyncIterator[GrammarProcess]:
    made = process()
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_checker() -> AsyncIterator[GrammarProcess]:
    """One process for many grammars, as in a router: to start one takes longer than to check them all."""
    made = process()
    yield made
    await made.close()


def grammar_of(shape: Shape, value: object) -> str:
    return StructuredOutput(shape=shape, value=value, param="field").grammar()


LARGE = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(40)]} for i in range(100)}}


async def test_grammar_check_valid_grammar_is_returned_and_cached(
    checker: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammar_of(Shape.JSON_SCHEMA, {"type": "integer"})
    assert await checker.checked(grammar, "field") == grammar
    lark = await checker.checked('root ::= "a" | "b"', "field")
    assert json.loads(lark)["grammars"][0]["lark_grammar"]
    monkeypatch.setattr(checker, "_compile", None)
    assert await checker.checked(grammar, "field") == grammar
    assert await checker.checked('root ::= "a" | "b"', "field") == lark


@pytest.mark.parametrize(("num_dead", "begins"), [(2, True), (3, False)])
async def test_grammar_check_process_dying_at_start_is_restarted(
    checker: GrammarProcess, monkeypatch: pytest.MonkeyPatch, num_dead: int, begins: bool
) -> None:
    exec_of, num_begun = asyncio.create_subprocess_exec, 0

    async def begin(*command: str, **pipes: int) -> asyncio.subprocess.Process:
        nonlocal num_begun
        num_begun += 1
        return await exec_of(*(("false",) if num_begun <= num_dead else command), **pipes)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    grammar = grammar_of(Shape.JSON_SCHEMA, {"type": "integer"})
    if begins:
        assert await checker.checked(grammar, "field") == grammar
        return
    with pytest.raises(Overloaded):
        await checker.checked(grammar, "field")


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        (Shape.REGEX, "(a", "unclosed group"),
        (Shape.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (Shape.JSON_SCHEMA, {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        (Shape.JSON_SCHEMA, {"$ref": "#/nowhere"}, "nowhere"),
        (Shape.GRAMMAR, "root ::= ((", "Expected"),
        (Shape.GRAMMAR, "no grammar at all", "."),
        (Shape.GRAMMAR, "root ::= " + "(" * 5000, "recursion"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_grammar_check_invalid_grammar_names_its_field(
    lasting_checker: GrammarProcess, shape: Shape, value: object, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=message) as refused:
            await lasting_checker.checked(grammar_of(shape, value), "field")
        assert refused.value.param == "field"
        assert str(refused.value).startswith("field: ")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", 'at "(?=": look-around, including look-ahead and look-behind, is not supported'),
        (r"(a)\1", 'at "\\1": backreferences are not supported'),
        (r"a/(b)\1", 'at "\\1": backreferences are not supported'),
        ("(?>a)", 'at "(?>": this kind of group is not supported'),
        ("(?P<x>a)(?P=x)", 'at "(?P": this kind of group is not supported'),
        (r"\bword", "word boundaries, \\b and \\B, are not supported"),
        ("a^b", "^ and $ are not supported within it: the whole answer is matched"),
        ("a\n(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
    ],
)
@pytest.mark.parametrize("in_schema", [False, True])
@pytest.mark.asyncio(loop_scope="module")
async def test_regex_unsupported_feature_is_named_as_written(
    lasting_checker: GrammarProcess, pattern: str, message: str, in_schema: bool
) -> None:
    schema = {"type": "string", "pattern": pattern}
    grammar = grammar_of(Shape.JSON_SCHEMA, schema) if in_schema else grammar_of(Shape.REGEX, pattern)
    with pytest.raises(InvalidRequest) as refused:
        await lasting_checker.checked(grammar, "field")
    assert str(refused.value).startswith("field: regular expression")
    assert str(refused.value).endswith(message)


NESTED = "(" * 5 + "a" + "{1,999})" * 5


@pytest.mark.parametrize("pattern", ["a{900000000}", "(x|y)a{900000000}", "[a-f]{3}(g|h)a{900000000}", NESTED])
async def test_grammar_check_expensive_to_follow_is_refused(checker: GrammarProcess, pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^field: too expensive to evaluate: \w") as refused:
        await checker.checked(grammar_of(Shape.REGEX, pattern), "field")
    assert refused.value.param == "field"
    assert "<" not in str(refused.value), "nothing of the parser's state"
    assert await checker.checked(grammar_of(Shape.REGEX, "a{900}"), "field")


async def test_grammar_check_huge_regexes_are_refused_in_bounded_memory(checker: GrammarProcess) -> None:
    await checker.checked(grammar_of(Shape.REGEX, "a"), "field")
    assert checker._process is not None
    pid = checker._process.pid
    before = _resident_bytes(pid)
    checks = [checker.checked(grammar_of(Shape.REGEX, f"a{{{900_000_000 + index}}}"), "field") for index in range(64)]
    errors = await asyncio.gather(*checks, return_exceptions=True)
    assert all(isinstance(one, InvalidRequest) for one in errors)
    assert checker._process.pid == pid
    assert _resident_bytes(pid) - before < 64 << 20


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (Shape.CHOICE, [f"choice number {index}" for index in range(2000)]),
        (Shape.JSON_SCHEMA, {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}),
        (Shape.JSON_SCHEMA, {"type": "string", "maxLength": 20_000}),
        (Shape.JSON_SCHEMA, {"type": "array", "items": {"type": "number"}, "minItems": 5000, "maxItems": 9000}),
        (Shape.REGEX, r"[\w .,'-]{1,4000}\.(com|org)"),
        (Shape.REGEX, "(a+)+b"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_grammar_check_large_harmless_grammar_is_accepted(
    lasting_checker: GrammarProcess, shape: Shape, value: object
) -> None:
    assert await lasting_checker.checked(grammar_of(shape, value), "field")


async def test_grammar_check_endless_loop_is_killed() -> None:
    """llguidance 1.9 loops when a greedy lexeme leaves nothing for what must follow it."""
    checker = process(compile_s=1.0)
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await checker.checked(grammar_of(Shape.GRAMMAR, 'start: /[x-z]{3}/ /a+/ "a"'), "field")
    assert await checker.checked(grammar_of(Shape.REGEX, "b"), "field")
    await checker.close()


async def test_grammar_check_stack_overflow_ends_only_its_process(checker: GrammarProcess) -> None:
    rules = "\n".join(f'r{index}: /[a-z]{{3,9}}/ "x{index}" r{index + 1}?' for index in range(1000))
    with pytest.raises(InvalidRequest, match="too much memory"):
        await checker.checked(grammar_of(Shape.GRAMMAR, f'start: r0\n{rules}\nr1000: "q"'), "field")
    assert await checker.checked(grammar_of(Shape.REGEX, "a"), "field")


async def test_grammar_check_slow_grammar_is_killed_and_next_checked() -> None:
    checker = process(compile_s=1e-4)
    with pytest.raises(InvalidRequest, match="more than 0"):
        await checker.checked(grammar_of(Shape.JSON_SCHEMA, LARGE), "field")
    assert checker._process is None
    checker._compile_s = 20.0
    assert await checker.checked(grammar_of(Shape.REGEX, "a+"), "field")
    await checker.close()


async def test_grammar_check_memory_exhaustion_ends_only_its_process() -> None:
    checker = process(compile_bytes=1 << 20)
    with pytest.raises(InvalidRequest, match="too much memory"):
        await checker.checked(grammar_of(Shape.CHOICE, [f"{i}" * 9 for i in range(4096)]), "field")
    assert await checker.checked(grammar_of(Shape.REGEX, "a"), "field")
    await checker.close()


async def test_grammar_check_dead_process_is_restarted(checker: GrammarProcess) -> None:
    await checker.checked(grammar_of(Shape.REGEX, "a"), "field")
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    await checker._process.wait()
    assert await checker.checked(grammar_of(Shape.REGEX, "b"), "field")


async def test_grammar_check_concurrent_callers_share_verdict(checker: GrammarProcess) -> None:
    grammar = grammar_of(Shape.JSON_SCHEMA, LARGE)
    callers = [asyncio.create_task(checker.checked(grammar, f"field{i}")) for i in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    assert await asyncio.gather(*callers[1:]) == [grammar] * 4
    assert callers[0].cancelled()


async def test_grammar_check_queue_beyond_bound_is_overloaded(
    checker: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_WAITING", 1)
    first = asyncio.create_task(checker.checked(grammar_of(Shape.REGEX, "a"), "field"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checker.checked(grammar_of(Shape.REGEX, "b"), "field")
    await first


async def test_grammar_check_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, compiled = process(), []

    async def compile_slowly(data: bytes) -> bytes:
        compiled.append(data.decode())
        await asyncio.sleep(0.001)
        return FOLLOWED

    monkeypatch.setattr(checker, "_compile", compile_slowly)
    names = [f"a{index}" for index in range(grammar_check._MAX_WAITING)]
    many = [asyncio.create_task(checker.checked(name, "field", "a")) for name in names]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checker.checked("one more", "field", "a")
    # One of its own, and one that the first tenant sent long before its turn comes.
    for name in ("b0", names[-1]):
        assert await checker.checked(name, "field", "b") == name
    assert compiled[:4] == ["a0", "b0", "a1", names[-1]]
    await asyncio.gather(*many)
    assert sorted(compiled) == sorted([*names, "b0"])
    assert not checker._pending


async def test_grammar_check_process_not_starting_is_overloaded(tmp_path: object) -> None:
    checker = GrammarProcess(
        TOKENIZER.with_name("none.json"), vocab_size=1, eos_token_ids=[], compile_s=1.0, compile_bytes=1 << 30
    )
    with pytest.raises(Overloaded):
        await checker.checked(grammar_of(Shape.REGEX, "a"), "field")


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("decoder", "fault"),
    [
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "Fuse"}, STRIP]}, None),
        ({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}, None),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "tokenizer"),
        (None, "tokenizer"),
    ],
)
async def test_grammars_of_tokenizers_without_byte_fallback(
    tmp_path: Path, decoder: dict[str, object] | None, fault: str | None
) -> None:
    spec = json.dumps(json.loads(fakes.sentencepiece_spec()) | {"decoder": decoder})
    path = tmp_path / "tokenizer.json"
    path.write_text(spec)
    size = Tokenizer(spec, None).size
    checker = GrammarProcess(path, vocab_size=size, eos_token_ids=[2], compile_s=20.0, compile_bytes=1 << 30)
    grammar = grammar_of(Shape.CHOICE, ["hello world"])
    guides = LlGuides(path, vocab_size=size, eos_token_ids=[2], cache_bytes=1 << 30)
    try:
        if fault is not None:
            with pytest.raises(InvalidRequest, match=fault):
                await checker.checked(grammar, "field")
            with pytest.raises(InvalidRequest, match=fault):
                guides.guide(grammar)
            return
        assert await checker.checked(grammar, "field") == grammar
    finally:
        await checker.close()
    guide = guides.guide(grammar)
    vocabulary = json.loads(spec)["model"]["vocab"]
    token_ids = [vocabulary[token] for token in ["h", "e", "l", "l", "o", "\u2581wor", "ld"]]
    assert all(guide.accept(token_id) for token_id in token_ids)
    assert guide.accept(2)
