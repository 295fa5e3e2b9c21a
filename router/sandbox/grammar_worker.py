"""`python -m router.sandbox.grammar_worker TOKENIZER VOCAB_SIZE END_IDS MEMORY_BYTES`: compiles clients' grammars.

A separate process, because nothing else bounds what a compiler takes: the router kills it when it takes too long, and
the system ends it when it takes too much memory. Reads frames of a 4-byte length and a grammar in UTF-8, GBNF or what
llguidance reads; answers each with a frame: FOLLOWED and the grammar for workers, or REFUSED and the reason.

A grammar is also followed for some tokens, within the limits that workers have: some take little to compile and very
much at the first token, or at the tenth. A grammar that needs too deep a stack would crash a worker as it crashes this
process, which therefore has a smaller stack.
"""

import json
import re
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import llguidance
from llguidance import gbnf_to_lark

from router.sandbox.grammar_frames import FOLLOWED, LENGTH, REFUSED
from tandem.model_files import read_model_text
from tandem.values.grammar_bounds import LIMITS, random_walk_error, tokenizer_for_guides

_MAX_FILE_BYTES = 256 << 20
_SILENT = 0
_MAX_ERROR_CHARS = 200
_NUM_PATHS, _NUM_TOKENS = 4, 16
_NO_TOKENIZER = "not supported with this model's tokenizer"
_MAX_QUOTED_CHARS = 40
_REGEX_SYNTAX = re.compile(
    r"regex parse error:\n {4}(?P<pattern>[^\n]*)\n {4}(?P<before> *)(?P<carets>\^+)\nerror: (?P<what>[^\n]+)"
)
_REGEX_LINES = re.compile(r"regex parse error:.*?\nerror: (?P<what>[^\n]+)", re.DOTALL)
"""Matches the error of an expression with several lines."""
_REGEX_ASSERTION = re.compile(r"lookarounds not supported yet; (?P<kind>\w+)")
_WORD_BOUNDARIES = r"word boundaries, \b and \B, are not supported"
_INNER_ANCHORS = "^ and $ are not supported within it: the whole answer is matched"
_STACK_BYTES = 1 << 20
"""Stack of the checking thread; a worker's threads have at least 2 MiB."""


def main() -> None:
    """Run the process; see the module's docstring."""
    threading.stack_size(_STACK_BYTES)
    judge = threading.Thread(target=_judge)
    judge.start()
    judge.join()


def _judge() -> None:
    path, vocab_size, ends, memory_bytes = sys.argv[1:5]
    end_ids = [int(token_id) for token_id in ends.split(",") if token_id]
    text = read_model_text(Path(path), max_bytes=_MAX_FILE_BYTES)
    tokenizer = _tokenizer(text, int(vocab_size), end_ids)
    _limit_memory(int(memory_bytes))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _answer(sink, FOLLOWED)
    while (frame := _frame(source)) is not None:
        grammar, fault = _read(frame.decode())
        fault = fault or (_NO_TOKENIZER if tokenizer is None else _fault(tokenizer, grammar, end_ids))
        _answer(sink, REFUSED + fault.encode() if fault else FOLLOWED + grammar.encode())


def _tokenizer(text: str, vocab_size: int, end_ids: Sequence[int]) -> Any:
    """Load the tokenizer; None for a tokenizer.json whose decoder does not define the bytes of its tokens."""
    try:
        return llguidance.LLTokenizer(tokenizer_for_guides(text), n_vocab=vocab_size, eos_token=list(end_ids) or None)
    except ValueError:
        return None


def _read(text: str) -> tuple[str, str]:
    """Return (what llguidance reads, the error)."""
    if text.startswith("{"):
        return text, ""
    try:
        return json.dumps({"grammars": [{"lark_grammar": gbnf_to_lark.any_to_lark(text)}]}), ""
    except Exception as error:  # noqa: BLE001 - it raises Exception itself
        return "", _one_line(str(error)) or "cannot be parsed"


def _fault(tokenizer: Any, grammar: str, end_ids: Sequence[int]) -> str:
    """Return the error of a grammar; empty if there is none."""
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=limits)
    if matcher.is_error():
        return _reason(matcher.get_error()) or "cannot be compiled"
    fault = random_walk_error(matcher, end_ids, num_paths=_NUM_PATHS, num_tokens=_NUM_TOKENS)
    return fault and f"too expensive to evaluate: {_reason(fault)}"


def _reason(error: str) -> str:
    """Reword an error to be about what the client sent; what follows `<state>` describes the parser's internals."""
    fault = error.partition("<state>")[0]
    return _one_line(_regex_fault(fault) or fault)


def _regex_fault(error: str) -> str | None:
    """Return the error in a regular expression, without the grammar around it; None for other errors."""
    if (found := _REGEX_SYNTAX.search(error)) is not None:
        start, end = len(found["before"]), len(found["before"] + found["carets"])
        what = found["what"]
        if what == "unrecognized flag":  # its name for anything unknown after `(?`
            start, what = max(0, start - 2), "this kind of group is not supported"
        return f'regular expression, at "{found["pattern"][start:end][:_MAX_QUOTED_CHARS]}": {what}'
    if (found := _REGEX_LINES.search(error)) is not None:
        return f"regular expression: {found['what']}"
    if (found := _REGEX_ASSERTION.search(error)) is not None:
        is_word = found["kind"].startswith("Word")
        return f"regular expression: {_WORD_BOUNDARIES if is_word else _INNER_ANCHORS}"
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_ERROR_CHARS]


def _limit_memory(num_bytes: int) -> None:
    """Limit memory to so much beyond the current use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _frame(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return source.read(size)


def _answer(sink: BinaryIO, text: bytes) -> None:
    sink.write(LENGTH.pack(len(text)) + text)
    sink.flush()


if __name__ == "__main__":
    main()
