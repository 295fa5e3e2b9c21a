"""What following one grammar may take, the same for the router that refuses and the worker that follows.

llguidance's lexer learns states as an answer is followed and forgets none; its own limits allow some 500 MB of them,
and a quarter of a second for the first mask of `a{900000000}`. These are what schemas of hundreds of properties, and
choices by the thousand, stay far below. They hold of all copies of a matcher together: what one learns, all have.
"""

import json
from collections.abc import Collection, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

MAX_LEXER_STATES = 20_000
MAX_STEP_FUEL = 100_000
"""Regular expressions derived for one token: some 10 ms."""
MAX_STEP_ITEMS = 12_000
"""Of the parser, for one token; the object with the most properties that `max_items_in_row` allows has 8,192."""
LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "max_lexer_states": MAX_LEXER_STATES,
        "initial_lexer_fuel": MAX_STEP_FUEL,
        "step_lexer_fuel": MAX_STEP_FUEL,
        "step_max_items": MAX_STEP_ITEMS,
        # A list of 4096 choices is one row of as many items.
        "max_items_in_row": 8192,
    }
)
"""For LLParserLimits."""

_TOKEN_S, _TOKEN_S_PER_ENTRY = 4e-3, 5e-8
_MAX_DEBT_TOKENS = 8


class ParserTime:
    """What following one answer takes of a processor, against what it may take.

    A token of a highly ambiguous grammar, such as `s: s s s | s s | "a"`, costs more the longer the answer is. The
    parser's items do not tell: 500 of them take 4 ms there, and 1,600 for an object of 400 properties 0.6. So time is
    counted, that of the thread itself, which other work on the machine does not add to. A grammar may take so much for
    each token; what it takes beyond that is a debt, which later tokens pay back, and which is bounded.
    """

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: a mask takes time in proportion, at worst."""
        self.token_s = _TOKEN_S + _TOKEN_S_PER_ENTRY * vocab_size
        self._debt_s = 0.0

    def add(self, spent_s: float) -> None:
        """Count time that was spent on the next token."""
        self._debt_s += spent_s

    def end_token(self) -> bool:
        """False when the debt has become too large."""
        self._debt_s = max(0.0, self._debt_s - self.token_s)
        return self._debt_s <= _MAX_DEBT_TOKENS * self.token_s


_LEARNT_BYTES = 40 << 20
_BYTES_PER_CHAR = 64


def most_bytes(grammar: str) -> int:
    """Upper bound of what one compiled grammar takes once it has been followed to its limits.

    Measured with llguidance 1.9 (docs/extend/measurements.md): 34 MB learnt, 60 bytes for each character of a schema.
    """
    return _LEARNT_BYTES + _BYTES_PER_CHAR * len(grammar)


_UNFORCED = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}
"""Nobody refers to it, but what one grammar of a list sets holds for the lexer of all, whatever the others say."""


def unforced(grammar: str) -> str:
    """The same grammar, without a loop of llguidance 1.9 that nothing bounds.

    Before each mask it follows the bytes that must come next, to allow their usual tokens alone: for ever where no
    other byte can ever come, as after `/a+/ "a"`, whose first lexeme takes every `a`. Without that, each token costs
    what its own bytes do, and the model chooses among all tokens that fit.
    """
    try:
        said = json.loads(grammar)
    except (ValueError, RecursionError):
        return grammar
    if not isinstance(said, dict) or not isinstance(said.get("grammars"), list):
        return grammar
    return json.dumps({**said, "grammars": [*said["grammars"], _UNFORCED]})


_SPACE_MARK = "\u2581"
_FALLBACK_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def tokenizer_for_guides(spec: str) -> str:
    """A tokenizer.json as llguidance can read it, which looks at the decoder to know what bytes a token stands for.

    It wants `ByteFallback` in those that write `\u2581` for a space; many have none, or `Metaspace`, and mean the same.
    """
    try:
        said = json.loads(spec)
        decoder = said["decoder"]
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        marks_spaces = any(
            step.get("replacement") == _SPACE_MARK or step.get("pattern") == {"String": _SPACE_MARK} for step in steps
        )
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return spec  # left to llguidance to refuse
    if not marks_spaces or not {"Replace", "Metaspace", "Fuse", "Strip"}.issuperset(kinds):
        return spec
    return json.dumps(said | {"decoder": _FALLBACK_DECODER})


def fault_on_the_way(matcher: Any, end_token_ids: Collection[int], *, num_paths: int, num_tokens: int) -> str:
    """Have copies of an LLMatcher follow a few answers, of so many tokens each, that its grammar allows.

    What it says of the first that hits a limit; nothing when none does. What is learnt on the way stays in the lexer
    that all copies share.
    """
    for path in range(num_paths):
        copy = matcher.deep_copy()
        _follow(copy, end_token_ids, Random(path), num_tokens)
        if copy.is_error():
            return str(copy.get_error()) or "it cannot be followed"
    return ""


def _follow(matcher: Any, end_token_ids: Collection[int], path: Random, num_tokens: int) -> None:
    for _ in range(num_tokens):
        allowed = bytearray(matcher.compute_bitmask())
        for token_id in end_token_ids:
            allowed[token_id // 8] &= ~(1 << token_id % 8)
        num_allowed = int.from_bytes(allowed, "little").bit_count()
        if matcher.is_stopped() or not num_allowed:
            return
        if not matcher.consume_token(_nth(allowed, path.randrange(num_allowed))):
            return


def _nth(allowed: bytearray, rank: int) -> int:
    """Of the bits that are set, the lowest first."""
    for start in range(0, len(allowed), 8):
        word = int.from_bytes(allowed[start : start + 8], "little")
        if rank >= (count := word.bit_count()):
            rank -= count
            continue
        for _ in range(rank):
            word &= word - 1
        return 8 * start + (word & -word).bit_length() - 1
    raise ValueError("fewer tokens than that are allowed")
