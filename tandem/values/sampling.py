"""Sampling parameters: validated once by the servers, then plain values everywhere.

The bounds stated here are the only ones: HTTP schemas, gRPC servicers and the engine all call `validate`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_TOP_LOGPROBS = 20
MAX_CONTINUATIONS = 256
"""Maximum number of continuations of one beam that a step of a beam search considers."""
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64


class Bound(NamedTuple):
    low: float
    high: float
    open_low: bool = False
    """Whether `low` itself is excluded."""

    def check(self, name: str, value: float) -> None:
        """Raise InvalidRequest naming the field and its bound. Integer bounds require integers."""
        if isinstance(self.low, int):
            _integer(name, value, self.low, int(self.high))
        else:
            _number(name, value, self.low, self.high, open_low=self.open_low)


BOUNDS: Mapping[str, Bound] = {
    "max_tokens": Bound(1, 2**31 - 1),
    "temperature": Bound(0.0, 2.0),
    "top_k": Bound(-1, 2**31 - 1),
    "top_p": Bound(0.0, 1.0, open_low=True),
    "min_p": Bound(0.0, 1.0),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "repetition_penalty": Bound(0.0, 10.0, open_low=True),
    "seed": Bound(MIN_SEED, MAX_SEED),
}
"""Bounds by field, stated only here."""
_MAX_TOKENS, _SEED = BOUNDS["max_tokens"], BOUNDS["seed"]


_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class SamplingParams(NamedTuple):
    """Sampling of one choice. Defaults are the neutral values: they change no logit and stop nothing.

    A named tuple, because several are made for every request: a frozen dataclass takes several times as long.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 keeps every token; servers write it for the -1 of some clients."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = _NO_BIAS
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the choice; the model's own end tokens are added unless `ignore_eos`."""
    ignore_eos: bool = False
    seed: int = 0
    """Always set after the servers: the router draws one when the client sent none."""
    grammar: str | None = None
    """Form that every answer must have, in llguidance's format; None: any."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are never generated: the last token of each is not sampled after the others."""
    num_logprobs: int | None = None
    """None: no logprobs; 0: of the sampled token only; k: also of the k most likely."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def validate(self, *, vocab_size: int, max_tokens: int | None = None, seed: int | None = None) -> None:
        """Raise InvalidRequest naming the field and its bound. `max_tokens`, `seed`: checked instead of the fields."""
        most = self.max_tokens if max_tokens is None else max_tokens
        # Nearly every value is plainly within its bound, which costs no call.
        if type(most) is not int or not _MAX_TOKENS.low <= most <= _MAX_TOKENS.high:
            _MAX_TOKENS.check("max_tokens", most)
        for place, name, kind, (low, high, open_low) in _BOUNDED:
            value: Any = self[place]
            if type(value) is not kind or not low <= value <= high or (open_low and value == low):
                BOUNDS[name].check(name, value)
        drawn = self.seed if seed is None else seed
        if type(drawn) is not int or not _SEED.low <= drawn <= _SEED.high:
            _SEED.check("seed", drawn)
        if type(self.min_tokens) is not int or not 0 <= self.min_tokens <= most:
            _integer("min_tokens", self.min_tokens, 0, most)
        if self.num_logprobs is not None:
            _integer("top_logprobs", self.num_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.grammar is not None:
            self._validate_grammar(self.grammar)
        if self.allowed_token_ids or self.bad_words or self.stop_token_ids or self.logit_bias:
            self._validate_tokens(vocab_size)

    def _validate_tokens(self, vocab_size: int) -> None:
        for token in self.allowed_token_ids:
            _integer("allowed_token_ids", token, 0, vocab_size - 1)
        self._validate_bad_words(vocab_size)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"stop_token_ids: at most {MAX_STOP_TOKENS}", param="stop_token_ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias: at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", bias, -100.0, 100.0)

    def _validate_bad_words(self, vocab_size: int) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words: at most {MAX_BAD_WORDS} sequences of tokens", param="bad_words")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"bad_words: 1 to {MAX_BAD_WORD_TOKENS} tokens each", param="bad_words")
            for token in word:
                _integer("bad_words", token, 0, vocab_size - 1)

    def _validate_grammar(self, grammar: str) -> None:
        if not 0 < len(grammar) <= MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"grammar must have 1 to {MAX_GRAMMAR_CHARS} characters", param="grammar")
        # A complete structure must be allowed to end.
        if self.ignore_eos:
            raise InvalidRequest("ignore_eos cannot be used with structured output", param="ignore_eos")
        if self.min_tokens:
            raise InvalidRequest("min_tokens cannot be used with structured output", param="min_tokens")


_BOUNDED = tuple(
    (SamplingParams._fields.index(name), name, type(bound.low), bound)
    for name, bound in BOUNDS.items()
    if name not in ("max_tokens", "seed")
)
"""The other fields with a bound: place, name, type, bound. A loop over places takes half the time of one over names."""


def _integer(name: str, value: float, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer in [{low}, {high}]", param=name)


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not real or not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(f"{name} must be a number in {'(' if open_low else '['}{low}, {high}]", param=name)
