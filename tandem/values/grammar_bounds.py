"""Limits on following one grammar, the same for the router that refuses grammars and the worker that follows them.

llguidance's lexer learns states while an answer is generated and never forgets them; its own limits allow about 500 MB
of them, and a quarter of a second for the first mask of `a{900000000}`. Schemas of hundreds of properties, and choices
by the thousand, stay far below the limits here. They apply to all copies of a matcher together, which share the states.
"""

import json
from collections.abc import Collection, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

MAX_LEXER_STATES = 20_000
MAX_STEP_FUEL = 100_000
"""Regular expressions derived for one token, which take about 10 ms."""
MAX_STEP_ITEMS = 12_000
"""Parser items for one token; the object with the most properties that `max_items_in_row` allows has 8,192."""
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
"""Arguments of LLParserLimits."""

_TOKEN_S, _TOKEN_S_PER_ENTRY = 4e-3, 5e-8
_MAX_DEBT_TOKENS = 8


class ParserTime:
    """Processor time spent on following one answer, compared with a budget per token.

    A token of a highly ambiguous grammar, such as `s: s s s | s s | "a"`, costs more the longer the answer is. The
    number of parser items does not show it: 500 of them take 4 ms there, and 1,600 take 0.6 ms for an object of 400
    properties. So the thread's own processor time is counted, to which other work on the machine does not add. Time
    beyond the budget is a debt, which is bounded and which later tokens pay back.
    """

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: the budget grows with it, as computing a mask does at worst."""
        self.vocab_size = vocab_size
        self.token_s = _TOKEN_S + _TOKEN_S_PER_ENTRY * vocab_size
        self._debt_s = 0.0

    def add(self, spent_s: float) -> None:
        """Count time that was spent on the next token."""
        self._debt_s += spent_s

    def end_token(self) -> bool:
        """Add a token's budget; returns False when the debt is too large."""
        self._debt_s = max(0.0, self._debt_s - self.token_s)
        return self._debt_s <= _MAX_DEBT_TOKENS * self.token_s


_LEARNT_BYTES = 40 << 20
_BYTES_PER_CHAR = 64


def most_bytes(grammar: str) -> int:
    """Upper bound of the bytes of one compiled grammar once it has been followed to its limits.

    Measured with llguidance 1.9 (docs/extend/measurements.md): 34 MB learnt, 60 bytes for each character of a schema.
    """
    return _LEARNT_BYTES + _BYTES_PER_CHAR * len(grammar)


_UNFORCED = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}
"""An unused grammar: an option that one grammar of a list sets applies to the lexer of all of them."""


def unforced(grammar: str) -> str:
    """The same grammar, with an unbounded loop of llguidance 1.9 disabled.

    Before each mask llguidance follows the bytes that must come next, to allow only their usual tokens. This never ends
    where no other byte can ever come, as after `/a+/ "a"`, whose first lexeme takes every `a`. Without it, each token
    costs what its own bytes do, and the model chooses among all tokens that fit.
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
    """Adapt a tokenizer.json for llguidance, which uses the decoder to find the bytes of a token.

    It requires `ByteFallback` in tokenizers that write `\u2581` for a space; many have none, or `Metaspace`, and mean
    the same.
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
        return spec  # llguidance will refuse it
    if not marks_spaces or not {"Replace", "Metaspace", "Fuse", "Strip"}.issuperset(kinds):
        return spec
    return json.dumps(said | {"decoder": _FALLBACK_DECODER})


def random_walk_error(matcher: Any, end_token_ids: Collection[int], *, num_paths: int, num_tokens: int) -> str:
    """Have copies of an LLMatcher follow `num_paths` random answers that its grammar allows, of `num_tokens` tokens
    each.

    Returns the error of the first that hits a limit, or "" when none does. The states learnt meanwhile stay in the
    lexer that all copies share.
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
    """Index of the bit of this rank among those that are set, lowest first."""
    for start in range(0, len(allowed), 8):
        word = int.from_bytes(allowed[start : start + 8], "little")
        if rank >= (count := word.bit_count()):
            rank -= count
            continue
        for _ in range(rank):
            word &= word - 1
        return 8 * start + (word & -word).bit_length() - 1
    raise ValueError("fewer tokens than that are allowed")
